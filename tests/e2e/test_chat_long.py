"""Long answers, slow ones and what they wait for, slow tabs, and small screens."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from playwright.sync_api import Page, expect

from tests.e2e.chatting import ask, begun, connected, finished, limit, text_of
from tests.e2e.conftest import OpenPage
from tests.server.support.counting import check_counting


def test_ten_thousand_tokens_are_complete_and_the_page_answers_meanwhile(
    server_with: Any, open_page: OpenPage
) -> None:
    server = server_with(model="fake:tokens_per_s=3000")
    page = connected(open_page(server.url))
    limit(page, 10_000)
    answer = begun(ask(page, "How far can you count?"))
    page.get_by_label("Message").fill("typed meanwhile")
    expect(page.get_by_label("Message")).to_have_value("typed meanwhile")
    page.get_by_role("button", name="Use the dark theme").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    assert check_counting(finished(answer))[-1] == 10_000
    expect(answer.locator(".meta")).to_contain_text("10,000 tokens")
    page.reload()
    answer = page.locator("article.assistant")
    expect(answer.locator(".prose")).to_contain_text("10000")
    assert len(check_counting(text_of(answer))) == 10_000


def test_the_end_is_in_view_unless_the_reader_went_up(
    server_with: Any, open_page: OpenPage
) -> None:
    server = server_with(model="fake:tokens_per_s=400")
    page = connected(open_page(server.url, viewport={"width": 600, "height": 400}))
    limit(page, 900)
    answer = begun(ask(page, "How far can you count?"))
    expect(answer.locator(".text")).to_contain_text(" 500 ")
    expect(answer.locator(".meta")).to_be_in_viewport()
    page.locator(".scroller").evaluate("(it) => it.scrollTo(0, 0)")
    finished(answer)
    expect(page.locator("article.user")).to_be_in_viewport()
    expect(answer.locator(".meta")).not_to_be_in_viewport()


def noted(page: Page) -> Callable[[], set[str]]:
    """From now on: the first words below an answer and ends of progress bars, as they were seen."""
    page.evaluate(
        """() => {
            window.noted = new Set();
            const look = () => {
                for (const { textContent } of document.querySelectorAll(".meta"))
                    noted.add(textContent.split(" · ")[0]);
                for (const { max } of document.querySelectorAll("progress")) noted.add(`of ${max}`);
            };
            const what = { subtree: true, childList: true, characterData: true, attributes: true };
            new MutationObserver(look).observe(document.body, what);
        }"""
    )
    return lambda: set(page.evaluate("[...noted]"))


def test_the_reason_an_answer_waits_is_shown(server_with: Any, open_page: OpenPage) -> None:
    """One row: the second answer waits in the queue, then its prompt is prefilled in chunks."""
    server = server_with(model="fake:tokens_per_s=20", max_num_seqs=1, max_num_batched_tokens=64)
    page = connected(open_page(server.url))
    page.get_by_label("Answers per question").select_option("2")
    limit(page, 10)
    notes = noted(page)
    ask(page, "x" * 1000)
    answers = page.locator("article.assistant")
    expect(answers).to_have_count(2)
    for answer in answers.all():
        assert check_counting(finished(answer))[-1] == 10
    assert "waiting, 1 ahead in the queue" in notes() or "waiting" in notes()
    read = [re.match(r"reading ([\d,]+) of ([\d,]+) prompt tokens", note) for note in notes()]
    done = {found[1] for found in read if found}
    (total,) = {found[2].replace(",", "") for found in read if found}
    assert len(done) > 1
    assert f"of {total}" in notes()


def test_a_preempted_response_gets_an_event_and_goes_on(
    server_with: Any, open_page: OpenPage
) -> None:
    """The pool is too small for two."""
    server = server_with(model="fake:tokens_per_s=100", num_gpu_blocks_override=16)
    page = connected(open_page(server.url))
    page.get_by_label("Answers per question").select_option("2")
    limit(page, 180)
    notes = noted(page)
    ask(page, "Go on.")
    answers = page.locator("article.assistant")
    expect(answers).to_have_count(2)
    for answer in answers.all():
        assert check_counting(finished(answer))[-1] == 180
    assert notes() & {f"preempted ({how}), will resume" for how in ("swap", "recompute")}


def test_a_slow_tab_pauses_its_own_answer_alone(server_with: Any, open_page: OpenPage) -> None:
    server = server_with(model="fake:tokens_per_s=2000")
    slow, other = connected(open_page(server.url)), connected(open_page(server.url))
    limit(slow, 4000)
    limit(other, 200)
    answer = begun(ask(slow, "How far can you count?"))
    debugger = slow.context.new_cdp_session(slow)
    debugger.send("Debugger.enable")
    debugger.send("Debugger.pause")  # its script stands still, as in a tab that is too busy
    server.wait_metric('streamer_requests{state="paused"}', 1)
    assert len(check_counting(finished(ask(other, "And you?")))) == 200
    server.wait_metric('streamer_requests{state="paused"}', 1)
    debugger.send("Debugger.resume")
    debugger.send("Debugger.disable")
    assert len(check_counting(finished(answer))) == 4000


def test_the_chat_on_a_phone(server_with: Any, open_page: OpenPage) -> None:
    server = server_with(model="fake:tokens_per_s=400", served_model_name="a-long-model-name")
    page = connected(
        open_page(
            server.url, viewport={"width": 390, "height": 760}, has_touch=True, is_mobile=True
        )
    )
    limit(page, 30)
    page.get_by_label("Answers per question").select_option("2")
    begun(ask(page, "How far can you count?"))
    assert page.evaluate("document.scrollingElement.scrollWidth") == 390
    columns = page.locator(".columns article")
    for i in range(2):
        finished(columns.nth(i))
        box = columns.nth(i).bounding_box()
        assert box is not None
        assert 0 <= box["x"] < box["x"] + box["width"] <= 390
    columns.nth(0).get_by_role("button", name="Show tokens").tap()
    page.locator(".token").nth(2).tap()
    expect(page.get_by_role("button", name="Regenerate from here")).to_be_in_viewport()
    page.get_by_role("button", name="Menu", exact=True).tap()
    expect(page.get_by_role("button", name="Close menu")).to_be_focused()
    page.keyboard.press("Shift+Tab")  # nothing behind the menu can be reached
    assert (
        page.evaluate("document.querySelector('.stage').contains(document.activeElement)") is False
    )
    page.get_by_role("button", name="More actions for How far can you count?").tap()
    expect(page.get_by_role("button", name="Rename", exact=True)).to_be_in_viewport()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Close menu")).to_be_hidden()
    page.get_by_role("button", name="Menu", exact=True).tap()
    page.get_by_role("link", name="Engine", exact=True).tap()
    expect(page.get_by_role("heading", name="Engine", level=1)).to_be_visible()
    page.get_by_role("banner").get_by_role("button", name="New chat").tap()
    expect(page.get_by_label("Message")).to_be_focused()
