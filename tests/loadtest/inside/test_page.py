"""bench page: a short run in a real browser has all its measurements. No time is asserted."""

from __future__ import annotations

import argparse
from io import StringIO
from pathlib import Path

import msgspec
from rich.console import Console

from streamer.loadtest.inside.page import command as page
from streamer.loadtest.inside.page.command import Report


def test_every_row_of_the_table_is_measured(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    page.add_arguments(parser)
    file = tmp_path / "page.json"
    # An answer of 3 s: it has to stream still when the browser comes to look.
    flags = ["--loads", "1", "--seconds", "1", "--tokens", "1200", "--json", str(file)]
    console = Console(file=StringIO(), width=120)
    assert page.run(parser.parse_args(flags), console) == 0
    report = msgspec.json.decode(file.read_bytes(), type=Report)
    (load,) = report.loads
    assert 5_000 < load.num_bytes <= page.FIRST_LOAD_BYTES  # the one budget that is not a time
    assert load.painted_s > 0
    assert load.interactive_s > 0
    for frames in (report.four, report.long):
        assert 0 < frames.p50_ms <= frames.p95_ms <= frames.p99_ms <= frames.worst_ms
        assert 0 <= frames.missed <= frames.late <= 1
        assert frames.busy > 0
        assert frames.num_tokens > 0
        assert frames.heap_mib > 0
    assert (report.four.num_answers, report.long.num_answers) == (4, 1)
    assert report.long.num_tokens <= 1200
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for row in ("first load, compressed", "until one can type", "one answer of 1,200 tokens"):
        assert row in text
