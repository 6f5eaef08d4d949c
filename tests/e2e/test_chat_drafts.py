"""Text that is not sent yet: drafts, edits and messages that wait, each in its own chat."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import Locator, Page, expect

from tests.e2e.chatting import ask, begun, connected, finished, limit
from tests.e2e.conftest import OpenPage
from tests.e2e.test_chat_history import entries, two_chats
from tests.server.support.counting import check_counting
from tests.server.support.running import Running

CHAT = re.compile(r"#/chat/[0-9a-f]{32}$")


def message(page: Page) -> Locator:
    return page.get_by_label("Message", exact=True)


def questions(page: Page) -> Locator:
    return page.locator("article.user .text")


def new_chat(page: Page) -> None:
    page.get_by_role("button", name="New chat", exact=True).click()


def test_a_draft_and_an_edit_belong_to_their_chat_and_stay_after_a_reload(page: Page) -> None:
    two_chats(page)
    pears, apples = entries(page).first, entries(page).last
    message(page).fill("a draft on pears")
    new_chat(page)
    expect(message(page)).to_have_value("")
    message(page).fill("a draft of a new chat")
    apples.click()
    expect(message(page)).to_have_value("")
    message(page).fill("a draft on apples")
    page.locator("article.user").hover()
    page.get_by_role("button", name="Edit question").click()
    message(page).fill("Of apples and trees")
    pears.click()
    expect(message(page)).to_have_value("a draft on pears")
    expect(page.locator(".editing")).to_have_count(0)
    page.reload()
    expect(message(page)).to_have_value("a draft on pears")
    apples.click()
    expect(message(page)).to_have_value("Of apples and trees")
    page.keyboard.press("Escape")  # the edit ends, and the earlier draft is there again
    expect(message(page)).to_have_value("a draft on apples")
    expect(page.locator(".editing")).to_have_count(0)
    new_chat(page)
    expect(message(page)).to_have_value("a draft of a new chat")
    connected(page)
    message(page).press("Enter")
    expect(questions(page)).to_have_text(["a draft of a new chat"])
    new_chat(page)
    expect(message(page)).to_have_value("")  # it was sent
    apples.click()
    expect(questions(page)).to_have_text(["Of apples"])


def test_what_is_sent_while_an_answer_streams_waits_and_is_shown(
    open_page: OpenPage, server_with: Any
) -> None:
    # At the rate of the other tests the answer fills both tabs with work where the machine is busy.
    page = connected(open_page(server_with(model="fake:tokens_per_s=50").url))
    limit(page, 50_000)
    begun(ask(page, "Never stop."))
    for text in ("And then?", "And more?", "No."):
        message(page).fill(text)
        message(page).press("Enter")
    waits = page.locator("article.waits")
    expect(waits.locator(".wait > span")).to_have_text(
        ["Waiting for the current answer to finish."] * 3
    )
    page.get_by_role("button", name="Take back").click()
    expect(message(page)).to_have_value("No.")
    other = page.context.new_page()
    other.goto(page.url)
    expect(other.locator("article.waits .wait > span")).to_have_text(["Not sent."] * 2)
    page.reload()
    begun(page.locator("article.assistant"))
    expect(waits).to_have_count(2)
    expect(message(page)).to_have_value("No.")
    limit(page, 5)
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(waits).to_have_count(0)
    answers = page.locator("article.assistant")
    expect(answers).to_have_count(2)  # one answer for both: they are one turn
    check_counting(finished(answers.last))
    expect(questions(page)).to_have_text(["Never stop.", "And then?", "And more?"])
    expect(other.locator("article")).to_have_count(5)
    expect(other.locator("article.waits")).to_have_count(0)
    other.close()


def test_each_chat_has_an_address(page: Page, server: Running) -> None:
    two_chats(page)
    expect(page).to_have_url(CHAT)
    pears = page.url
    entries(page).last.click()
    expect(questions(page)).to_have_text(["Of apples"])
    apples = page.url
    new_chat(page)
    expect(page).to_have_url(server.url + "/#/")
    page.go_back()
    expect(questions(page)).to_have_text(["Of apples"])
    page.go_back()
    expect(questions(page)).to_have_text(["Of pears"])
    page.get_by_role("link", name="Engine", exact=True).click()
    page.get_by_role("link", name="Chat", exact=True).click()
    expect(page).to_have_url(pears)
    other = page.context.new_page()
    other.goto(apples)
    expect(questions(other)).to_have_text(["Of apples"])
    other.goto(server.url + "/#/chat/" + 32 * "0")
    expect(other.get_by_role("heading", name="Chat not found")).to_be_visible()
    other.get_by_role("main").get_by_role("button", name="New chat").click()
    expect(other).to_have_url(server.url + "/#/")
    expect(other.get_by_role("heading", name="What would you like to know?")).to_be_visible()
    other.close()


def test_a_system_prompt_is_of_one_chat_and_is_shown(open_page: OpenPage, server: Running) -> None:
    page = open_page("about:blank")
    sent: list[str] = []
    page.on("websocket", lambda ws: ws.on("framesent", lambda data: sent.append(str(data))))
    page.goto(server.url)
    two_chats(connected(page))
    note = page.get_by_role("note", name="System prompt")
    expect(note).to_have_count(0)
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_role("button", name="Done", exact=True).click()
    expect(note).to_contain_text("Be brief.")
    entries(page).last.click()
    expect(note).to_have_count(0)
    finished(ask(page, "Another"))
    assert not any("Be brief." in frame for frame in sent)
    entries(page).first.click()
    page.reload()
    expect(note).to_contain_text("Be brief.")
    connected(page)
    finished(ask(page, "Another"))
    assert any('"instructions":"Be brief."' in frame for frame in sent)
    note.get_by_role("button", name="Change the system prompt").click()
    page.get_by_role("button", name="Use it for new chats").click()
    page.get_by_role("button", name="Done", exact=True).click()
    new_chat(page)
    expect(note).to_contain_text("Be brief.")
