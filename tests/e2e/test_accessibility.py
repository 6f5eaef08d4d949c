"""axe-core on everything that can be seen, in both themes, wide and on a phone; reduced motion.

A route that is added to ROUTES, or a state to STATES, is checked in every theme and size.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.e2e.chatting import act, ask, connected, finished, say
from tests.e2e.conftest import OpenPage
from tests.e2e.test_chat_markdown import GOOD
from tests.server.support.running import Running

AXE = Path(__file__).parents[2] / "web" / "node_modules" / "axe-core" / "axe.min.js"
SIZES = {"wide": {"width": 1280, "height": 800}, "phone": {"width": 390, "height": 844}}
THEMES = ("light", "dark")
# While one theme or panel changes into another, colours belong to neither.
AT_REST = """() => Promise.all(
    document.getAnimations()
        .filter((it) => it.effect.getComputedTiming().endTime < Infinity)
        .map((it) => it.finished.catch(() => {}))
)"""


def an_answer(page: Page) -> None:
    finished(ask(page, "How far can you count?"))


def settings(page: Page) -> None:
    page.get_by_role("button", name="Settings", exact=True).click()
    expect(page.get_by_role("dialog", name="Settings")).to_be_visible()


def wrong_tools(page: Page) -> None:
    settings(page)
    page.get_by_label("Tools").fill("[{")
    expect(page.get_by_role("dialog").get_by_role("alert")).to_be_visible()


def tools_that_are_not_sent(page: Page) -> None:
    wrong_tools(page)
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Change the tools")).to_be_visible()


def conversations(page: Page) -> None:
    an_answer(page)
    menu = page.get_by_role("button", name="Menu", exact=True)
    if menu.is_visible():
        menu.click()
        expect(page.get_by_role("button", name="Close menu", exact=True)).to_be_visible()
    expect(page.get_by_label("Conversations")).to_be_visible()


def a_load(page: Page) -> None:
    page.goto(page.url.split("#")[0] + "#/engine")
    page.get_by_role("button", name="Start a small load", exact=True).click()
    running = page.locator(".facts dd").first
    expect(running).not_to_contain_text(re.compile("^[0–]"))


def markdown(page: Page) -> None:
    prose = say(page, GOOD).locator(".prose")
    expect(prose.locator(".hljs-keyword").first).to_be_visible()
    expect(prose.locator("math")).to_have_count(2)


def tokens_beside_each_other(page: Page) -> None:
    page.get_by_label("Answers per question").select_option("2")
    act(finished_one(page), "Show tokens")
    page.locator(".token").nth(3).click()
    expect(page.get_by_role("button", name="Regenerate from here")).to_be_visible()


def finished_one(page: Page) -> Locator:
    ask(page, "How far can you count?")
    columns = page.locator(".columns article")
    for i in range(2):
        finished(columns.nth(i))
    return columns.nth(0)


def what_waits(page: Page) -> None:
    """A waiting message below a system prompt: no socket opens."""
    settings(page)
    page.get_by_label("System prompt").fill("Be brief. " * 40)
    page.get_by_role("button", name="Done", exact=True).click()
    page.route_web_socket(re.compile("/v1/responses"), lambda _: None)
    page.reload()
    page.get_by_label("Message", exact=True).fill("As soon as you can.")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Take back")).to_be_visible()
    expect(page.get_by_role("note", name="System prompt")).to_be_visible()


ROUTES = ("#/", "#/chat/none", "#/engine")
STATES: dict[str, Callable[[Page], None]] = {
    "an answer": an_answer,
    "Markdown": markdown,
    "tokens, answers beside each other": tokens_beside_each_other,
    "settings": settings,
    "wrong tools": wrong_tools,
    "tools that are not sent": tools_that_are_not_sent,
    "what waits": what_waits,
    "conversations": conversations,
    "the engine at work": a_load,
}


def faults(page: Page) -> list[str]:
    """Every violation that axe finds, of any severity: its rule, where, and its text."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    page.evaluate(AT_REST)
    found: dict[str, Any] = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [
        f"{violation['id']} at {node['target']}: {node['failureSummary']}"
        for violation in found["violations"]
        for node in violation["nodes"]
    ]


def faults_in_each_theme(page: Page) -> list[str]:
    found = []
    for theme in THEMES:
        page.emulate_media(color_scheme=theme)
        found += [f"{theme}: {fault}" for fault in faults(page)]
    return found


@pytest.mark.parametrize("size", SIZES)
def test_every_route(open_page: OpenPage, short: Running, size: str) -> None:
    for route in ROUTES:
        page = connected(open_page(f"{short.url}/{route}", viewport=SIZES[size]))
        expect(page.locator("main")).not_to_have_attribute("aria-busy", "true")
        assert faults_in_each_theme(page) == [], route


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("size", SIZES)
def test_every_state(open_page: OpenPage, short: Running, size: str, state: str) -> None:
    page = connected(open_page(short.url, viewport=SIZES[size]))
    STATES[state](page)
    assert faults_in_each_theme(page) == []


def test_where_a_key_is_required(open_page: OpenPage, server_with: Any) -> None:
    page = open_page(server_with(model="fake", api_key=("a-key",)).url)
    expect(page.get_by_role("dialog", name="This server requires an API key")).to_be_visible()
    assert faults_in_each_theme(page) == []


def test_a_fault_is_found(open_page: OpenPage, short: Running) -> None:
    """Otherwise the tests above would pass on anything."""
    page = connected(open_page(short.url))
    page.evaluate(
        """() => {
            const text = document.createElement("p");
            text.textContent = "Nobody can read this.";
            text.style.color = "#ddd";
            text.style.background = "#fff";
            document.querySelector("main").append(text, document.createElement("button"));
            document.querySelector("h1").remove();
        }"""
    )
    rules = {fault.split()[0] for fault in faults(page)}
    assert rules == {"color-contrast", "button-name", "page-has-heading-one"}


MOVING = """() => {
    const found = new Set();
    const lasts = (times) => times.split(",").some((time) => parseFloat(time) > 0);
    for (const element of document.querySelectorAll("*")) {
        for (const part of ["", "::before", "::after"]) {
            const style = getComputedStyle(element, part || null);
            const isAnimated = style.animationName !== "none" && lasts(style.animationDuration);
            const isSmooth = style.scrollBehavior === "smooth";
            if (isAnimated || isSmooth || lasts(style.transitionDuration))
                found.add(`${element.tagName}.${element.className}${part}`);
        }
    }
    return [...found];
}"""


@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_reduced_motion_disables_animation(
    open_page: OpenPage, short: Running, motion: str
) -> None:
    page = connected(open_page(short.url, reduced_motion=motion, viewport=SIZES["phone"]))
    seen: list[str] = page.evaluate(MOVING)
    conversations(page)
    seen += page.evaluate(MOVING)
    page.goto(f"{short.url}/#/engine")
    expect(page.locator("main")).not_to_have_attribute("aria-busy", "true")
    seen += page.evaluate(MOVING)
    assert bool(seen) == (motion == "no-preference"), seen
