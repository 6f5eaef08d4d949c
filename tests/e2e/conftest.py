"""What the page's tests share: one browser a file, and pages that must not complain."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from streamer.cli.doctor import BROWSERS
from tests.server.running import Running

expect.set_options(timeout=20_000)  # a busy machine may be slow; nothing here waits for time itself
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]

OpenPage = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert path is not None, "the page's tests need chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server whose answers take long enough to be watched; they end where the page says."""
    running = Running(model="fake:tokens_per_s=400").start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def short() -> Iterator[Running]:
    """A server whose answers end after 60 tokens."""
    running = Running(model="fake:tokens_per_s=400,length=60").start()
    yield running
    running.stop()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """open_page(url, **context): a page of a context of its own, at that URL.

    An error in its script or a broken policy fails the test; that a key is wanted does not.
    """
    contexts = []
    complaints: list[str] = []

    def note(message: ConsoleMessage) -> None:
        is_locked = "status of 401" in message.text or "Authentication failed" in message.text
        if message.type == "error" and not is_locked:
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
    page = open_page(server.url)
    expect(page.locator("#badge")).to_have_text("connected")
    return page
