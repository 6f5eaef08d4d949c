"""A conversation is a tree: other answers, edited questions, forks at tokens, side by side."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Locator, Page, expect

from tests.e2e.chatting import act, ask, begun, connected, finished, limit, text_of
from tests.e2e.conftest import OpenPage
from tests.server.support.counting import check_counting
from tests.server.support.running import BUNDLED, Running

OTHER_TEXT = """() => new Promise((resolve) => {
    indexedDB.open("streamer").onsuccess = ({ target }) => {
        const change = target.result.transaction("messages", "readwrite");
        change.objectStore("messages").openCursor().onsuccess = ({ target }) => {
            const cursor = target.result;
            if (!cursor) return;
            const record = cursor.value;
            if (record.answer) record.answer.text = "Something else.";
            cursor.update(record);
            cursor.continue();
        };
        change.oncomplete = resolve;
    };
})"""


def version(message: Locator) -> Locator:
    return message.locator(".picker span")


def test_another_answer_is_beside_the_first(page: Page) -> None:
    limit(page, 5)
    answer = ask(page, "How far can you count?")
    first = finished(answer)
    limit(page, 9)
    act(answer, "Regenerate")
    expect(version(answer)).to_have_text("2/2")
    assert len(check_counting(finished(answer))) > len(check_counting(first))
    act(answer, "Earlier answer")
    expect(version(answer)).to_have_text("1/2")
    assert text_of(answer) == first
    expect(answer.get_by_role("button", name="Earlier answer")).to_be_disabled()
    expect(page.locator("article")).to_have_count(2)


def test_an_edited_question_is_a_branch_with_answers_of_its_own(page: Page) -> None:
    limit(page, 3)
    finished(ask(page, "First question"))
    finished(ask(page, "Second question"))
    question = page.locator("article.user").first
    question.hover()
    act(question, "Edit question")
    expect(page.get_by_label("Message")).to_have_value("First question")
    finished(ask(page, "Another question"))
    expect(page.locator("article.user .text")).to_have_text(["Another question"])
    expect(version(question)).to_have_text("2/2")
    act(question, "Earlier question")
    expect(page.locator("article.user .text")).to_have_text(["First question", "Second question"])


def test_an_edit_can_be_given_up_and_begun_by_the_arrow(page: Page) -> None:
    limit(page, 3)
    finished(ask(page, "A question"))
    page.get_by_label("Message").press("ArrowUp")
    expect(page.get_by_label("Message")).to_have_value("A question")
    page.get_by_role("button", name="Cancel editing").click()
    expect(page.get_by_label("Message")).to_have_value("")
    finished(ask(page, "The next"))
    expect(page.locator("article.user .text")).to_have_text(["A question", "The next"])


def test_a_fork_keeps_what_stands_before_the_token(page: Page) -> None:
    limit(page, 12)
    answer = ask(page, "How far can you count?")
    whole = finished(answer)
    act(answer, "Show tokens")
    tokens = page.locator(".token")
    expect(tokens).to_have_count(12)
    expect(tokens.nth(4)).to_have_accessible_name("␣5, 100%")
    tokens.nth(4).click()
    page.get_by_role("button", name="Continue with ␣7, 0%").click()
    expect(version(answer)).to_have_text("2/2")
    forked = finished(answer).split()
    assert forked[:6] == ["1", "2", "3", "4", "7", "1"]  # the fake model counts from 1 again
    expect(answer.locator(".meta")).to_contain_text("12 tokens")
    act(answer, "Earlier answer")
    expect(tokens).to_have_count(12)
    act(answer, "Show tokens")
    assert text_of(answer) == whole
    act(answer, "Later answer")
    act(answer, "Show tokens")  # of the fork; the kept text is one piece
    expect(page.locator(".kept")).to_have_text(" 1 2 3 4 7")
    expect(tokens).to_have_count(12)


def test_tokens_that_are_drawn_otherwise_are_not_shown(
    open_page: OpenPage, server: Running
) -> None:
    """A kept answer whose tokens are not those of the server, as from another model."""
    page = connected(open_page(server.url))
    limit(page, 5)
    finished(ask(page, "How far can you count?"))
    page.evaluate(OTHER_TEXT)
    page.reload()
    answer = page.locator("article.assistant")
    expect(answer.locator(".text")).to_have_text("Something else.")
    connected(page)
    act(answer, "Show tokens")
    expect(answer.get_by_role("alert")).to_contain_text("generated different tokens")
    expect(answer.locator(".text")).to_have_text("Something else.")


def test_tokens_by_keyboard(page: Page) -> None:
    limit(page, 6)
    answer = ask(page, "How far can you count?")
    finished(answer)
    page.keyboard.press("Alt+t")
    tokens = page.locator(".token")
    expect(tokens).to_have_count(6)
    tokens.first.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    expect(tokens.nth(1)).to_be_focused()
    page.keyboard.press("Enter")
    expect(tokens.nth(1)).to_have_attribute("aria-pressed", "true")
    page.get_by_role("button", name="Regenerate from here").click()
    expect(version(answer)).to_have_text("2/2")
    assert finished(answer).split()[:2] == ["1", "1"]


def test_on_a_mac_option_and_a_letter_are_typed(open_page: OpenPage, server: Running) -> None:
    page = open_page("about:blank")
    page.add_init_script("Object.defineProperty(navigator, 'platform', {value: 'MacIntel'})")
    page.goto(server.url)
    settings = page.get_by_role("dialog", name="Settings")
    expect(page.get_by_label("Message")).to_be_focused()
    page.keyboard.press("Alt+s")
    expect(settings).to_be_hidden()
    page.keyboard.press("Control+Alt+s")
    expect(settings).to_be_visible()


def test_answers_side_by_side_and_one_to_go_on_with(page: Page) -> None:
    limit(page, 20)
    page.get_by_label("Answers per question").select_option("3")
    begun(ask(page, "How far can you count?"))
    columns = page.get_by_role("group", name="Answers side by side").locator("article")
    expect(columns).to_have_count(3)
    for i in range(3):
        assert len(check_counting(finished(columns.nth(i)))) > 10
    lefts = [columns.first.locator(what).first.bounding_box() for what in (".text", "button")]
    assert len({box["x"] for box in lefts if box}) == 1
    page.get_by_label("Answers per question").select_option("1")
    act(columns.nth(1), "Continue with this answer")
    expect(columns).to_have_count(0)
    answer = page.locator("article.assistant").first
    expect(version(answer)).to_have_text("2/3")
    finished(ask(page, "And on."))
    expect(page.locator("article")).to_have_count(4)
    act(answer, "Side by side")
    expect(columns).to_have_count(3)


def test_stop_ends_all_of_them(page: Page, server: Running) -> None:
    limit(page, 50_000)
    page.get_by_label("Answers per question").select_option("4")
    begun(ask(page, "Never stop."))
    expect(page.locator("article.live")).to_have_count(4)
    page.keyboard.press("Escape")
    expect(page.locator("article.live")).to_have_count(0)
    server.wait_idle()


def test_settings_are_sent_with_a_question(page: Page) -> None:
    """A seed beside the ranges: two answers with it differ, each is drawn again as it was."""
    sent: list[str] = []
    page.on("websocket", lambda ws: ws.on("framesent", lambda data: sent.append(str(data))))
    page.reload()
    connected(page)
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Seed").fill("7")
    for name, value in {"Temperature": "0.5", "Top p": "0.9", "Top k": "40"}.items():
        page.get_by_label(name).fill(value)
    page.get_by_label("Min p").fill("0.1")
    page.get_by_label("Repetition penalty").fill("1.1")
    page.get_by_role("button", name="Done", exact=True).click()
    limit(page, 3)
    finished(ask(page, "Hello."))
    create = next(frame for frame in sent if "response.create" in frame)
    for part in (
        *('"temperature":0.5', '"top_p":0.9', '"top_k":40', '"min_p":0.1', '"seed":7'),
        *('"repetition_penalty":1.1', '"max_output_tokens":3', '"instructions":"Be brief."'),
    ):
        assert part in create


def test_the_bundled_model_forks_at_its_own_alternatives(
    server_with: Any, open_page: OpenPage
) -> None:
    page = connected(open_page(server_with(**BUNDLED).url))
    page.get_by_role("button", name="Tell me a short story about a fox.").click()  # it can
    answer = page.locator("article.assistant").last
    first = finished(answer)
    act(answer, "Show tokens")
    expect(page.locator(".token").last).to_have_text("end")
    text = "".join(page.locator(".token:not(.end)").all_text_contents())
    assert text.strip() == first.strip()
    page.locator(".token").nth(8).click()
    page.locator(".choices").get_by_role("button").first.click()
    expect(version(answer)).to_have_text("2/2")
    forked = finished(answer)
    before = "".join(page.locator(".token").all_text_contents()[:8])
    assert forked != first
    assert forked.startswith(before)
    assert "from the prefix cache" in (answer.locator(".meta").text_content() or "")
