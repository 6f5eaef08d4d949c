"""One or two runs as a page: settings, throughput, latencies, distributions, curves, errors.

A single file that loads nothing: its style is inside, it has no script, and its policy forbids
loading either. Follows the reader's light or dark theme. Values in, text out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from .. import plots
from ..markup import Markup, document, join, style, tag
from ..plots import Palette
from ..table import number
from .runs import Pair, Result, Run, pairs, rate_words, settings
from .served import METRICS, PERCENTILES, percentile

STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --text: #1f2328; --soft: #59636e;
  --line: #d1d9e0; --raised: #f6f8fa; --first: #0969da; --second: #bc4c00; --good: #116329;
  --bad: #a40e26; --mark: #fff1bd; --grid: #e4e8ec }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --text: #e6edf3; --soft: #9aa4af;
  --line: #30363d; --raised: #161b22; --first: #58a6ff; --second: #f0883e; --good: #56d364;
  --bad: #ff8a80; --mark: #43350a; --grid: #21262d } }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif }
main { max-width: 1180px; margin: 0 auto; padding: 16px }
h1 { font-size: 22px; line-height: 1.3; margin: 8px 0; overflow-wrap: anywhere }
h2 { font-size: 18px; margin: 28px 0 8px }
.legend { display: flex; flex-wrap: wrap; gap: 4px 20px; padding: 0; margin: 8px 0;
  list-style: none }
.legend li { display: flex; align-items: center; gap: 8px; overflow-wrap: anywhere }
.legend svg { width: 36px; height: 12px; flex: none }
.frame { overflow-x: auto; margin: 0 0 16px; border: 1px solid var(--line); border-radius: 8px;
  position: relative }
.frame:focus-visible, summary:focus-visible { outline: 2px solid var(--first);
  outline-offset: 2px }
table { border-collapse: collapse; width: 100% }
caption { text-align: left; font-weight: 600; padding: 8px 12px; background: var(--raised) }
th, td { padding: 5px 12px; text-align: left; vertical-align: top; font-weight: 400 }
thead th { color: var(--soft); font-size: 13px; min-width: 5em; overflow-wrap: anywhere;
  white-space: normal }
tbody tr { border-top: 1px solid var(--grid) }
.of { font-weight: 600; background: var(--raised) }
td.word, thead th.word:nth-child(4) { white-space: nowrap; min-width: 0 }
.number { text-align: right; font-variant-numeric: tabular-nums }
.number { white-space: nowrap }
td { overflow-wrap: break-word }
.message { overflow-wrap: anywhere; min-width: 16em; font-family: ui-monospace, monospace;
  font-size: 13px }
.differs { background: var(--mark) } mark { background: none; color: inherit; font-weight: 600 }
.better { color: var(--good); font-weight: 600 } .worse { color: var(--bad); font-weight: 600 }
details { border-top: 1px solid var(--line); margin-top: 24px }
summary { cursor: pointer; margin-top: 12px; border-radius: 4px }
summary h2 { display: inline; margin: 0 } summary + .frame { margin-top: 12px }
.plots { display: grid; gap: 16px; margin: 0 0 16px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 320px), 1fr)) }
figure { margin: 0; padding: 10px 8px 4px; border: 1px solid var(--line); border-radius: 8px }
figcaption { font-weight: 600; font-size: 14px; padding: 0 4px 4px }
figure svg { display: block; width: 100%; height: auto }
@media (max-width: 600px) { table { font-size: 14px } th, td { padding: 5px 7px }
  .better, .worse { font-size: 13px } .message { min-width: 12em } }
footer { color: var(--soft); font-size: 13px; margin-top: 24px;
  border-top: 1px solid var(--line) }
"""

COLOURS = Palette(
    "var(--text)", "var(--soft)", "var(--grid)", "var(--bad)", ("var(--first)", "var(--second)")
)


POLICY = "default-src 'none'; style-src 'unsafe-inline'"
NAMES = {
    "ttft": "Time to first token (TTFT)",
    "tpot": "Time per output token (TPOT)",
    "itl": "Between pieces of text (ITL)",
    "e2el": "End to end (E2E)",
}
SAME = 0.05  # ratios nearer to 1 count as equal


class Row(NamedTuple):
    """A line of the table of rates; `more_is_better` None: neither direction is better."""

    title: str
    value: Callable[[Result], float | None]
    more_is_better: bool | None = True


ROWS = (
    Row("Requests done a second", lambda r: r.request_throughput),
    Row("Good requests a second (goodput)", lambda r: r.request_goodput),
    Row("Good requests, % of all", lambda r: 100 * r.goodput_share if r.goodput else None),
    Row("Output tokens a second", lambda r: r.output_throughput),
    Row("All tokens a second", lambda r: r.total_token_throughput),
    Row("Input tokens", lambda r: r.total_input_tokens, None),
    Row("of which cached", lambda r: r.total_cached_tokens, None),
    Row("Output tokens", lambda r: r.total_output_tokens, None),
    Row("Most requests at once", lambda r: r.max_concurrent_requests, None),
    Row("Seconds in all", lambda r: r.duration, False),
    Row("Requests that failed", lambda r: r.failed, False),
    Row("Sent late, 99th percentile, ms", lambda r: r.p99_start_lag_ms, None),
)


class Curve(NamedTuple):
    """A picture over the rate."""

    title: str
    value: Callable[[Result], float | None]
    unit: str = ""


CURVES = (
    Curve("Output tokens a second", lambda r: r.output_throughput),
    Curve("Requests done a second", lambda r: r.request_throughput),
    Curve("Goodput: good requests a second", lambda r: r.request_goodput),
    Curve(
        "Requests that meet every objective",
        lambda r: 100 * r.goodput_share if r.goodput else None,
        "%",
    ),
    Curve("TTFT, 99th percentile, ms", lambda r: percentile(r.times_ms()["ttft"], 99)),
    Curve("TPOT, 99th percentile, ms", lambda r: percentile(r.times_ms()["tpot"], 99)),
)


def page(runs: Sequence[Run]) -> str:
    """The whole file, of one run or of two."""
    title = " beside ".join(run.name for run in runs)
    shown = pairs(runs)
    parts = [tag("h1", "Load test: ", title), _legend(runs), _settings(runs)]
    if any(len(run.results) > 1 for run in runs):
        parts.append(_sweep(runs))
    for index, pair in enumerate(shown):
        parts.append(_pair(f"p{index}", pair, runs, is_open=index == len(shown) - 1))
    parts.append(_definitions(len(runs) > 1))
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", "Load test: ", title),
        style(STYLE + plots.sheet(COLOURS)),
    )
    return document(head, tag("body", tag("main", *parts)))


def _legend(runs: Sequence[Run]) -> Markup:
    """Which line belongs to which run."""
    items = [
        tag(
            "li",
            tag(
                "svg",
                tag("path", d="M1 6H35", class_=f"line {plots.kind_of(i)}"),
                viewBox="0 0 36 12",
                aria_hidden="true",
            ),
            f"{run.name}, {run.results[-1].date}",
        )
        for i, run in enumerate(runs)
    ]
    return tag("ul", *items, class_="legend")


def _settings(runs: Sequence[Run]) -> Markup:
    """The settings of each run; differences are marked."""
    asked = [_asked(run) for run in runs]
    rows = []
    for name in asked[0]:
        values = [each[name] for each in asked]
        differs = len(set(values)) > 1
        cells = [tag("td", value) for value in values]
        if len(runs) > 1:
            says = tag("mark", "differs") if differs else "same"
            cells.append(tag("td", says, class_="word"))
        rows.append(
            tag("tr", tag("th", name, scope="row"), *cells, class_="differs" if differs else None)
        )
    names = [run.name for run in runs]
    heading = ["Setting", *names, *(["Compared"] if len(runs) > 1 else [])]
    table = _table("Settings of the runs", heading, [tag("tbody", *rows)], kind="word")
    return _section("Settings", table)


def _asked(run: Run) -> dict[str, str]:
    """A run's settings, with all its rates in one entry."""
    found = settings(run.results[-1])
    if len(run.results) > 1:
        rates = [f"{r.rate:.4g}" for r in run.results if math.isfinite(r.rate)]
        at_once = [] if len(rates) == len(run.results) else ["all at once"]
        found["Rate"] = ", ".join([f"{' / '.join(rates)} requests/s", *at_once])
    return found


def _sweep(runs: Sequence[Run]) -> Markup:
    """Curves over the rate; a run with all requests at once is left out."""
    pictures = []
    for index, curve in enumerate(CURVES):
        series = []
        for run in runs:
            found = [(r.rate, curve.value(r)) for r in run.results if math.isfinite(r.rate)]
            series.append((run.name, [(rate, v) for rate, v in found if v is not None]))
        if any(points for _, points in series):
            pictures.append(plots.rates(f"c{index}", curve.title, series, curve.unit))
    return _section("Over the rate", tag("div", *pictures, class_="plots"))


def _pair(name: str, pair: Pair, runs: Sequence[Run], is_open: bool) -> Markup:
    """One rate's section; folded, except for the last."""
    results = [result for result in pair if result is not None]
    titles = [rate_words(result.rate) for result in results]
    title = titles[0] if len(set(titles)) == 1 else " beside ".join(titles)
    names = [run.name for run in runs]
    times = [result.times_ms() for result in results]
    drawn = [
        (metric, f"{NAMES[metric]}: share within", "ms", [each[metric] for each in times])
        for metric in METRICS
    ]
    for kind in ("input", "output"):
        lengths = [result.lengths(kind) for result in results]
        drawn.append((kind, f"{kind.title()} tokens: share up to", "tokens", lengths))
    pictures = [
        plots.distribution(f"{name}-{key}", says, unit, list(zip(names, values, strict=True)))
        for key, says, unit, values in drawn
    ]
    return tag(
        "details",
        tag("summary", tag("h2", title)),
        _table("Throughput", _heading("", names), [tag("tbody", *_throughput(results))], title),
        _table("Latency, ms", _heading("", names), list(_latencies(times)), title),
        tag("div", *pictures, class_="plots"),
        _errors(names, results, title),
        open="" if is_open else None,
    )


def _heading(first: str, names: Sequence[str]) -> list[str]:
    return [first, *names, *([f"{names[1]} / {names[0]}"] if len(names) > 1 else [])]


def _throughput(results: Sequence[Result]) -> Iterator[Markup]:
    for row in ROWS:
        values = [row.value(result) for result in results]
        if any(value is not None for value in values):
            yield _row(row.title, values, row.more_is_better)


def _latencies(times: Sequence[dict[str, list[float]]]) -> Iterator[Markup]:
    """A table body per metric, under its name."""
    width = len(times) + 1 + (len(times) > 1)
    for metric in METRICS:
        rows = [tag("tr", tag("th", NAMES[metric], scope="rowgroup", colspan=width, class_="of"))]
        for percent in PERCENTILES:
            values = [percentile(each[metric], percent) if each[metric] else None for each in times]
            rows.append(_row(f"p{percent}", values, False))
        yield tag("tbody", *rows)


def _row(title: str, values: Sequence[float | None], more_is_better: bool | None) -> Markup:
    """A row of values, and the ratio of the second to the first."""
    cells = [tag("td", number(value), class_="number") for value in values]
    if len(values) > 1:
        cells.append(_ratio(values[0], values[1], more_is_better))
    return tag("tr", tag("th", title, scope="row"), *cells)


def _ratio(first: float | None, second: float | None, more_is_better: bool | None) -> Markup:
    """The ratio, in colour and words where it differs from 1 by more than SAME."""
    if not first or second is None:
        return tag("td", "-", class_="number")
    ratio = second / first
    says = f"{ratio:.2f}" if ratio < 10 else number(ratio)
    if more_is_better is None or abs(ratio - 1) < SAME:
        return tag("td", says, class_="number")
    kind = "better" if (ratio > 1) == more_is_better else "worse"
    return tag("td", f"{says} ", tag("span", kind, class_=kind), class_="number")


def _errors(names: Sequence[str], results: Sequence[Result], title: str) -> Markup:
    """Each error message with its count in each run."""
    counted = [result.failures() for result in results]
    messages = sorted({message for found in counted for message in found})
    if not messages:
        return tag("p", "No request failed.")
    rows = [
        tag(
            "tr",
            tag("th", message, scope="row", class_="message"),
            *(tag("td", str(found[message]), class_="number") for found in counted),
        )
        for message in messages
    ]
    return _table("Errors", ["Message", *names], [tag("tbody", *rows)], title)


def _table(
    caption: str,
    heading: Sequence[str],
    bodies: Sequence[Markup],
    where: str = "",
    kind: str = "number",
) -> Markup:
    """A table in a frame that scrolls, by keys too, where it is wider than the page.

    where  distinguishes tables with the same caption for screen readers
    kind   class of the columns after the first: "number" or "word"
    """
    first, *others = heading
    corner = tag("th", first, scope="col") if first else tag("td")
    head = tag("tr", corner, *(tag("th", name, scope="col", class_=kind) for name in others))
    table = tag("table", tag("caption", caption), tag("thead", head), *bodies)
    label = f"{caption}, {where}" if where else caption
    return tag("div", table, class_="frame", role="region", tabindex="0", aria_label=label)


def _section(title: str, *inside: Markup) -> Markup:
    return tag("section", tag("h2", title), *inside)


def _definitions(has_two: bool) -> Markup:
    """Definitions of the page's terms."""
    says = (
        "TTFT runs from sending to the first text; ITL between pieces of text, whatever their "
        "size; TPOT is the rest of the answer divided by its other tokens; E2E ends with the "
        "answer. Tokens are counted by the server's usage; requests that failed have no times. "
        "A request is good if it was answered within every objective."
    )
    more = f" Ratios within {SAME:.0%} of 1 are not judged; single runs differ by as much."
    return tag("footer", tag("p", join(says, more if has_two else "")))
