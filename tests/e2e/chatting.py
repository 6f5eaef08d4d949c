"""The chat as a reader uses it: ask, wait for the end of an answer, limit its length.

`say` makes an answer of the fake model contain any text, by way of a fork.
"""

from __future__ import annotations

import re

from playwright.sync_api import Locator, Page, expect

LIVE = re.compile(r"\blive\b")


def connected(page: Page) -> Page:
    expect(page.locator("#badge")).to_have_text("connected")
    return page


def limit(page: Page, tokens: int) -> None:
    """Answers have at most `tokens` tokens from now on."""
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_label("Maximum tokens").fill(str(tokens))
    page.get_by_role("button", name="Done", exact=True).click()


def ask(page: Page, text: str) -> Locator:
    """Send by keyboard; returns the article of the answer."""
    box = page.get_by_label("Message")
    box.fill(text)
    box.press("Enter")
    return page.locator("article.assistant").last


def text_of(answer: Locator) -> str:
    return answer.locator(".text").text_content() or ""


def finished(answer: Locator) -> str:
    """The answer's text, once it is complete."""
    expect(answer).not_to_have_class(LIVE)
    return text_of(answer)


def begun(answer: Locator) -> Locator:
    expect(answer.locator(".text")).not_to_be_empty()
    return answer


def act(answer: Locator, name: str) -> None:
    """Press one of the buttons below the answer."""
    answer.get_by_role("button", name=name, exact=True).click()


def say(page: Page, text: str) -> Locator:
    """An answer that is this text, followed by a number or two of the fake model's."""
    limit(page, 2)
    answer = ask(page, "Say something.")
    finished(answer)
    act(answer, "Show tokens")
    answer.locator(".token").first.click()
    page.get_by_label("Your own text from here").fill(text)
    page.get_by_role("button", name="Continue from here", exact=True).click()
    expect(answer.locator(".picker")).to_contain_text("2/2")
    finished(answer)
    return answer
