"""The HTML report: its structure, figures by hand, escaping, and errors for bad files."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from streamer.cli import main
from streamer.loadtest.markup import Markup, join, tag
from streamer.loadtest.open_loop.fitting import Cut
from streamer.loadtest.open_loop.page import STYLE, page
from streamer.loadtest.open_loop.runs import Result, Run
from streamer.loadtest.open_loop.served import Conditions, Outcome, percentile, summary

VOID = {"meta"}
EVIL = "<script>alert('&\"')</script>"


class Tree(HTMLParser):
    """Elements as (name, attributes); every end must fit, and text is kept by element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        self.text.append((self.open[-1] if self.open else "", data))

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for found, attributes in self.elements if found == name]


def values(rate: float = 2.0, slower: float = 1.0, model: str = "m", error: str = "503") -> Any:
    outcomes = [
        Outcome(0.0, 0.0, 0.3 * slower, 0.1 * slower, [0.1 * slower] * 2, 10, 4, 5),
        Outcome(0.5, 0.5, 1.0 * slower, 0.2 * slower, [0.8 * slower], 20, 0, 3),
        Outcome(1.0, 1.0, error=error),
    ]
    conditions = Conditions(
        "20261122-010203", "alpaca", model, rate, 1.0, {"ttft": 150.0}, 7, Cut()
    )
    return summary(outcomes, conditions, 2.0 * slower)


def write(place: Path, found: Any) -> Path:
    place.write_text(json.dumps(found))
    return place


def rows(tree: str) -> dict[str, list[str]]:
    """First cell -> the others, of every row; of equal first cells the first row."""
    found: dict[str, list[str]] = {}
    for row in re.findall(r"<tr[^>]*>(.*?)</tr>", tree):
        first, *others = [re.sub(r"<[^>]+>", "", cell) for cell in re.split(r"</t[hd]>", row)[:-1]]
        found.setdefault(first, others)
    return found


def test_two_files_side_by_side(tmp_path: Path) -> None:
    first = write(tmp_path / "a.json", values())
    second = write(tmp_path / "b.json", values(slower=2.0, model="n"))
    out = tmp_path / "report.html"
    names = ["--names", "before", "after"]
    assert main(["loadtest", "report", str(first), str(second), "--out", str(out), *names]) == 0
    text = out.read_text(encoding="utf-8")
    tree = Tree(text)
    table = rows(text)
    assert table["Model"] == ["m", "n", "differs"]
    assert table["Seed"] == ["7", "7", "same"]
    assert table["p50"] == ["150", "300", "2.00 worse"]  # of TTFT: 100 and 200 ms, then twice
    assert table["Requests done a second"] == ["1", "0.5", "0.50 worse"]
    assert table["Good requests, % of all"] == ["33.3", "0", "0.00 worse"]
    assert table["503"] == ["1", "1"]
    assert "beside" in "".join(data for name, data in tree.text if name == "title")
    assert len(tree.all("polyline")) == 12  # six distributions of two runs
    assert not any(run in text for run in ("Over the rate", "a.json"))


def test_sweeps_have_curves_and_a_part_a_rate(tmp_path: Path) -> None:
    folders = []
    for name, rates in (("x", (1.0, 2.0, float("inf"))), ("y", (2.0, 4.0, float("inf")))):
        (tmp_path / name).mkdir()
        for rate in rates:
            write(tmp_path / name / f"{rate:.4g}qps.json", values(rate))
        folders.append(str(tmp_path / name))
    out = tmp_path / "r.html"
    assert main(["loadtest", "report", *folders, "--out", str(out)]) == 0
    tree = Tree(out.read_text(encoding="utf-8"))
    heads = [data for name, data in tree.text if name == "h2"]
    assert heads == ["Settings", "Over the rate", "2 requests/s", "all at once"]
    assert ["open" in each for each in tree.all("details")] == [False, True]
    labels = [each["aria-label"] for each in tree.all("div") if "aria-label" in each]
    assert len(labels) == len(set(labels)) == 1 + 2 * 3
    assert len(tree.all("circle")) == 6 * (2 + 2)  # six curves, without "all at once"
    assert len(tree.all("polyline")) == 6 * 2 + 2 * 6 * 2


def test_one_run_alone(tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    file = write(tmp_path / "a.json", values())
    assert main(["loadtest", "report", str(file), "--out", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    assert rows(text)["p50"] == ["150"]
    assert len(Tree(text).all("polyline")) == 6
    assert not any(word in text for word in ("differs</", "better</", "Compared"))


def test_a_page_loads_nothing_and_is_accessible(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", values())
    text = page([Run.read(file, "one"), Run.read(file, "two")])
    tree = Tree(text)
    for name, attributes in tree.elements:
        assert name not in ("script", "link", "img", "iframe", "object", "image", "use")
        assert not {"src", "href", "style", "onload"} & set(attributes)
    assert "url(" not in text
    assert "default-src 'none'" in str(tree.all("meta")[1]["content"])
    ids = [str(attributes["id"]) for _, attributes in tree.elements if "id" in attributes]
    assert len(ids) == len(set(ids)) > 0
    pictures = [each for each in tree.all("svg") if each.get("role") == "img"]
    for each in pictures:
        assert set(str(each["aria-labelledby"]).split()) <= set(ids)
    assert len(pictures) == len(tree.all("desc")) == 6
    assert len(tree.all("table")) == len(tree.all("caption")) == 4
    assert {str(each["scope"]) for each in tree.all("th")} == {"col", "row", "rowgroup"}
    assert tree.all("html") == [{"lang": "en"}]


def test_what_files_say_is_escaped(tmp_path: Path) -> None:
    found = values(model=EVIL, error=EVIL) | {"label": EVIL}
    run = Run.read(write(tmp_path / "a.json", found), EVIL)
    tree = Tree(page([run, run]))
    assert not tree.all("script")
    assert sum(EVIL in data for _, data in tree.text) > 8


def test_colours_are_distinguishable_from_the_page() -> None:
    """WCAG's contrast, 4.5 and more, of every colour of text and lines on their background."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    light, dark = STYLE.split("@media")[:2]
    for theme in (light, dark):
        colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", theme))
        for text in ("text", "soft", "first", "second", "good", "bad"):
            for ground in ("page", "raised") if text != "text" else ("page", "raised", "mark"):
                pair = sorted(luminance(colours[name]) + 0.05 for name in (text, ground))
                assert pair[1] / pair[0] >= 4.5, (text, ground, colours)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ttfts": "absent"}, "a.json: Object missing required field `ttfts`"),
        ({"itls": [[0.1]]}, "a.json: 1 itls of 3 requests"),
        ({"seed": "x"}, "`$.seed`"),
        ({"request_rate": "fast"}, "could not convert string to float: 'fast'"),
    ],
)
def test_a_bad_file_is_named_with_its_field(
    change: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {key: value for key, value in (values() | change).items() if value != "absent"}
    file = write(tmp_path / "a.json", found)
    out = tmp_path / "r.html"
    assert main(["loadtest", "report", str(file), "--out", str(out)]) == 2
    output = capsys.readouterr().out
    assert says in output
    assert str(file) in output
    assert not out.exists()


def test_unreadable_results_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "text", "x")
    for words, says in (
        ([tmp_path / "empty"], "no result files"),
        ([tmp_path / "none.json"], "No such file"),
        ([tmp_path / "text"], "Expected `object`"),
        ([tmp_path / "text", "--names", "a", "b"], "2 names for 1 runs"),
    ):
        assert main(["loadtest", "report", *map(str, words)]) == 2
        assert says in capsys.readouterr().out


def test_runs_of_one_name_and_without_a_rate_in_common(tmp_path: Path) -> None:
    places = []
    for folder, rate in (("a", 1.0), ("b", 3.0)):
        (tmp_path / folder).mkdir()
        places.append(str(write(tmp_path / folder / "x.json", values(rate))))
    out = tmp_path / "r.html"
    assert main(["loadtest", "report", *places, "--out", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    assert "x (A) beside x (B)" in text
    assert "1 requests/s beside 3 requests/s" in text
    assert rows(text)["Rate"] == ["1 requests/s", "3 requests/s", "differs"]


def test_percentiles_are_those_of_the_file(tmp_path: Path) -> None:
    """The page computes them anew from the requests' times, and finds what the open loop found."""
    found = values()
    result = Result.read(write(tmp_path / "a.json", found))
    for metric, times in result.times_ms().items():
        assert percentile(times, 99) == pytest.approx(found[f"p99_{metric}_ms"])


def test_markup_is_what_tag_makes() -> None:
    assert tag("p", "a<b", Markup("<i></i>"), class_="x y", aria_label='"', r=3.04, no=None) == (
        '<p class="x y" aria-label="&quot;" r="3">a&lt;b<i></i></p>'
    )
    assert join("&", tag("br")) == "&amp;<br>"
