"""A server that is killed in an answer: for the page a pause, and no error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.chaos.killable import Killable
from tests.e2e.chatting import ask, begun, connected, finished, limit
from tests.e2e.conftest import OpenPage
from tests.server.support.counting import check_counting

LENGTH = 400


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Killable]:
    settings = {"model": "fake:tokens_per_s=200", "journal": tmp_path / "journal"}
    with Killable(tmp_path / "log", **settings) as it:
        it.start()
        it.wait_ready()
        yield it


def test_an_answer_goes_on_after_a_restart(process: Killable, open_page: OpenPage) -> None:
    page = connected(open_page(process.url))
    limit(page, LENGTH)
    answer = ask(page, "How far can you count?")
    begun(answer)
    process.restart()
    expect(answer.locator(".meta")).to_contain_text(f"{LENGTH} tokens")
    assert len(check_counting(finished(answer))) == LENGTH
    expect(page.get_by_role("alert")).to_have_count(0)
    begun(ask(page, "Once more."))
