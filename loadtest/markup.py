"""HTML and SVG from values: text is escaped unless it is markup already. Text out, nothing drawn.

`tag("td", "a < b")` is safe whatever the text says; only this module makes Markup.
"""

from __future__ import annotations

from html import escape

VOID = frozenset(["meta", "br"])


class Markup(str):
    """Text that is already markup: inserted into other markup without escaping."""

    __slots__ = ()


def tag(name: str, /, *inside: str, **attributes: str | float | None) -> Markup:
    """An element. Attributes: `class_` and `for_` lose the underscore, others become dashes;
    numbers are rounded to a tenth, and None leaves the attribute out."""
    written = "".join(
        f' {_name(key)}="{_value(value)}"' for key, value in attributes.items() if value is not None
    )
    if name in VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(*inside)}</{name}>")


def join(*parts: str) -> Markup:
    """The parts concatenated; parts that are not Markup are escaped."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def style(text: str) -> Markup:
    """A style element of our own text, which is not escaped."""
    return Markup(f"<style>{text}</style>")


def document(*inside: str) -> str:
    """A whole page in English."""
    return "<!doctype html>\n" + tag("html", *inside, lang="en") + "\n"


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _value(value: str | float) -> str:
    return escape(value) if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")
