"""Reasoning and calls of tools on the page, with the fake model's script."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.e2e.chatting import act, ask, connected, finished, limit
from tests.e2e.conftest import OpenPage
from tests.e2e.test_accessibility import SIZES, faults_in_each_theme
from tests.server.support.running import Running

THOUGHT = "The weather of Oslo is asked for. " * 24  # two seconds: seen on a busy machine too
CALLED = {"name": "get_weather", "arguments": {"city": "Oslo", "days": [1, 2]}}
CALL = f"<tool_call>\n{json.dumps(CALLED)}\n</tool_call>"
SCRIPT = [
    {"when": "It rains.", "answer": "<think>\nNow I know.\n</think>\n\nTake an **umbrella**."},
    {"when": "weather", "answer": f"<think>\n{THOUGHT}\n</think>\n\nI look.\n{CALL}"},
    {"when": "think", "answer": f"<think>\n{THOUGHT}\n</think>\n\nI think, therefore I am."},
]
LASTED = re.compile(r"for ([2-9]|\d\d) s$")
TOOLS = '[{"name": "get_weather", "parameters": {"type": "object"}}]'


@pytest.fixture(scope="module")
def scripted() -> Iterator[Running]:
    running = Running(model="fake:tokens_per_s=400", script=SCRIPT).start()
    yield running
    running.stop()


@pytest.fixture
def page(open_page: OpenPage, scripted: Running) -> Page:
    return connected(open_page(scripted.url))


def ended(answer: Locator) -> str:
    return finished(answer).strip()


def thought(answer: Locator) -> Locator:
    return answer.get_by_role("button", name="Thought")


def give_tools(page: Page, text: str) -> None:
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_label("Tools").fill(text)


def test_reasoning_streams_and_closes_when_the_answer_begins(page: Page) -> None:
    answer = ask(page, "Please think.")
    expect(answer.get_by_role("button", name="Thinking")).to_have_attribute("aria-expanded", "true")
    expect(answer.get_by_role("region", name="Reasoning")).to_contain_text("The weather of Oslo")
    assert ended(answer) == "I think, therefore I am."
    expect(thought(answer)).to_have_attribute("aria-expanded", "false")
    expect(thought(answer)).to_contain_text(LASTED)
    expect(answer.get_by_role("region", name="Reasoning")).to_be_hidden()
    num_thought = len(f"\n{THOUGHT}\n")  # a token is a byte; its marks are not counted
    expect(answer.locator(".meta")).to_contain_text(f"{num_thought} of them reasoning")
    thought(answer).press("Enter")
    expect(thought(answer)).to_have_attribute("aria-expanded", "true")
    expect(answer.get_by_role("region", name="Reasoning")).to_have_text(THOUGHT.strip())
    assert "Oslo" not in page.locator("article.user").all_inner_texts()[0]


def test_reasoning_is_there_after_a_reload_and_resumes_within(page: Page) -> None:
    answer = ask(page, "Please think.")
    expect(answer.get_by_role("region", name="Reasoning")).to_contain_text("asked for. The")
    page.reload()
    answer = page.locator("article.assistant").last
    assert ended(answer) == "I think, therefore I am."
    thought(answer).click()
    expect(answer.get_by_role("region", name="Reasoning")).to_have_text(THOUGHT.strip())
    page.reload()
    assert ended(answer) == "I think, therefore I am."
    thought(answer).click()
    expect(answer.get_by_role("region", name="Reasoning")).to_have_text(THOUGHT.strip())


def test_reasoning_has_its_time_where_the_page_was_away(page: Page, scripted: Running) -> None:
    answer = ask(page, "Please think.")
    expect(answer.get_by_role("region", name="Reasoning")).to_contain_text("The weather of Oslo")
    address = page.url
    page.goto("about:blank")
    scripted.wait_idle()
    page.goto(address)  # the rest comes at once
    assert ended(page.locator("article.assistant")) == "I think, therefore I am."
    expect(thought(answer)).to_contain_text(LASTED)


def test_an_answer_with_reasoning_is_forked_cut_and_continued(page: Page) -> None:
    answer = ask(page, "Please think.")
    finished(answer)
    act(answer, "Show tokens")
    tokens = answer.locator(".token")
    expect(tokens.filter(has_text="I")).not_to_have_count(0)
    said = "".join(tokens.all_inner_texts())
    assert said.endswith("I think, therefore I am.")
    tokens.nth(said.index("therefore")).click()  # a token is a byte
    page.get_by_label("Your own text from here").fill("and so it ends")
    page.get_by_role("button", name="Continue from here", exact=True).click()
    expect(answer.locator(".picker")).to_contain_text("2/2")
    assert finished(answer).startswith("I think, and so it ends")
    expect(thought(answer)).to_have_attribute("aria-expanded", "false")

    limit(page, 100)
    answer = ask(page, "Let me think once more.")
    expect(answer.get_by_role("button", name="Continue")).to_be_visible()
    expect(thought(answer)).to_have_attribute("aria-expanded", "true")  # nothing followed
    act(answer, "Continue")
    expect(answer.locator(".meta")).to_contain_text("100 tokens after 100 kept")
    act(answer, "Regenerate")
    expect(answer.locator(".picker")).to_contain_text("2/2")


def test_tools_that_are_no_list_are_a_fault_until_they_are_one(page: Page) -> None:
    give_tools(page, "[{bad json")
    field, fault = page.get_by_label("Tools"), page.get_by_role("dialog").get_by_role("alert")
    wrong = "This is not a JSON list of functions with a name each. No tools are sent."
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(field).to_have_accessible_description(wrong)
    page.get_by_role("button", name="Done", exact=True).click()  # it leads back to the field
    expect(field).to_be_focused()
    expect(fault).to_be_in_viewport(ratio=1)
    assert fault.evaluate("fault => getComputedStyle(fault).color") == "rgb(180, 35, 24)"
    page.keyboard.press("Escape")
    note = page.locator(".tools-note")
    expect(note).to_contain_text("Tools are not sent")
    page.reload()
    connected(page)
    note.get_by_role("button", name="Change the tools").click()
    expect(field).to_be_focused()
    field.fill(TOOLS)
    expect(field).to_have_accessible_description(re.compile("^Functions that the model may call"))
    page.get_by_role("button", name="Done", exact=True).click()
    expect(page.get_by_role("dialog")).to_be_hidden()
    expect(note).to_have_count(0)


def test_a_call_is_shown_and_its_result_is_the_next_turn(page: Page) -> None:
    give_tools(page, '[{"parameters": {}}]')
    expect(page.get_by_text("This is not a JSON list of functions")).to_be_visible()
    page.get_by_label("Tools").fill(TOOLS)
    page.get_by_role("button", name="Done", exact=True).click()
    answer = ask(page, "How is the weather?")
    call = answer.get_by_role("region", name="Call of get_weather")
    arguments = call.get_by_role("region", name="Arguments of get_weather")
    expect(arguments).to_have_text(json.dumps({"city": "Oslo", "days": [1, 2]}, indent=2))
    assert ended(answer) == "I look."
    expect(page.locator("main > [role=status]")).to_have_text("The answer calls get_weather")
    thought(answer).click()
    for size in SIZES.values():
        page.set_viewport_size(size)  # type: ignore[arg-type]
        assert faults_in_each_theme(page) == []
    answer.get_by_label("Result of get_weather").fill("It rains.")
    answer.get_by_role("button", name="Send result").click()
    expect(page.locator("article.user").last).to_contain_text("get_weather")
    expect(page.locator("article.user").last).to_contain_text("It rains.")
    last = page.locator("article.assistant").nth(1)
    assert ended(last) == "Take an umbrella."
    expect(page.get_by_role("button", name="Send result")).to_have_count(0)
    page.reload()
    expect(page.locator("article.user").last).to_contain_text("It rains.")
    expect(page.get_by_role("region", name="Arguments of get_weather")).to_contain_text("Oslo")
