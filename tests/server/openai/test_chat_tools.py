"""Parsed chats by themselves: what a reader gets who had seen some of the answer."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from streamer.core.plan import Finish, FinishReason
from streamer.core.sampling import SamplingParams
from streamer.engine.flow import Limits
from streamer.engine.requests import GenerateRequest, Progress
from streamer.engine.stream import TokenStream
from streamer.server.openai.chat import READER
from streamer.server.openai.chat_tools import ParsedChatAnswer
from streamer.server.parsing.formats import REASONING_FORMATS, TOOL_FORMATS, ModelFormat, Think
from streamer.server.parsing.tools import Parsing
from tests.engine.helpers import LETTERS, Calls
from tests.engine.test_progress import progress_of

TEXTS = [
    b"<think>\nI look.  Then ask.\n</think>\n\nSo it is. ",
    b'Now. <tool_call>\n{"name": "f", "arguments": {"a": "b c"}}\n</tool_call>',
]
PARAMS = SamplingParams(n=len(TEXTS), seed=5, max_tokens=200)


def new_stream(progress: Progress | None = None) -> TokenStream:
    asked = GenerateRequest(prompt=(1,), params=PARAMS, request_id="r", progress=progress)
    return TokenStream(asked, Limits(detach_s=None), Calls(), LETTERS, {})


def push(stream: TokenStream, choice: int, begin: int, end: int) -> None:
    """The tokens of a choice, one a byte; the last ends it."""
    tokens = TEXTS[choice]
    for i in range(begin, end):
        finish = Finish("r", choice, FinishReason.STOP, len(tokens))
        stream.push(choice, tokens[i], None, finish if i + 1 == len(tokens) else None)


def chunks_of(data: bytes) -> list[tuple[list[int], Any]]:
    """Each event's numbers and its choice."""
    found = []
    for event in data.decode().strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in event.splitlines())
        numbers = [int(n) for n in fields["id"].split(".")]
        found.append((numbers, msgspec.json.decode(fields["data"])["choices"][0]))
    return found


def answer_of(stream: TokenStream, after: list[int]) -> ParsedChatAnswer:
    think = REASONING_FORMATS["qwen3"]
    assert isinstance(think, Think)
    parsing = Parsing(ModelFormat(calls=TOOL_FORMATS["hermes"], think=think), {"f": {}})
    body = READER.decode(b'{"messages": []}')
    return ParsedChatAnswer(parsing, body, [stream], "m", lambda i: bytes([i]), after)


def folded(chunks: list[tuple[list[int], Any]]) -> dict[tuple[int, str], str]:
    found: dict[tuple[int, str], str] = {}
    for _, choice in chunks:
        delta = choice["delta"]
        calls = delta.get("tool_calls") or ()
        pieces = [(k, delta.get(k)) for k in ("content", "reasoning")]
        pieces += [(k, c["function"].get(k)) for c in calls for k in ("name", "arguments")]
        pieces.append(("finish", choice["finish_reason"]))
        for name, text in pieces:
            key = choice["index"], name
            found[key] = found.get(key, "") + (text or "")
    return found


def test_a_reader_goes_on_whatever_a_restart_has_lost() -> None:
    """The tokens that the last chunk had come again; what the parser held back is not left out."""
    whole = new_stream()
    reader, sender = whole.attach(0, lambda: None), answer_of(whole, [0, 0])
    sent, ends = chunks_of(sender.opening()), [0, 0]
    kept: list[tuple[int, Progress, list[int]]] = [(2, progress_of(whole), [0, 0])]
    chance = random.Random(1)
    while ends != [len(text) for text in TEXTS]:
        for choice, text in enumerate(TEXTS):
            end = min(len(text), ends[choice] + chance.randrange(5))
            push(whole, choice, ends[choice], end)
            ends[choice] = end
        if data := sender.deltas(0, whole.take(reader)):
            sent += chunks_of(data)
        kept.append((len(sent), progress_of(whole), list(ends)))
    expected = folded(sent)
    assert expected[0, "reasoning"].strip() == "I look.  Then ask."
    assert expected[1, "arguments"] == '{"a": "b c"}'
    for seen, (num, _, _) in enumerate(kept):
        for _, progress, begins in kept[: seen + 1]:
            stream = new_stream(progress)
            answer = answer_of(stream, sent[num - 1][0])
            stream.cursors_at(answer.cursors)  # raises none
            again = stream.attach(answer.begins_at, lambda: None)
            rest = answer.deltas(0, stream.take(again))
            for choice, text in enumerate(TEXTS):
                push(stream, choice, begins[choice], len(text))
            rest += answer.deltas(0, stream.take(again))
            assert folded(sent[:num] + (chunks_of(rest) if rest else [])) == expected
