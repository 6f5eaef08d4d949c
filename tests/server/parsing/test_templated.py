"""Answers read by a checkpoint's own response_template: as transformers reads them, however cut."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
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


@pytest.mark.parametrize("wrong", [[], {"fields": {}}, {**TAGS, "version": 2}, "text"])
def test_a_template_that_is_none_is_left_out(wrong: Any, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        assert load_template(wrong) is None
    assert bool(wrong) == ("is not used" in caplog.text)


def test_a_checkpoint_is_served_by_it(tmp_path: Path, monkeypatch: Any) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps([{"answer": ANSWERS[0][1]}]))
    server = Running(script=str(script)).start()
    tokenizer = server.engine.tokenizer  # shared by the engines of this process
    monkeypatch.setattr(tokenizer, "templates", "")
    monkeypatch.setattr(tokenizer, "response_template", loaded(TAGS))
    asked: Any = {
        "model": "fake",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    try:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="x") as client:
            whole = client.chat.completions.create(**asked).choices[0]
            with client.chat.completions.stream(**asked) as stream:
                streamed = stream.get_final_completion().choices[0]
    finally:
        server.stop()
    for choice in (whole, streamed):
        message = choice.message
        assert (message.content, choice.finish_reason) == ("I look.", "tool_calls")
        (call,) = message.tool_calls or ()
        assert json.loads(call.function.arguments) == {"city": 'Zü "x"'}
    assert (whole.message.model_extra or {})["reasoning"] == "Hm.\n\nYes."
