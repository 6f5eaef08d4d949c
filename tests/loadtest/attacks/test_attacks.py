"""The attacks: one of them on a server of its own, its table, and the frames they send."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from websockets.frames import Frame, Opcode

from streamer.cli import main
from streamer.loadtest.attacks.attackers import PLANS, Tally, frame
from streamer.loadtest.attacks.command import HEADING, Found, rows


def attacks(*flags: str) -> int:
    return main(["loadtest", "attacks", *flags])


def test_a_neighbour_is_measured_alone_and_beside_an_attack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    assert attacks("pings", "--seconds", "0.6", "--out", str(out)) == 0
    (found,) = msgspec.json.decode(out.read_bytes(), type=list[Found])
    assert found.name == "pings"
    assert found.tokens_s > 0
    assert found.tally.sent_bytes > 1000
    assert found.peak_bytes >= found.before_bytes > 1 << 20
    assert PLANS["pings"].says in capsys.readouterr().out


def test_an_unknown_attack_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert attacks("pings", "smoke") == 2
    assert "unknown attack 'smoke'" in capsys.readouterr().out


def test_an_earlier_run_stands_before_a_later_one() -> None:
    was = Found("pings", 8.0, 0.01, 5.0, 1 << 20, 9 << 20, Tally())
    now = Found("pings", 790.0, 0.99, 0.1, 1 << 20, 2 << 20, Tally(9, 3, 2, [0.25, 0.25]))
    heading, row = rows([now], {"pings": was})
    assert heading == list(HEADING)
    assert row[0].startswith("pings: ")
    assert row[1:] == [
        "1% -> 99%",
        "5.00 -> 0.10",
        "8 -> 1",
        "0 -> 3",
        "0 -> 2",
        "- -> 0.25",
    ]


@pytest.mark.parametrize("name", ["priority", "tokenizing"])
def test_a_key_that_asks_for_too_much_is_refused_or_waits_its_turn(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert attacks(name, "--seconds", "1") == 0
    assert PLANS[name].says in capsys.readouterr().out


@pytest.mark.parametrize("length", [0, 125, 126, 65_535, 65_536])
def test_frames_are_those_of_a_client(length: int) -> None:
    data = b"x" * length
    theirs = Frame(Opcode.TEXT, data).serialize(mask=True)
    ours = frame(1, data)
    assert len(ours) == len(theirs)
    head = len(ours) - length - 4
    assert ours[:head] == theirs[:head]
    assert ours.endswith(bytes(4) + data)
