"""Host time of a step: the cases are as named, and the table shows them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from streamer.loadtest.inside import host
from streamer.loadtest.inside.host import MIXED_OUTPUT, HostTime, measure_host, report_host


def test_phases_add_up() -> None:
    """Medians of parts are near the median of the whole."""
    got = measure_host(8, 20)
    assert (got.case, got.num_sequences, got.num_steps) == ("decode", 8, 20)
    phases = (got.schedule_us, got.inputs_us, got.draw_us, got.apply_us)
    assert all(us > 0 for us in phases)
    assert 0.5 < sum(phases) / got.step_us < 2


def test_mixed_steps_go_on_as_sequences_leave_and_join() -> None:
    """Twice as many steps as a sequence has tokens: all the first sequences have been replaced."""
    got = measure_host(8, 2 * MIXED_OUTPUT, "mixed")
    assert isinstance(got, HostTime)
    assert got.case == "mixed"


def test_the_report_has_a_row_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "STOPS", 5)
    text = io.StringIO()
    report_host(Console(file=text, width=120), 3, sizes=(1, 5))
    assert [text.getvalue().count(word) for word in ("decode", "stop", "mixed")] == [2, 1, 1]
