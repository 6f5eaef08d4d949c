"""Answers read by a checkpoint's own response_template: as transformers reads them, however cut."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from streamer.server.parsing.events import (
    Event,
    Reasoning,
    Text,
    ToolArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from streamer.server.parsing.templated import TemplateParser
from streamer.tokenizer.patterns import TimedPattern
from streamer.tokenizer.response_template import ResponseTemplate, load_template
from tests.server.support.running import Running

CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
TAGS = {
    "defaults": {"role": "assistant"},
    "start_anchor": ["<|assistant|>"],
    "fields": {
        "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|call>call:(?P<name>\w+)",
            "close": "<call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": CALL,
        },
        "content": {"close": ["<turn|>"]},
    },
}
XML = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open_pattern": r"\s*<call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<p=(?P<key>[^>]+)>\s*(?P<value>.*?)\s*</p>"},
            "transform": CALL,
        },
        "content": {"content": "text"},
    },
}
JSON = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": "[CALLS]",
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
            "repeats": True,
        },
        "content": {"content": "text"},
    },
}
ANSWERS = [
    (TAGS, "<|channel>thought\nHm.\n\nYes. <channel|>I look."
     '<|call>call:f{city:<|"|>Zü "x"<|"|>}<call|>'),
    (TAGS, "<|call>call:f{n:3,l:[1,{a:null}]}<call|><|call>call:g{}<call|>"),
    (TAGS, " Plain  text,\n\nof two parts.\n"),
    (TAGS, "<|channel>thought\nnever closed"),
    (XML, "<think>a</think>\n\nText.\n<call>\n"
     "<function=f><p=n>\n7\n</p><p=s>7</p></function>\n</call>"),
    (XML, "<call><function=g></function></call>\n<call><function=f><p=s>x</p></function></call>"),
    (JSON, 'Now.[CALLS]{"name": "f", "arguments": {"s": "[CALLS]"}}'),
]  # fmt: skip
TOOLS = {
    "f": {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}},
    "g": {},
}


def loaded(template: dict[str, Any]) -> ResponseTemplate:
    found = load_template(template)
    assert found is not None
    return found


def read(template: dict[str, Any], pieces: Sequence[str], **more: Any) -> list[Event]:
    parser = TemplateParser(loaded(template), more.pop("tools", TOOLS), **more)
    return [*(e for piece in pieces for e in parser.feed(piece)), *parser.end()]


def joined(events: Sequence[Event]) -> dict[str, Any]:
    calls: list[Any] = []
    for event in events:
        match event:
            case ToolCallBegin(index, None, name):
                assert index == len(calls)
                calls.append([name, ""])
            case ToolArguments(index, text):
                calls[index][1] += text
    texts = (e.text for e in events if isinstance(e, Text))
    thoughts = (e.text for e in events if isinstance(e, Reasoning))
    return {"text": "".join(texts), "thought": "".join(thoughts), "calls": calls}


@pytest.mark.parametrize(("template", "answer"), ANSWERS)
def test_it_is_what_transformers_reads(template: dict[str, Any], answer: str) -> None:
    given_tools: Any = [
        {"type": "function", "function": {"name": n, "parameters": p}} for n, p in TOOLS.items()
    ]
    wanted = parse_response(answer, template, prefix="", tools=given_tools)
    found = joined(read(template, [answer]))
    assert found["text"] == wanted.get("content", "")
    assert found["thought"] == wanted.get("reasoning_content", wanted.get("thinking", ""))
    functions = [call["function"] for call in wanted.get("tool_calls", [])]
    assert [(n, json.loads(a)) for n, a in found["calls"]] == [
        (f["name"], f["arguments"]) for f in functions
    ]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(ANSWERS), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_no_cut_changes_it(given_answer: tuple[dict[str, Any], str], sizes: list[int]) -> None:
    template, answer = given_answer
    pieces, at = [], 0
    while at < len(answer):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(answer[at : at + size])
        at += size
    assert joined(read(template, pieces)) == joined(read(template, [answer]))


PARTS = (
    *("<|call>call:f", "{", "}", "<call|>", "<|channel>thought\n", "<channel|>", "a", " ", '"'),
    *("\x01", "<call>", "<function=f>", "</function>", "</call>", "<think>", "</think>"),
    *("[CALLS]", "null"),
)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([TAGS, XML, JSON]), st.lists(st.sampled_from(PARTS)))
def test_nothing_raises(template: dict[str, Any], pieces: list[str]) -> None:
    read(template, pieces)


def test_broken_calls_and_calls_without_tools_are_text() -> None:
    broken = "I look.<|call>call:f{broken<call|><|call>call:g{}<call|>"
    events = read(TAGS, [broken])
    assert events == [
        Text("I look."),
        Text("<|call>call:f{broken<call|>"),
        *(ToolCallBegin(0, None, "g"), ToolArguments(0, "{}"), ToolCallEnd(0)),
    ]
    assert joined(read(TAGS, [broken], tools=None))["text"] == broken
    assert joined(read(JSON, ['[CALLS]{"name": 5}']))["text"] == '[CALLS]{"name": 5}'
    two = "<|call>call:f{}<call|>" * 2
    assert len(joined(read(TAGS, [two], max_calls=1))["calls"]) == 1


def test_what_the_prompt_has_begun_is_read_on() -> None:
    template = loaded(TAGS)
    assert template.beginning("<|user|>hi") is None
    assert template.beginning("<|assistant|>old<|user|>hi<|assistant|><|channel>thought\n") == (
        "<|channel>thought\n"
    )
    events = read(TAGS, ["Hm.<channel|>Yes."], beginning="<|channel>thought\n")
    assert events == [Reasoning("Hm."), Text("Yes.")]
    assert read(TAGS, [" and more"], beginning="Begun") == [Text(" and more")]


def changed(template: dict[str, Any], field: str, **more: Any) -> dict[str, Any]:
    fields = template["fields"]
    return {**template, "fields": {**fields, field: {**fields[field], **more}}}


ENDLESS = "(?:a|a)*[bc]"
SLOW = {
    "closing": (
        {**XML, "fields": {**XML["fields"], "thinking": {
            "open": "<think>", "close_pattern": ENDLESS}}},
        "<think>" + "a" * 50, " and this",
    ),
    "opening": (
        {**XML, "fields": {**XML["fields"], "thinking": {
            "open_pattern": ENDLESS, "close": "</think>"}}},
        "I say " + "a" * 50, " and this",
    ),
    "held": (changed(JSON, "tool_calls", close_pattern=ENDLESS), "Hm.[CALLS]" + "a" * 50, "{}"),
    # The pattern of a template that is in use: a parameter without an end, and many spaces.
    "values": (XML, "<call><function=f><p=s>" + " " * 3000 + "x</function></call>", " Then."),
    "strings": (
        changed(TAGS, "tool_calls", content_args={"string_delims": [["<", ">"]]}),
        "<|call>call:f" + "<" * 60_000 + "<call|>", " Then.",
    ),
    # A pattern of transformers' own, for keys without quotes.
    "keys": (TAGS, "<|call>call:f{a:" + '\\"' * 8000 + "<call|>", " Then."),
    "strings put back": (
        TAGS, "<|call>call:f[" + ",".join(['<|"|><|"|>'] * 16_000) + "]<call|>", " Then.",
    ),
    "inner": (
        changed(XML, "tool_calls", content="kv-lines", content_args={"value_parser": {
            "name": "xml-inline", "args": {"tag_pattern": "(?P<key>(?:a|a)*)[bc](?P<value>.)"}}}),
        "<call><function=f>k: " + "a" * 50 + "</function></call>", " Then.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SLOW)
def test_patterns_that_take_too_long_end_the_reading_not_the_server(name: str) -> None:
    """Nothing is lost, and the loop is not held up."""
    template, answer, rest = SLOW[name]
    began = time.thread_time()
    found = joined(read(template, [answer, rest]))
    assert time.thread_time() - began < 0.5
    assert found["calls"] == []
    spaces = str.maketrans("", "", " \n")
    said = (found["thought"] + found["text"]).translate(spaces)
    assert said == (answer + rest).removeprefix("<think>").translate(spaces)


def test_marks_without_text_do_not_open_a_field_again_and_again() -> None:
    marks = {"open_pattern": "(?=b)", "close_pattern": "(?=b)", "content": "json"}
    template = {**XML, "fields": {**XML["fields"], "thinking": marks}}
    reader = loaded(template).reader("", [])
    found = reader.feed("aaab, then")
    assert len(found) < 10  # 7,000 in the time of its patterns
    assert "".join(each.text for each in found if each.kind == "text") == "aaab, then"


def test_what_a_version_of_transformers_raises_ends_the_reading_not_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its parser is not ours: a method that it newly called on our patterns was a 500."""

    def broken(*_: object, **__: object) -> None:
        raise AttributeError("no such method")

    monkeypatch.setattr(TimedPattern, "search", broken)
    found = joined(read(TAGS, ["One. ", "Two."]))
    assert (found["thought"] + found["text"], found["calls"]) == ("One. Two.", [])
    assert "the rest is text" in caplog.text


def test_a_long_answer_is_read_to_its_end() -> None:
    call = "<|call>call:g{}<call|>"
    pieces = ["<|channel>thought\n", *["Hm. "] * 20_000, "<channel|>", *["Yes. "] * 20_000, call]
    found = joined(read(TAGS, pieces))
    assert (len(found["thought"]), len(found["text"])) == (20_000 * 4 - 1, 20_000 * 5 - 1)
    assert found["calls"] == [["g", "{}"]]


def test_an_anchor_that_takes_too_long_is_not_looked_for() -> None:
    template = {**TAGS, "start_anchor_pattern": ENDLESS}
    del template["start_anchor"]
    assert loaded(template).beginning("a" * 60) == ""


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        {"fields": {}},
        {**TAGS, "version": 2},
        "text",
        {**TAGS, "start_anchor_pattern": "x" * 1001},
        changed(XML, "tool_calls", content_args={"tag_pattern": "((a{99}){99}){99}"}),
    ],
)
def test_a_template_that_is_none_is_left_out(wrong: Any, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        assert load_template(wrong) is None
    assert bool(wrong) == ("is not used" in caplog.text)


SCRIPT = [{"answer": ANSWERS[0][1]}]


@pytest.fixture
def templated(monkeypatch: pytest.MonkeyPatch) -> Iterator[openai.OpenAI]:
    """A client of a server whose checkpoint says no more than its response_template."""
    server = Running(script=SCRIPT).start()
    tokenizer = server.engine.tokenizer  # shared by the engines of this process
    monkeypatch.setattr(tokenizer, "templates", "")
    monkeypatch.setattr(tokenizer, "response_template", loaded(TAGS))
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        yield client
    server.stop()


ASKED: Any = {
    "model": "fake",
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
}


def test_a_checkpoint_is_served_by_it(templated: openai.OpenAI) -> None:
    whole = templated.chat.completions.create(**ASKED).choices[0]
    with templated.chat.completions.stream(**ASKED) as stream:
        streamed = stream.get_final_completion().choices[0]
    for choice in (whole, streamed):
        message = choice.message
        assert (message.content, choice.finish_reason) == ("I look.", "tool_calls")
        (call,) = message.tool_calls or ()
        assert json.loads(call.function.arguments) == {"city": 'Zü "x"'}
    assert (whole.message.model_extra or {})["reasoning"] == "Hm.\n\nYes."


def test_its_calls_cannot_be_forced(templated: openai.OpenAI) -> None:
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    named = {"type": "function", "function": {"name": "f"}}
    for more, param in (
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": named}, "tool_choice"),
        ({"tools": [strict]}, "tools[0].function.parameters"),
    ):
        with pytest.raises(openai.BadRequestError, match="can't be forced") as refused:
            templated.chat.completions.create(**{**ASKED, **more})
        assert refused.value.param == param
