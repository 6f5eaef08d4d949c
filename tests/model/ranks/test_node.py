"""A host of ranks: it starts them again, gives up when they keep failing, and ends when asked."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from streamer.config import Config
from streamer.errors import ConfigError
from streamer.model.ranks import node, processes
from tests.chaos.killable import free_port

TOUCH = "import os, sys; open(os.path.join({!r}, str(os.getpid())), 'w')"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    secret = tmp_path / "secret"
    secret.write_text("only these hosts know this")
    return Config(
        model="/a/folder",
        tensor_parallel_size=4,
        nnodes=2,
        node_rank=1,
        master_addr="127.0.0.1",
        master_port=free_port(),
        ranks_secret_file=str(secret),
    )


def test_ranks_that_keep_failing_end_the_host(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "PROGRAM", TOUCH.format(str(tmp_path)) + "; sys.exit(3)")
    monkeypatch.setattr(processes, "pause_s", lambda *_: 0.0)
    assert node.serve(config) == 1
    assert len(list(tmp_path.glob("[0-9]*"))) == 2 * (processes.MAX_TRIES + 1)


def test_a_set_that_ended_in_order_is_started_again_until_the_host_is_stopped(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "PROGRAM", TOUCH.format(str(tmp_path)))
    monkeypatch.setattr(node, "AGAIN_S", 0.0)
    begun, again = node._run, threading.Event()

    def run(places: list[processes.Rendezvous]) -> bool:
        assert [(p.index, p.on_host, p.is_far, p.model) for p in places] == [
            (2, 2, True, "/a/folder"),
            (3, 2, True, "/a/folder"),
        ]
        if again.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
        again.set()
        return begun(places)

    monkeypatch.setattr(node, "_run", run)
    assert node.serve(config) == 0
    assert again.is_set()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_pauses_grow_and_tries_are_bounded() -> None:
    times = [0.0, 1.0, 2.0, 3.0]
    tries = [(times[: i + 1], times[i]) for i in range(4)]
    assert [processes.may_try_again(*one) for one in tries] == [True, True, True, False]
    assert [processes.pause_s(*one) for one in tries[:3]] == [0.0, 1.0, 3.0]
    assert processes.may_try_again(times, processes.TRIES_S + 0.5)  # the first is long ago
    assert processes.pause_s([0.0, 100.0], 100.0) == 0.0


def test_an_address_that_is_none_is_refused(config: Config) -> None:
    with pytest.raises(ConfigError, match=r"master_addr: no\.such") as refusal:
        node.serve(replace(config, master_addr="no.such.host.invalid"))
    assert refusal.value.param == "master_addr"
