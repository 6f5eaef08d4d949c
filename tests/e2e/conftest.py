"""Shared by the page's tests: one browser, two servers, and pages that must report no error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect

from streamer.loadtest.inside.page.command import chromium
from tests.e2e.chatting import connected
from tests.server.conftest import server_with
from tests.server.support.running import Running

__all__ = ["server_with"]  # a fixture of the server's tests, for these too

expect.set_options(timeout=60_000)  # a busy machine may be slow; no test waits for a fixed time

OpenPage = Callable[..., Page]


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="package")
def server() -> Iterator[Running]:
    """A server whose answers take long enough to be watched; they end where the page says."""
    running = Running(model="fake:tokens_per_s=400").start()
    yield running
    running.stop()


@pytest.fixture(scope="package")
def short() -> Iterator[Running]:
    """A server whose answers end after 60 tokens."""
    running = Running(model="fake:tokens_per_s=400,length=60").start()
    yield running
    running.stop()


@pytest.fixture
def open_page(browser: Browser, server_with: Any) -> Iterator[OpenPage]:
    """open_page(url, **context): a page of a context of its own, at that URL.

    An error in its script or a policy violation fails the test; a missing key or server does not.
    Pages are closed before the servers of the test.
    """
    contexts = []
    complaints: list[str] = []

    def note(message: ConsoleMessage) -> None:
        expected = ("status of 401", "Authentication failed", "ERR_CONNECTION")
        if message.type == "error" and not any(words in message.text for words in expected):
            complaints.append(message.text)

    def make(url: str, **settings: Any) -> Page:
        context = browser.new_context(**settings)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", note)
        page.goto(url)
        return page

    yield make
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def page(open_page: OpenPage, server: Running) -> Page:
    """The open page, connected."""
    return connected(open_page(server.url))
