"""An answer goes on: through a reload, in a second tab, over a cut network; where it can't, the
page says so.
"""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Page, expect

from tests.e2e.chatting import ask, begun, connected, finished, limit
from tests.e2e.conftest import OpenPage
from tests.server.support.counting import check_counting
from tests.server.support.relay import Relay
from tests.server.support.running import Running

LENGTH = 600  # the server takes 1.5 s


def test_a_reload_in_an_answer_goes_on_with_it(page: Page) -> None:
    limit(page, LENGTH)
    begun(ask(page, "How far can you count?"))
    page.reload()
    answer = page.locator("article.assistant")
    # First the figures: until the page is connected again an answer is shown as it was stored.
    expect(answer.locator(".meta")).to_contain_text(f"{LENGTH} tokens")
    assert len(check_counting(finished(answer))) == LENGTH
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()


# Until a reload aborts it, with all that came after it: no other transaction of the page begins.
OCCUPY = """async () => {
    const opened = indexedDB.open("streamer");
    await new Promise((done) => (opened.onsuccess = done));
    const stores = ["conversations", "messages"];
    const store = opened.result.transaction(stores, "readwrite").objectStore("messages");
    const next = () => (store.count().onsuccess = next);
    next();
}"""


def test_a_reload_before_anything_is_written_loses_nothing(page: Page) -> None:
    limit(page, LENGTH)
    page.evaluate(OCCUPY)
    begun(ask(page, "How far can you count?"))
    page.reload()
    answer = page.locator("article.assistant")
    expect(answer.locator(".meta")).to_contain_text(f"{LENGTH} tokens")
    assert len(check_counting(finished(answer))) == LENGTH
    address = page.url
    page.evaluate(OCCUPY)
    page.locator(".entry").hover()
    page.get_by_role("button", name="More actions for How far can you count?").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True).click()
    page.reload()
    page.goto(address)
    expect(page.get_by_text("Chat not found")).to_be_visible()


def test_a_question_that_was_lost_with_the_page_is_asked_again(page: Page) -> None:
    limit(page, LENGTH)
    page.evaluate("() => void (WebSocket.prototype.send = () => undefined)")
    expect(ask(page, "How far can you count?").locator(".meta")).to_have_text("sending")
    page.reload()
    answer = page.locator("article.assistant")
    expect(answer.locator(".meta")).to_contain_text(f"{LENGTH} tokens")
    assert len(check_counting(finished(answer))) == LENGTH
    expect(page.locator("article")).to_have_count(2)


def test_a_second_tab_follows_and_both_have_all_of_it(page: Page, server: Running) -> None:
    limit(page, LENGTH)
    other = page.context.new_page()
    other.goto(server.url)
    connected(other)
    begun(ask(page, "How far can you count?"))
    other.get_by_role("navigation", name="History").locator(".side-link").click()
    answers = [tab.locator("article.assistant") for tab in (page, other)]
    begun(answers[1])
    for answer in answers:
        assert len(check_counting(finished(answer))) == LENGTH
    begun(ask(other, "Once more."))  # and the first tab gets it too
    expect(page.locator("article")).to_have_count(4)
    assert len(check_counting(finished(page.locator("article.assistant").last))) > 10
    other.close()


def test_a_second_tab_can_stop_it(page: Page, server: Running) -> None:
    limit(page, 50_000)
    begun(ask(page, "Never stop."))
    other = page.context.new_page()
    other.goto(server.url)
    other.get_by_role("navigation", name="History").locator(".side-link").click()
    begun(other.locator("article.assistant"))
    other.get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator("article.assistant .meta")).to_contain_text("stopped")
    check_counting(finished(page.locator("article.assistant")))
    begun(ask(page, "Once more."))
    begun(other.locator("article.live"))  # a tab that was there before the answer
    other.get_by_role("button", name="Stop", exact=True).click()
    finished(page.locator("article.assistant").last)
    server.wait_idle()
    other.close()


def test_a_cut_network_loses_nothing(open_page: OpenPage, server: Running) -> None:
    with Relay(server, "") as proxy:
        page = connected(open_page(proxy.url))
        limit(page, LENGTH)
        answer = begun(ask(page, "How far can you count?"))
        page.evaluate(
            """() => void new MutationObserver(() => (window.seen ??= badge.dataset.state)).observe(
                badge, {attributes: true, attributeFilter: ["data-state"]})"""
        )
        proxy.cut()
        page.wait_for_function("window.seen === 'reconnecting'")
        connected(page)
        assert len(check_counting(finished(answer))) == LENGTH


def test_an_answer_the_server_forgot_is_reported_and_its_text_kept(
    server_with: Any, open_page: OpenPage
) -> None:
    """A server without the answer takes the place of the one that made it."""
    first = server_with(model="fake:tokens_per_s=400", drain_timeout=0.0)
    second = server_with(model="fake:tokens_per_s=400")
    with Relay(first, "") as proxy:
        page = connected(open_page(proxy.url))
        limit(page, 50_000)
        answer = begun(ask(page, "Never stop."))
        expect(answer.locator(".text")).to_contain_text(" 50 ")
        proxy.target = second
        proxy.cut()
        expect(answer.get_by_role("alert")).to_contain_text("no longer has this answer")
        assert len(check_counting(finished(answer))) >= 50
        limit(page, 5)
        check_counting(finished(ask(page, "Once more.")))
