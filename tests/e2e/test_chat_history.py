"""The history: search, names, deletion, files out and in; all of it there after a reload."""

from __future__ import annotations

import json
from pathlib import Path

from playwright.sync_api import Locator, Page, expect

from tests.e2e.chatting import act, ask, connected, finished, limit


def entries(page: Page) -> Locator:
    return page.get_by_role("navigation", name="History").locator(".entry .side-link")


def two_chats(page: Page) -> None:
    limit(page, 4)
    finished(ask(page, "Of apples"))
    page.get_by_role("button", name="New chat", exact=True).click()
    finished(ask(page, "Of pears"))
    expect(entries(page)).to_have_text(["Of pears", "Of apples"])


def do(page: Page, chat: str, action: str) -> None:
    page.locator(".entry", has_text=chat).hover()
    page.get_by_role("button", name=f"More actions for {chat}", exact=True).click()
    page.get_by_role("button", name=action, exact=True).click()


def test_chats_are_found_by_their_words(page: Page) -> None:
    two_chats(page)
    page.keyboard.press("Alt+k")
    search = page.get_by_label("Search chats")
    expect(search).to_be_focused()
    search.fill("APPLES")
    expect(entries(page)).to_have_text(["Of apples"])
    search.fill("1 2 3")  # words of the answers
    expect(entries(page)).to_have_count(2)
    search.fill("plums")
    expect(page.get_by_text("No chat contains these words.")).to_be_visible()


MARKS = "(words) => [...(CSS.highlights.get('found') ?? [])].map(String).join() === words"


def test_search_jumps_to_its_hit_and_marks_it(page: Page) -> None:
    page.set_viewport_size({"width": 900, "height": 320})
    limit(page, 400)  # more than fit on the screen
    finished(ask(page, "Of apples and APPLE trees"))
    question = page.locator("article.user .text")
    expect(question).not_to_be_in_viewport()
    search = page.get_by_label("Search chats")
    search.fill("apple")
    assert page.evaluate(MARKS, "")
    search.press("Enter")
    expect(question).to_be_in_viewport()
    page.wait_for_function(MARKS, arg="apple,APPLE")
    search.fill("399")
    page.wait_for_function(MARKS, arg="")
    entries(page).click()
    expect(question).not_to_be_in_viewport()
    page.wait_for_function(MARKS, arg="399")
    limit(page, 3)
    page.get_by_label("Message").press("ArrowUp")
    finished(ask(page, "Of pears"))
    expect(question).to_have_text("Of pears")
    search.fill("trees")  # it is on another path
    entries(page).click()
    expect(question).to_have_text("Of apples and APPLE trees")
    page.wait_for_function(MARKS, arg="trees")


def test_names_and_deletions_stay_after_a_reload(page: Page) -> None:
    two_chats(page)
    do(page, "Of apples", "Rename")
    field = page.get_by_label("Chat name")
    expect(field).to_be_focused()
    field.fill("Fruit")
    field.press("Enter")
    expect(entries(page)).to_have_text(["Of pears", "Fruit"])
    do(page, "Of pears", "Delete")
    dialog = page.get_by_role("dialog", name="Delete this chat?")
    dialog.get_by_role("button", name="Cancel").click()
    expect(entries(page)).to_have_count(2)
    page.get_by_role("button", name="Delete", exact=True).click()
    dialog.get_by_role("button", name="Delete", exact=True).click()
    expect(entries(page)).to_have_text(["Fruit"])
    page.reload()
    expect(entries(page)).to_have_text(["Fruit"])
    entries(page).first.click()
    expect(page.locator("article.user .text")).to_have_text(["Of apples"])


def test_a_warning_is_shown_if_the_browser_stores_nothing(page: Page) -> None:
    page.evaluate(
        """() => void (IDBObjectStore.prototype.put = () => {
            throw new DOMException("full", "QuotaExceededError");
        })"""
    )
    limit(page, 4)
    finished(ask(page, "Of apples"))
    expect(page.get_by_text("This browser does not store your chats")).to_be_visible()
    expect(entries(page)).to_have_text(["Of apples"])


def test_a_reload_shows_the_same_chat_with_its_branches(page: Page) -> None:
    two_chats(page)
    answer = page.locator("article.assistant")
    act(answer, "Regenerate")
    finished(answer)
    before = answer.locator(".meta").text_content() or ""
    page.reload()
    expect(answer.locator(".picker span")).to_have_text("2/2")
    expect(answer.locator(".meta")).to_have_text(before)
    connected(page)
    finished(ask(page, "And on."))
    expect(page.locator("article")).to_have_count(4)


def test_what_is_exported_comes_in_again(page: Page, tmp_path: Path) -> None:
    two_chats(page)
    act(page.locator("article.assistant"), "Regenerate")
    finished(page.locator("article.assistant"))
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    file = tmp_path / "chats.json"
    download.value.save_as(file)
    assert len(json.loads(file.read_text())["conversations"]) == 2
    for chat in ("Of pears", "Of apples"):
        do(page, chat, "Delete")
        page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True).click()
    expect(entries(page)).to_have_count(0)
    page.get_by_label("Chat file").set_input_files(file)
    status = page.locator("main > [role=status]")
    expect(status).to_have_text("2 chats imported")
    page.get_by_label("Chat file").set_input_files(file)  # a second import adds nothing
    expect(status).to_have_text("Nothing new in this file: 2 chats")
    expect(entries(page)).to_have_text(["Of pears", "Of apples"])
    page.reload()
    expect(entries(page)).to_have_text(["Of pears", "Of apples"])
    entries(page).first.click()
    expect(page.locator("article.assistant .picker span")).to_have_text("2/2")
    connected(page)
    finished(ask(page, "And on."))
    expect(page.locator("article")).to_have_count(4)


def test_a_file_of_something_else_is_refused_in_words(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    broken = {"format": "streamer.chats", "version": 1, "conversations": [{"id": 1}]}
    for text in ("no JSON", '{"format": "another"}', json.dumps(broken)):
        file.write_text(text)
        page.get_by_label("Chat file").set_input_files(file)
        fault = page.locator(".transfer").get_by_role("alert")
        expect(fault).to_contain_text("This file")
    expect(entries(page)).to_have_count(0)
