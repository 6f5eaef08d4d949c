"""Results as tables: for the terminal, as plain text, as Markdown.

Rows of text in, the first of them the heading; nothing is measured or written here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

Rows = Sequence[Sequence[str]]


def markdown(rows: Rows) -> str:
    """The rows as a Markdown table."""
    heading, *body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [heading, ["---"] * len(heading), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plain(rows: Rows) -> str:
    """Columns as wide as their longest cell; the first aligned left, the others right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def terminal(rows: Rows, title: str = "", note: str = "", words: Sequence[int] = (0,)) -> Table:
    """A rich Table: the console fits it to its width and renders markup in cells.

    words  indexes of the columns that are aligned left
    """
    from rich.table import Table

    heading, *body = rows
    gap = 2 if len(heading) <= 10 else 1  # 12 columns are to fit in 80 characters
    drawn = Table(title=title, caption=note, box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for i, name in enumerate(heading):
        drawn.add_column(name, justify="left" if i in words else "right")
    for row in body:
        drawn.add_row(*row)
    return drawn


def number(value: float | str | None) -> str:
    """Three significant digits or all integer digits, grouped by thousands; "-" for None."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
