"""The page reached in other ways: below a proxy's path, and from vite's server; and that it asks no
other host for anything.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, expect

from tests.e2e.chatting import ask, connected, finished
from tests.e2e.conftest import OpenPage
from tests.server.support.counting import check_counting
from tests.server.support.relay import Relay
from tests.server.support.running import Running

WEB = Path(__file__).parents[2] / "web"
sys.path.append(str(WEB))
import build_page  # noqa: E402


def urls_of(page: Page) -> list[str]:
    """Every URL that the page requests from now on, sockets included."""
    asked: list[str] = []
    page.context.on("request", lambda request: asked.append(request.url))
    page.on("websocket", lambda socket: asked.append(socket.url))
    return asked


def chat(page: Page) -> None:
    """A question, and an answer that is complete."""
    answer = ask(connected(page), "How far can you count?")
    assert len(check_counting(finished(answer))) > 10


def look_at_the_engine(page: Page) -> None:
    page.get_by_role("link", name="Engine", exact=True).click()
    expect(page.locator("main.engine:not([aria-busy=true])")).to_have_count(1)


def test_no_request_goes_to_another_host(open_page: OpenPage, short: Running) -> None:
    page = open_page("about:blank")
    asked = urls_of(page)
    page.goto(short.url)
    chat(page)
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_role("button", name="Done", exact=True).click()
    look_at_the_engine(page)
    page.reload()
    expect(page.locator("#badge")).to_have_text("connected")
    here = urlsplit(short.url).netloc
    strange = {url for url in asked if urlsplit(url).netloc != here and url[:5] != "data:"}
    assert strange == set()
    assert {urlsplit(url).scheme for url in asked} >= {"http", "ws"}


@pytest.mark.parametrize("key", ["", "the-key"])
def test_below_a_proxys_path(server_with: Any, open_page: OpenPage, key: str) -> None:
    """All of it works, and no request goes outside of that path."""
    server = server_with(
        model="fake:tokens_per_s=400,length=60",
        root_path="/models/one",
        api_key=(key,) if key else (),
    )
    with Relay(server, "/models/one") as proxy:
        page = open_page("about:blank", viewport={"width": 1280, "height": 800})
        asked = urls_of(page)
        page.goto(f"{proxy.url}/models/one/")
        if key:
            dialog = page.get_by_role("dialog", name="This server requires an API key")
            dialog.get_by_label("API key").fill(key)
            dialog.get_by_role("button", name="Connect").click()
        chat(page)
        look_at_the_engine(page)
        page.context.close()
    paths = {urlsplit(url).path for url in asked if url[:5] != "data:"}
    assert {path for path in paths if not path.startswith("/models/one/")} == set()
    assert any(path.endswith("/v1/responses") for path in paths)
    assert any("ticket" in path for path in paths) == bool(key)


@pytest.fixture
def dev_server(short: Running) -> Iterator[str]:
    """The URL that `npm run dev` prints, its API that of `short`."""
    process = subprocess.Popen(
        [build_page.install(), WEB / "node_modules" / "vite" / "bin" / "vite.js", "--port", "0"],
        cwd=WEB,
        env={**os.environ, "STREAMER_URL": short.url, "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "Local:" in line:
                yield line.split()[-1]
                break
        else:
            pytest.fail("vite did not start: " + "".join(lines))
    finally:
        process.terminate()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_from_vites_server(dev_server: str, open_page: OpenPage) -> None:
    page = open_page(dev_server)
    chat(page)
    look_at_the_engine(page)
