"""The engine view in a real browser: it shows the server's figures, and sends no request while it
is not looked at.
"""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

from tests.e2e.conftest import OpenPage
from tests.server.support.running import Running

STATES = {0: "free", 1: "cached", 2: "leaving", 4: "private", 8: "shared"}
TINY = {"model": "fake:tokens_per_s=200", "num_gpu_blocks_override": 64}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """Its pool is as large as the bundled server's."""
    running = Running(model="fake:tokens_per_s=200", num_gpu_blocks_override=16_384).start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def tiny() -> Iterator[Running]:
    running = Running(**TINY).start()
    yield running
    running.stop()


@pytest.fixture
def page(open_page: OpenPage) -> Page:
    """An empty page."""
    return open_page("about:blank")


def look(page: Page, server: Running) -> None:
    page.goto(server.url + "/#/engine")
    expect(figure(page, "Running")).to_be_visible()


def figure(page: Page, name: str) -> Locator:
    return page.locator(".facts div", has=page.get_by_text(name, exact=True)).locator("dd")


def count(page: Page, state: str, pool: str = "device") -> Locator:
    return page.locator(f'[data-pool="{pool}"] [data-state="{state}"] b')


def button(page: Page, name: str) -> Locator:
    return page.get_by_role("button", name=name, exact=True)


def grid(page: Page, name: str = "Block pool") -> Locator:
    return page.get_by_role("application", name=re.compile(name))


def snapshot_of(server: Running) -> Any:
    return httpx.get(server.url + "/v1/engine").json()["scheduler"]


def states(pool: dict[str, Any]) -> Counter[str]:
    return Counter(STATES[cell] for cell in base64.b64decode(pool["cells"]))


def finish(page: Page, server: Running) -> None:
    button(page, "Stop the load").click()
    expect(button(page, "Start a small load")).to_be_visible()
    server.wait_idle()


def drawn(canvas: Locator) -> str:
    return str(canvas.evaluate("canvas => canvas.toDataURL()"))


def num_colours(canvas: Locator) -> int:
    """Colours of more than a few pixels: of states, not of edges."""
    return int(
        canvas.evaluate(
            """canvas => {
                const { width, height } = canvas;
                const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
                const seen = new Map();
                for (let i = 0; i < data.length; i += 4) {
                    const key = data.slice(i, i + 4).join();
                    if (data[i + 3] === 255) seen.set(key, (seen.get(key) ?? 0) + 1);
                }
                return [...seen.values()].filter((pixels) => pixels > 8).length;
            }"""
        )
    )


def test_a_large_pools_counts_are_the_servers(page: Page, server: Running) -> None:
    body = {"prompt": "x" * 400, "max_tokens": 20}
    httpx.post(server.url + "/v1/completions", json=body, timeout=20)
    server.wait_idle()
    look(page, server)
    now = snapshot_of(server)
    assert now["device"]["num_blocks"] == 16_384
    counts = states(now["device"])
    assert counts["cached"] >= 25
    for state in STATES.values():
        expect(count(page, state)).to_have_text(f"{counts[state]:,}")
    expect(figure(page, "Blocks in use")).to_contain_text("16,384 free")
    summary = page.locator("#engine-summary")
    expect(summary).to_contain_text(f"{counts['free']:,} free, {counts['cached']:,} cached")
    assert num_colours(page.locator('[data-pool="device"] canvas')) == 2


def test_the_keyboard_walks_over_the_blocks(page: Page, server: Running) -> None:
    look(page, server)
    pool = grid(page)
    pool.focus()
    description = page.locator('[data-pool="device"] .description')
    expect(description).to_contain_text("Block 0 ·")
    columns = pool.evaluate("e => Math.floor(e.clientWidth / 4)")
    for key, block in [("ArrowRight", 1), ("ArrowLeft", 0), ("PageDown", 16_383), ("Home", None)]:
        page.keyboard.press(key)
        if block is not None:
            expect(description).to_contain_text(f"Block {block} ·")
    row_start = int(re.findall(r"Block (\d+)", description.text_content() or "")[0])
    assert row_start % columns == 0
    page.keyboard.press("ArrowUp")
    expect(description).to_contain_text(f"Block {row_start - columns} ·")
    spoken = page.locator('[data-pool="device"] [role="status"]')
    expect(spoken).to_have_text(description.text_content() or "")


def test_the_load_shows_batching_and_sharing(page: Page, server: Running) -> None:
    look(page, server)
    button(page, "Start a small load").click()
    card = page.get_by_role("region", name="What to watch")
    for sight in ("Batching", "Sharing"):
        there = card.locator('[data-there="true"]', has_text=sight)
        expect(there).to_be_visible()
    expect(card.locator('[data-there="false"]', has_text="Preemption")).to_be_visible()
    button(page, "Pause").click()
    rows = page.locator(".table-row")
    assert rows.count() >= 5
    expect(count(page, "shared")).not_to_have_text("0")
    assert num_colours(page.locator(".timeline-area canvas")) >= 3
    tip = page.locator(".tip")
    for row in rows.filter(has_text="running").all():  # of which some may share nothing
        row.locator(".table-cells").hover(position={"x": 5, "y": 5})
        expect(tip).to_contain_text(row.locator(".table-name").text_content() or "")
        if "shared ·" in (tip.text_content() or ""):
            break
    expect(tip).to_contain_text("shared · reference count")
    sharing = page.locator('.table-row[data-shares="true"] .table-name')
    names = sharing.all_text_contents()
    assert len(names) >= 2
    assert set(re.findall(r"#\d+", tip.text_content() or "")) == set(names)
    expect(page.locator('[data-pool="device"] .grid-marker')).to_be_visible()
    finish(page, server)


def test_pause_stops_the_drawing_and_live_goes_on(page: Page, server: Running) -> None:
    look(page, server)
    button(page, "Start a small load").click()
    expect(figure(page, "Running")).not_to_contain_text(re.compile("^0"))
    button(page, "Pause").click()
    expect(button(page, "Play")).to_be_visible()
    pictures = page.locator(".grid-area canvas, .timeline-area canvas, .table-cells canvas")
    before = [drawn(canvas) for canvas in pictures.all()]
    figures = page.locator(".facts, .load")
    numbers = figures.all_text_contents()
    assert len(numbers) == 2
    step = snapshot_of(server)["step"]
    # two snapshots later: the slider, which counts them, says that they came
    slider = page.get_by_role("slider", name="Time shown")
    top = int(slider.get_attribute("max") or 0)
    page.wait_for_function(f"() => document.querySelector('.scrubber').max >= {top + 2}")
    assert snapshot_of(server)["step"] > step
    assert [drawn(canvas) for canvas in pictures.all()] == before
    assert figures.all_text_contents() == numbers
    slider.focus()
    page.keyboard.press("ArrowLeft")
    expect(figures.last).not_to_have_text(numbers[1])
    expect(button(page, "Live")).to_have_count(0)
    page.get_by_role("button", name=re.compile("go live")).click()
    expect(button(page, "Live")).to_have_attribute("aria-pressed", "true")
    finish(page, server)
    expect(figure(page, "Running")).to_contain_text(re.compile("^0"))


def test_slow_motion_replays_what_is_buffered(page: Page, server: Running) -> None:
    look(page, server)
    button(page, "Start a small load").click()
    expect(figure(page, "Running")).not_to_contain_text(re.compile("^0"))
    button(page, "1⁄16×").click()
    finish(page, server)
    expect(page.get_by_role("button", name=re.compile("s behind · go live"))).to_be_visible()
    expect(figure(page, "Running")).not_to_contain_text(re.compile("^0"))  # as it was at that time
    expect(page.locator(".load")).to_contain_text("answers so far")
    button(page, "1×").click()
    expect(figure(page, "Running")).to_contain_text(re.compile("^0"))
    expect(page.locator(".load")).to_have_count(0)


def test_a_tiny_pool_shows_preemption_and_swap(page: Page, tiny: Running) -> None:
    look(page, tiny)
    button(page, "Start a small load").click()
    card = page.get_by_role("region", name="What to watch")
    for sight in ("Batching", "Sharing", "Preemption", "Swap"):
        there = card.locator('[data-there="true"]', has=page.get_by_text(sight, exact=True))
        expect(there).to_be_visible()
    row = page.locator('.table-row[data-status="swapped"]').first
    expect(row).to_be_visible()
    button(page, "Pause").click()
    stats = snapshot_of(tiny)["stats"]
    assert stats["preemptions_swap"] + stats["preemptions_recompute"] > 0
    assert stats["swapped_out_blocks"] > 0
    expect(figure(page, "Preemptions")).not_to_contain_text(re.compile("^0"))
    expect(figure(page, "Swapped out")).not_to_contain_text(re.compile("^0"))
    finish(page, tiny)
    button(page, "Live").or_(page.get_by_role("button", name=re.compile("go live"))).click()
    expect(count(page, "swapped", "host")).to_have_text("0")
    expect(count(page, "private")).to_have_text("0")


def test_the_engine_is_followed_only_while_the_view_is_visible(page: Page, server: Running) -> None:
    def followed_by(number: int) -> None:
        server.wait_until(lambda: server.engine.view_feed.num_followers == number)

    look(page, server)
    followed_by(1)
    page.get_by_role("link", name="Chat").click()
    followed_by(0)
    page.get_by_role("link", name="Engine").click()
    followed_by(1)
    page.evaluate(
        """() => {
            Object.defineProperty(document, "visibilityState", { value: "hidden" });
            document.dispatchEvent(new Event("visibilitychange"));
        }"""
    )
    followed_by(0)


def test_leaving_stops_the_load(page: Page, server: Running) -> None:
    look(page, server)
    button(page, "Start a small load").click()
    expect(figure(page, "Running")).not_to_contain_text(re.compile("^0"))
    page.get_by_role("link", name="Chat").click()
    server.wait_idle()


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_without_motion_the_newest_is_shown_too(
    open_page: OpenPage, tiny: Running, motion: str
) -> None:
    phone = {"width": 390, "height": 800}
    page = open_page("about:blank", reduced_motion=motion, viewport=phone)
    look(page, tiny)
    button(page, "Start a small load").click()
    expect(figure(page, "Running")).not_to_contain_text(re.compile("^0"))
    expect(page.locator(".table-row").first).to_be_visible()
    for element in page.locator(".card, .facts, .controls").all():
        box = element.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
    finish(page, tiny)
