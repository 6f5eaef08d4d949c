"""Long chats: back to the end, an answer that is continued, what is left of the context."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Locator, Page, expect

from tests.e2e.chatting import act, ask, begun, connected, finished, limit, text_of
from tests.e2e.conftest import OpenPage
from tests.server.support.counting import check_counting

AT_END = """() => {
    const box = document.querySelector(".scroller");
    return box.scrollHeight - box.scrollTop - box.clientHeight < 60;
}"""
GROW = """() => {
    const more = document.createElement("div");
    more.style.minHeight = "500px";
    document.querySelector(".thread").append(more);
    document.querySelector(".scroller").dispatchEvent(new Event("scroll"));
}"""


def continue_(page: Page) -> Locator:
    return page.get_by_role("button", name="Continue", exact=True)


def test_after_scrolling_away_a_button_jumps_to_the_latest(page: Page) -> None:
    page.set_viewport_size({"width": 900, "height": 360})
    limit(page, 50_000)
    answer = begun(ask(page, "Never stop."))
    expect(answer.locator(".text")).to_contain_text(" 900 ")
    jump = page.get_by_role("button", name="Jump to latest")
    expect(jump).to_have_count(0)  # it follows the end by itself
    scroller = page.locator(".scroller")
    scroller.hover()
    page.mouse.wheel(0, -400)
    expect(jump).to_be_visible()
    top = scroller.evaluate("box => box.scrollTop")
    before = len(text_of(answer))
    page.wait_for_function(
        "length => document.querySelector('.assistant .text').textContent.length > length",
        arg=before + 500,
    )
    assert scroller.evaluate("box => box.scrollTop") == top
    jump.click()
    expect(jump).to_have_count(0)
    page.wait_for_function(AT_END)
    page.get_by_role("button", name="Stop", exact=True).click()
    finished(answer)
    page.evaluate(GROW)  # the earlier scroll's event comes only then
    page.wait_for_function(AT_END)
    expect(jump).to_have_count(0)


def test_an_answer_goes_on_after_a_length_limit_and_after_stop(page: Page) -> None:
    limit(page, 7)
    answer = ask(page, "How far can you count?")
    first = finished(answer).rstrip("\n")
    expect(answer.locator(".meta")).to_contain_text("length limit reached")
    limit(page, 50_000)
    continue_(page).click()
    expect(answer.locator(".text")).to_contain_text(first + " 1 2 3")  # the fake model counts anew
    expect(continue_(page)).to_have_count(0)
    page.get_by_role("button", name="Stop", exact=True).click()
    second = finished(answer).rstrip("\n")
    expect(answer.locator(".meta")).to_contain_text("after 7 kept")
    limit(page, 4)
    page.reload()
    connected(page)
    continue_(page).click()
    expect(answer.locator(".meta")).to_contain_text("4 tokens after")
    third = finished(answer).rstrip("\n")
    assert third == second + " 1 2 3 4"
    expect(page.locator("article")).to_have_count(2)
    act(answer, "Show tokens")  # of the new tokens; the kept text is one piece
    expect(page.locator(".token")).to_have_count(4)
    expect(page.locator(".kept")).to_have_text(second)


def test_an_answer_that_cannot_be_continued_stays_what_it_was(
    server_with: Any, open_page: OpenPage
) -> None:
    """The server retains no answer, so it does not have this one any more."""
    page = connected(open_page(server_with(model="fake", retain_s=0.0).url))
    limit(page, 7)
    answer = ask(page, "How far can you count?")
    first = finished(answer)
    continue_(page).click()
    expect(answer.get_by_role("alert")).to_contain_text("no longer has this answer")
    assert finished(answer) == first
    expect(continue_(page)).to_be_visible()


def test_the_context_has_a_meter_and_a_full_one_says_what_to_do(
    server_with: Any, open_page: OpenPage
) -> None:
    page = connected(open_page(server_with(model="fake", max_model_len=600).url))
    meter = page.get_by_role("meter", name="Context used")
    expect(meter).to_have_count(0)
    limit(page, 100)
    assert len(check_counting(finished(ask(page, "How far can you count?")))) == 100
    used = int(meter.get_attribute("value") or 0)
    assert 100 < used < 200
    expect(page.locator(".context")).to_have_text(f"{used} of 600 tokens")
    limit(page, 50)
    finished(ask(page, "And on."))
    limit(page, 1_000)
    continue_(page).click()
    note = page.locator(".context-note")
    expect(note).to_contain_text("The context is full")
    expect(continue_(page)).to_have_count(0)  # nothing more fits
    page.reload()
    expect(note).to_contain_text("edit an earlier question")
    note.get_by_role("button", name="Start a new chat").click()
    expect(page.locator("article")).to_have_count(0)
    expect(note).to_have_count(0)
