"""The page in a real browser: chat, streaming, stop, turns, tricks in the text, keyboard."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.e2e.chatting import ask, begun, connected, finished, limit
from tests.e2e.conftest import OpenPage
from tests.e2e.test_accessibility import faults_in_each_theme
from tests.server.support.counting import check_counting
from tests.server.support.running import BUNDLED, Running


def test_a_question_is_answered_and_measured(page: Page) -> None:
    limit(page, 60)
    answer = ask(page, "How far can you count?")
    assert len(check_counting(finished(answer))) > 10
    meta = answer.locator(".meta")
    expect(meta).to_contain_text("60 tokens")
    expect(meta).to_contain_text("tokens/s")
    expect(meta).to_contain_text("first token after")
    expect(page.locator("article.user")).to_have_text(["YouHow far can you count?"])
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()


def test_stop_ends_the_answer_and_gives_everything_back(page: Page, server: Running) -> None:
    limit(page, 50_000)
    answer = ask(page, "Never stop.")
    expect(answer.locator(".text")).not_to_be_empty()
    page.get_by_role("button", name="Stop", exact=True).click()
    check_counting(finished(answer))
    expect(answer.locator(".meta")).to_contain_text("stopped")
    server.wait_idle()


def test_escape_stops_too_and_the_chat_goes_on(page: Page, server: Running) -> None:
    limit(page, 50_000)
    answer = ask(page, "Never stop.")
    expect(answer.locator(".text")).not_to_be_empty()
    page.keyboard.press("Escape")
    finished(answer)
    limit(page, 5)
    assert check_counting(finished(ask(page, "A second turn.")))
    expect(page.locator("article")).to_have_count(4)


def test_new_chat_clears_and_the_answer_goes_on_in_the_history(page: Page, server: Running) -> None:
    limit(page, 50_000)
    begun(ask(page, "Never stop."))
    page.get_by_role("button", name="New chat", exact=True).click()
    expect(page.locator("article")).to_have_count(0)
    expect(page.get_by_role("heading", name="What would you like to know?")).to_be_visible()
    history = page.get_by_role("navigation", name="History")
    expect(history.get_by_label("answering")).to_be_visible()
    limit(page, 3)
    check_counting(finished(ask(page, "Again.")))
    history.get_by_role("button", name="Never stop.", exact=False).first.click()
    page.get_by_role("button", name="Stop", exact=True).click()
    check_counting(finished(page.locator("article.assistant")))
    server.wait_idle()


def test_what_is_typed_is_text(page: Page) -> None:
    limit(page, 3)
    trick = "<img src=x onerror='document.title=1'><script>document.title=2</script>"
    finished(ask(page, trick))
    expect(page.locator("article.user .text")).to_have_text(trick)
    expect(page).to_have_title("Streamer")
    expect(page.locator("article img, article script")).to_have_count(0)


def test_a_refusal_is_shown_and_the_next_question_works(page: Page) -> None:
    limit(page, 1 << 25)
    answer = ask(page, "Too much.")
    expect(answer.get_by_role("alert")).to_be_visible()
    limit(page, 3)
    check_counting(finished(ask(page, "Less.")))


def test_a_chat_that_fills_the_context_keeps_the_question(
    server_with: Any, open_page: OpenPage
) -> None:
    small = server_with(model="fake", max_model_len=600)
    page = connected(open_page(small.url))
    check_counting(finished(ask(page, "How far can you count?")))  # to the end of the context
    question = "How far is that?"
    alert = ask(page, question).get_by_role("alert")
    expect(alert).to_contain_text("This conversation is too long")
    expect(page.get_by_label("Message")).to_have_value(question)
    alert.get_by_role("button", name="New chat with this question").click()
    expect(page.locator("article.user .text")).to_have_text([question])
    check_counting(finished(page.locator("article.assistant")))
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_limit_beyond_the_context_gives_what_fits(server_with: Any, open_page: OpenPage) -> None:
    small = server_with(model="fake", max_model_len=600)
    page = connected(open_page(small.url))
    limit(page, 599)
    assert len(check_counting(finished(ask(page, "How far can you count?")))) > 500
    limit(page, 1)
    alert = ask(page, "x" * 700).get_by_role("alert")
    expect(alert).to_contain_text("too long")
    page.get_by_role("button", name="New chat", exact=True).click()
    expect(ask(page, "x" * 700).get_by_role("alert")).to_contain_text("This message is too long")


def test_a_message_that_is_too_long_says_how_long_it_may_be_and_is_edited(
    server_with: Any, open_page: OpenPage
) -> None:
    page = connected(open_page(server_with(model="fake", max_model_len=600).url))
    alert = ask(page, "x" * 700).get_by_role("alert")
    expect(alert).to_contain_text("it has 704 tokens, and with its answer it may have 600.")
    expect(page.locator(".context")).to_have_text("704 of 600 tokens")
    expect(page.get_by_label("Message")).to_have_value("")  # it is in the chat
    assert faults_in_each_theme(page) == []
    alert.get_by_role("button", name="Edit this message").click()
    expect(page.get_by_label("Message")).to_be_focused()
    expect(page.get_by_label("Message")).to_have_value("x" * 700)
    limit(page, 3)
    check_counting(finished(ask(page, "How far can you count?")))
    expect(page.locator("article.user .text")).to_have_text(["How far can you count?"])
    expect(page.get_by_role("alert")).to_have_count(0)


def test_everything_has_a_name_and_the_keyboard_reaches_it(page: Page) -> None:
    expect(page.get_by_label("Message")).to_be_focused()
    for name in ("Settings", "New chat", "Send"):
        expect(page.get_by_role("button", name=name, exact=True)).to_be_visible()
    expect(page.get_by_role("log", name="Conversation")).to_be_attached()
    page.get_by_role("button", name="Settings", exact=True).focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Settings")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Settings")).to_be_hidden()


def test_after_a_restart_of_the_server_waiting_questions_are_sent(
    server_with: Any, open_page: OpenPage
) -> None:
    first = server_with(model="fake:tokens_per_s=400")
    port = int(first.url.rpartition(":")[2])
    page = connected(open_page(first.url))
    badge = page.locator("#badge")
    first.stop()
    expect(badge).to_have_text("reconnecting")
    page.get_by_label("Message").fill("As soon as you can.")
    page.get_by_label("Message").press("Enter")
    expect(page.locator("article.waits")).to_contain_text("As soon as you can.")
    expect(page.locator("article.waits .wait")).to_contain_text("Waiting for the server")
    server_with(model="fake:tokens_per_s=400", port=port)
    connected(page)
    expect(page.locator("article.assistant .text")).not_to_be_empty()
    expect(page.locator("article.waits")).to_have_count(0)


def test_the_key_dialog_opens_and_the_key_is_stored_in_the_tab(
    server_with: Any, open_page: OpenPage
) -> None:
    keyed = server_with(model="fake:tokens_per_s=400", api_key=("right-key",))
    page = open_page(keyed.url)
    dialog = page.get_by_role("dialog", name="This server requires an API key")
    field = dialog.get_by_label("API key")
    expect(field).to_be_focused()
    expect(field).to_have_attribute("type", "password")
    for wrong in ("wrong-key", "\u043a\u043b\u044e\u0447"):  # no header can carry the second
        field.fill(wrong)
        field.press("Enter")
        expect(dialog.get_by_role("alert")).to_have_text("The server did not accept that key.")
        expect(field).to_be_focused()
        assert not any("key" in store for store in kept(page))
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        page.get_by_role("button", name="Enter key", exact=True).click()
        expect(dialog.get_by_role("alert")).to_be_hidden()
    field.fill("right-key")
    dialog.get_by_role("button", name="Connect").click()
    expect(dialog).to_be_hidden()
    connected(page)
    limit(page, 5)
    assert len(check_counting(finished(ask(page, "How far can you count?")))) > 0
    local, session = map(json.loads, kept(page))
    assert session["streamer.key"] == "right-key"
    assert "right-key" not in str(local)
    page.reload()  # a new socket, with a ticket of its own
    connected(page)
    expect(dialog).to_be_hidden()
    other = open_page(keyed.url)
    expect(other.get_by_role("dialog")).to_be_visible()


def kept(page: Page) -> list[str]:
    """What the page has in the stores of its tab and of all tabs, as JSON."""
    names = ("localStorage", "sessionStorage")
    return [str(page.evaluate(f"JSON.stringify({name})")) for name in names]


def test_without_keys_no_ticket_is_requested(open_page: OpenPage, server: Running) -> None:
    page = open_page("about:blank")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(server.url)
    connected(page)
    expect(page.get_by_role("dialog")).to_be_hidden()
    expect(page.get_by_role("button", name="Enter key", exact=True)).to_be_hidden()
    assert [url for url in asked if "ticket" in url] == []


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_screen(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 740})
    limit(page, 80)
    finished(ask(page, "x" * 500))
    send = page.get_by_role("button", name="Send", exact=True)
    new = page.get_by_role("button", name="New chat", exact=True)
    for element in (send, new, page.locator("article.user"), page.locator("article.assistant")):
        box = element.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width


def test_settings_begin_with_the_models_own(server_with: Any, open_page: OpenPage) -> None:
    page = connected(open_page(server_with(**BUNDLED).url))
    page.get_by_role("button", name="Settings", exact=True).click()
    own = {"Temperature": "0.7", "Top p": "0.9", "Top k": "0", "Repetition penalty": "1"}
    heights = set()
    for name, value in own.items():
        slider = page.get_by_label(name)
        expect(slider).to_have_value(value)
        field = page.locator(".field", has=slider)
        shown = value if name == "Top k" else f"{float(value):.2f}"
        expect(field.locator("output")).to_have_text(f"default {shown}")
        heights.add(field.locator("label").evaluate("label => label.offsetHeight"))
    assert len(heights) == 1  # a single line
    page.get_by_label("Temperature").fill("0.7")  # chosen, though it is the same
    output = page.locator(".field", has=page.get_by_label("Temperature")).locator("output")
    expect(output).to_have_text("0.70")


def test_a_phone_has_room_for_the_models_name(server_with: Any, open_page: OpenPage) -> None:
    server = server_with(model="fake", served_model_name="streamer-demo")
    page = connected(open_page(server.url, viewport={"width": 390, "height": 844}))
    badge, name = page.locator("#badge"), page.locator(".model-name")
    expect(name).to_have_text("streamer-demo")
    assert name.evaluate("name => name.scrollWidth <= name.clientWidth")
    assert badge.evaluate("badge => badge.offsetWidth") < 40  # its dot
    server.stop()
    expect(badge).to_have_text("reconnecting")
    assert badge.evaluate("badge => badge.offsetWidth") > 80
