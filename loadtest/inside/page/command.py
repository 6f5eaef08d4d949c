"""`streamer bench page`: the page's cost in a browser, beside its budget.

The built page in Chromium over the fake model, each server in its own process: bytes of the first
load, time until the user can type, frame times while answers stream, memory afterwards. The figures
are printed and not asserted; web/README.md has some.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from streamer.errors import ConfigError, StreamerError
from streamer.loadtest.table import terminal

if TYPE_CHECKING:
    from playwright.sync_api import Browser, CDPSession, Page, Request, ViewportSize
    from rich.console import Console
    from rich.table import Table

FIRST_LOAD_BYTES, INTERACTIVE_S, FRAMES_PER_S = 250_000, 1.0, 60
FRAME_MS = 1000 / FRAMES_PER_S
JITTER_MS = 1.0  # a frame up to this much late still counts as on time
NUM_ANSWERS = 4
RATE = 100  # tokens a second of each
LONG_RATE = 400  # of the one long answer
WAIT_MS = 120_000.0
VIEW: ViewportSize = {"width": 1280, "height": 800}
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")

# In every page from its start: records when the user can type and the socket is open, and frames.
WATCH = """(() => {
    const seen = (window.__bench = { frames: [], ready: 0 });
    const each = (now) => {
        seen.frames.push(now);
        if (!seen.ready && document.activeElement?.matches("textarea")
            && document.querySelector('[data-state="connected"]')) seen.ready = performance.now();
        requestAnimationFrame(each);
    };
    requestAnimationFrame(each);
})()"""


class Load(msgspec.Struct, frozen=True):
    """A first load with nothing cached.

    num_bytes      of all bodies as sent, with files that are prefetched for a first answer
    painted_s      from the start of the navigation to the first content
    interactive_s  until the message box had the focus and the socket was open
    """

    num_bytes: int
    painted_s: float
    interactive_s: float


class Frames(msgspec.Struct, frozen=True):
    """Frame times while answers streamed.

    frames_per_s   of the whole period;  p50_ms, p95_ms, p99_ms, worst_ms  from one to the next
    late, missed   share that took longer than one, and than two, sixtieths of a second
    busy           share of the time in which the main thread worked
    heap_mib       JavaScript's memory afterwards, garbage collected
    num_answers    that streamed;  num_tokens  that they got
    """

    seconds: float
    num_answers: int
    num_tokens: int
    frames_per_s: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    worst_ms: float
    late: float
    missed: float
    busy: float
    heap_mib: float


class Report(msgspec.Struct, frozen=True):
    """All that was measured."""

    browser: str
    loads: list[Load]
    four: Frames
    long: Frames


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The numbers of loads and seconds to measure."""
    parser.add_argument(
        "--loads",
        type=int,
        default=7,
        help="number of first loads, of which the median is taken (7)",
    )
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="how long four answers are watched (15)"
    )
    parser.add_argument(
        "--tokens", type=int, default=10_000, help="length of the long answer in tokens (10,000)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write all figures to this file"
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure everything, then print one table."""
    with contextlib.ExitStack() as stack:
        browser = stack.enter_context(chromium())
        four = stack.enter_context(_server(f"fake:tokens_per_s={RATE}"))
        with console.status("first loads"):
            _first_load(browser, four)  # the server's first request is not what is measured
            loads = [_first_load(browser, four) for _ in range(args.loads)]
        with console.status("four answers"):
            four_answers = _four_answers(browser, four, args.seconds)
        model = f"fake:tokens_per_s={LONG_RATE},length={args.tokens}"
        with console.status("a long answer"), _server(model) as url:
            long_answer = _long_answer(browser, url)
        report = Report(browser.version, loads, four_answers, long_answer)
    console.print(_table(report, args.tokens))
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    return 0


# ---------------------------------------------------------------- measuring


def _first_load(browser: Browser, url: str) -> Load:
    with _page(browser, url) as page:
        asked: list[Request] = []
        page.on("requestfinished", lambda request: asked.append(request))
        _open(page, url)
        page.wait_for_load_state("networkidle")
        bodies = [request.sizes()["responseBodySize"] for request in asked]
        painted_ms, ready_ms = page.evaluate(
            "[performance.getEntriesByName('first-contentful-paint')[0].startTime, __bench.ready]"
        )
    return Load(sum(bodies), painted_ms / 1000, ready_ms / 1000)


def _four_answers(browser: Browser, url: str, seconds: float) -> Frames:
    with _page(browser, url, {"answers": NUM_ANSWERS}) as page:
        _open(page, url)
        cdp = _begin(page)
        page.wait_for_timeout(1000)  # the first tokens of all
        before = _mark(page, cdp)
        page.wait_for_timeout(seconds * 1000)
        frames = _frames(page, cdp, before)
        page.keyboard.press("Escape")
    return frames


def _long_answer(browser: Browser, url: str) -> Frames:
    with _page(browser, url) as page:
        _open(page, url)
        cdp = _begin(page)
        before = _mark(page, cdp)
        for _ in range(int(WAIT_MS / 250)):
            page.wait_for_timeout(250)  # polling every frame would take time from the page
            if not page.locator("article.assistant.live").count():
                return _frames(page, cdp, before)
    raise StreamerError(f"the long answer took more than {WAIT_MS / 1000:.0f} s")


def _open(page: Page, url: str) -> None:
    answer = page.goto(url)
    if answer is None or not answer.ok:
        raise StreamerError("the page is not built: make page")
    page.wait_for_timeout(200)
    for _ in range(int(WAIT_MS / 50)):
        if page.evaluate("__bench.ready"):
            return
        page.wait_for_timeout(50)
    raise StreamerError("the page never became ready")


def _begin(page: Page) -> CDPSession:
    """Send a message; returns when the first token is on the screen."""
    cdp = page.context.new_cdp_session(page)
    cdp.send("Performance.enable")
    page.keyboard.type("How far can you count?")
    page.keyboard.press("Enter")
    page.locator("article.assistant .text").filter(has_text="1").first.wait_for(timeout=WAIT_MS)
    return cdp


class _Mark(msgspec.Struct, frozen=True):
    work_s: float
    heap_bytes: float
    num_answers: int
    num_tokens: int


def _mark(page: Page, cdp: CDPSession) -> _Mark:
    """Counts since the start; restarts the recording of frames."""
    metrics = _metrics(cdp)
    texts = page.locator("article.assistant .text").all_text_contents()
    page.evaluate("void (__bench.frames.length = 0)")
    tokens = sum(int(words[-1]) for words in map(str.split, texts) if words)  # the fake counts
    work_s, heap_bytes = metrics["TaskDuration"], metrics["JSHeapUsedSize"]
    return _Mark(work_s, heap_bytes, len(texts), tokens)


def _frames(page: Page, cdp: CDPSession, before: _Mark) -> Frames:
    times: list[float] = page.evaluate("__bench.frames")
    work_s = _metrics(cdp)["TaskDuration"] - before.work_s
    cdp.send("HeapProfiler.collectGarbage")
    after = _mark(page, cdp)
    took = sorted(b - a for a, b in pairwise(times))
    seconds = (times[-1] - times[0]) / 1000

    def share_longer(num_frames: int) -> float:
        return sum(ms > num_frames * FRAME_MS + JITTER_MS for ms in took) / len(took)

    return Frames(
        seconds=seconds,
        num_answers=after.num_answers,
        num_tokens=after.num_tokens - before.num_tokens,
        frames_per_s=len(took) / seconds,
        p50_ms=median(took),
        p95_ms=took[int(len(took) * 0.95)],
        p99_ms=took[int(len(took) * 0.99)],
        worst_ms=took[-1],
        late=share_longer(1),
        missed=share_longer(2),
        busy=work_s / seconds,
        heap_mib=after.heap_bytes / (1 << 20),
    )


def _metrics(cdp: CDPSession) -> dict[str, float]:
    return {m["name"]: m["value"] for m in cdp.send("Performance.getMetrics")["metrics"]}


# ---------------------------------------------------------------- browser and server


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """This machine's Chromium, driven by Playwright. ConfigError where one of them is missing."""
    from streamer.cli.doctor import BROWSERS

    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise ConfigError("bench page drives a browser: pip install playwright") from None
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        raise ConfigError(f"bench page needs a browser: {', '.join(BROWSERS)}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@contextlib.contextmanager
def _server(model: str) -> Iterator[str]:
    """The URL of a server in a process of its own."""
    flags = ("--port", "0", "--log-level", "warning", "--drain-timeout", "0")
    process = subprocess.Popen(
        [sys.executable, "-m", "streamer", "serve", model, *flags],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        if process.stdout is None:
            raise StreamerError("the server has no output")
        for line in process.stdout:
            if found := re.search(r"http://\S+", line):
                yield found[0]
                return
        raise StreamerError("the server did not start")
    finally:
        process.terminate()
        process.communicate()


@contextlib.contextmanager
def _page(browser: Browser, url: str, settings: dict[str, Any] | None = None) -> Iterator[Page]:
    """A page in a new browser context with these stored settings."""
    context = browser.new_context(viewport=VIEW)
    context.add_init_script(WATCH)
    if settings:
        kept = msgspec.json.encode(msgspec.json.encode(settings).decode()).decode()
        context.add_init_script(f"localStorage.setItem('streamer.settings', {kept})")
    yield context.new_page()
    context.close()


# ---------------------------------------------------------------- the table


Row = tuple[str, str, str, str]


def _table(report: Report, num_tokens: int) -> Table:
    num_bytes = max(load.num_bytes for load in report.loads)
    waits = sorted(load.interactive_s for load in report.loads)
    typing, painted = median(waits), median(load.painted_s for load in report.loads)
    rows: list[Row] = [
        ("", "budget", "measured", ""),
        (
            "first load, compressed",
            f"{FIRST_LOAD_BYTES / 1000:.0f} kB",
            f"{num_bytes / 1000:.1f} kB",
            _verdict(num_bytes <= FIRST_LOAD_BYTES),
        ),
        (
            "until one can type",
            f"{INTERACTIVE_S:.0f} s",
            f"{typing:.2f} s",
            _verdict(typing <= INTERACTIVE_S),
        ),
        (f"  shortest, longest of {len(waits)}", "", _list("s", 2, waits[0], waits[-1]), ""),
        ("  first content", "", f"{painted:.2f} s", ""),
        *_frame_rows(f"{report.four.num_answers} at once, {RATE} tokens/s each", report.four),
        *_frame_rows(f"one answer of {num_tokens:,} tokens", report.long),
    ]
    note = f"Chromium {report.browser}, headless: drawn in software"
    return terminal(rows, note=note, words=(0, 3))


def _frame_rows(what: str, frames: Frames) -> list[Row]:
    times = (frames.p50_ms, frames.p95_ms, frames.p99_ms, frames.worst_ms)
    arrived = f"{frames.num_tokens / frames.seconds:,.0f} a second"
    return [
        ("", "", "", ""),
        (
            what,
            f"{FRAMES_PER_S} frames/s",
            f"{frames.frames_per_s:.1f} frames/s",
            _verdict(frames.frames_per_s >= FRAMES_PER_S - 1),
        ),
        ("  p50, p95, p99, worst frame", "", _list("ms", 1, *times), ""),
        (
            "  over 16.7 ms, over 33 ms",
            "",
            _list("%", 2, 100 * frames.late, 100 * frames.missed),
            "",
        ),
        ("  main thread at work", "", f"{100 * frames.busy:.0f} %", ""),
        ("  tokens that arrived", "", arrived, ""),
        ("  JavaScript's memory after", "", f"{frames.heap_mib:.1f} MiB", ""),
    ]


def _verdict(is_met: bool) -> str:
    return "[green]met[/]" if is_met else "[red]not met[/]"


def _list(unit: str, digits: int, *numbers: float) -> str:
    return " / ".join(f"{number:.{digits}f}" for number in numbers) + f" {unit}"
