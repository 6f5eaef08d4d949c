"""Tables of text, and the format of numbers in them."""

from __future__ import annotations

import pytest

from streamer.loadtest import table


def test_plain_columns_line_up() -> None:
    lines = table.plain([["a", "bb"], ["ccc", "1"]]).splitlines()
    assert lines == ["a    bb", "ccc   1"]


def test_markdown_keeps_a_bar_within_its_cell() -> None:
    rows = [("a", "b|c"), ("1", "2")]
    assert table.markdown(rows).splitlines() == ["| a | b\\|c |", "| --- | --- |", "| 1 | 2 |"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((None, "-"), ("as it is", "as it is"), (1234.5, "1,234"), (99.54, "99.5")),
        *((12.34, "12.3"), (3.0, "3"), (0.123456, "0.123")),
    ],
)
def test_numbers(value: float | str | None, text: str) -> None:
    assert table.number(value) == text
