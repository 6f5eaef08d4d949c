"""A server that is killed in an answer: for the page a pause, and no error."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.chaos.killable import Killable
from tests.e2e.chatting import LIVE, ask, begun, connected, finished, limit
from tests.e2e.conftest import OpenPage
from tests.e2e.test_accessibility import faults_in_each_theme
from tests.server.support.counting import check_counting

LENGTH = 500
AWAY = "The server does not answer; trying again."


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Killable]:
    settings = {"model": "fake:tokens_per_s=100", "journal": tmp_path / "journal"}
    with Killable(tmp_path / "log", **settings) as it:
        it.start()
        it.wait_ready()
        yield it


# Everything that the page shows while it changes: the connection, what it reports, its answer.
WATCH = """() => {
    window.seen = [];
    const look = () => window.seen.push([
        badge.dataset.state,
        [...document.querySelectorAll("[role=alert], .fault, dialog[open]")]
            .filter((e) => e.checkVisibility()).map((e) => e.textContent).join(),
        document.querySelector("article.assistant .text").textContent,
    ]);
    look();
    new MutationObserver(look).observe(document.body, {
        subtree: true, childList: true, characterData: true, attributes: true,
    });
}"""


def test_an_answer_goes_on_after_a_restart(process: Killable, open_page: OpenPage) -> None:
    page = connected(open_page(process.url))
    limit(page, LENGTH)
    answer = begun(ask(page, "How far can you count?"))
    page.evaluate(WATCH)
    process.kill()
    expect(page.locator("#badge")).to_have_text("reconnecting")
    expect(answer).to_have_class(LIVE)  # it is not over
    expect(answer.get_by_text(AWAY)).to_be_visible()
    assert faults_in_each_theme(page) == []
    process.start()
    expect(page.get_by_text(AWAY)).to_have_count(0)
    expect(answer.locator(".meta")).to_contain_text(f"{LENGTH} tokens")
    assert len(check_counting(finished(answer))) == LENGTH
    states, faults, texts = zip(*page.evaluate("window.seen"), strict=True)
    order = [state for state, _ in groupby(states)]
    assert (order[0], order[1], order[-1]) == ("connected", "reconnecting", "connected")
    assert set(order) <= {"connected", "reconnecting", "connecting"}
    assert set(faults) == {""}
    for before, after in pairwise(texts):
        assert after.startswith(before.rstrip())
    begun(ask(page, "Once more."))
