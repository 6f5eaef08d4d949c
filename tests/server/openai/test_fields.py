"""How bodies are decoded: rules of known fields, errors that say where, bounds, prompt forms."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import msgspec
import pytest

from streamer.errors import InvalidRequest
from streamer.server.openai import chat, completions
from streamer.server.openai.common import SamplingFields, sampling_params
from streamer.server.openai.fields import Reader, Table
from streamer.server.responses import body as responses

BODIES: dict[str, tuple[Table, type[msgspec.Struct], dict[str, Any]]] = {
    "chat": (
        chat.FIELDS,
        chat.ChatRequest,
        {"messages": [{"role": "user", "content": "hello"}]},
    ),
    "completions": (completions.FIELDS, completions.CompletionRequest, {"prompt": "hello"}),
    "responses": (responses.FIELDS, responses.ResponseCreate, {"input": "hello"}),
}
READERS: dict[str, Any] = {
    "chat": chat.READER,
    "completions": completions.READER,
    "responses": responses.READER,
}


def decode(kind: str, **fields: Any) -> Any:
    return READERS[kind].decode(json.dumps({**BODIES[kind][2], **fields}).encode())


HONOURED = [
    (kind, name) for kind, (_, d, _) in BODIES.items() for name in d.__struct_encode_fields__
]
KNOWN = [(kind, name) for kind, (table, _, _) in BODIES.items() for name in table]


@pytest.mark.parametrize(("kind", "name"), HONOURED + KNOWN)
def test_a_field_is_honoured_or_a_hint_or_refused_by_name(kind: str, name: str) -> None:
    strange: dict[str, Any] = {"surely": "nothing anybody means"}
    if (kind, name) in KNOWN:
        assert (kind, name) not in HONOURED
        assert not hasattr(decode(kind, **{name: None}), name)
    elif name not in BODIES[kind][2]:
        assert getattr(decode(kind, **{name: None}), name) is None
    if name in ("metadata", "chat_template_kwargs", "structured_outputs"):
        return
    if name == "text":
        strange = {"format": {"type": "xml"}}
    if name == "reasoning":
        strange = {"effort": "much"}
    if name == "stream_options":
        strange = {"include_usage": "yes", "include_obfuscation": "yes"}
    with pytest.raises(InvalidRequest) as caught:
        decode(kind, **{name: strange})
    assert caught.value.param is not None
    assert caught.value.param.split(".")[0] == name
    assert caught.value.status == 400


@pytest.mark.parametrize(("kind", "name"), KNOWN)
def test_harmless_values_are_accepted(kind: str, name: str) -> None:
    for value in (None, *(BODIES[kind][0][name].harmless or ())):
        decode(kind, **{name: value})


def test_nulls_in_an_object_ask_for_nothing() -> None:
    decode("responses", reasoning={"effort": None, "summary": None})
    decode("responses", reasoning={"effort": "none", "summary": None})
    decode("responses", text={"format": {"type": "text", "strict": None}, "verbosity": None})
    with pytest.raises(InvalidRequest):
        decode("responses", text={"format": {}})


def test_every_refused_field_is_named_at_once() -> None:
    body = b'{"messages": [], "tools": [], "store": true, "n": 1, "modalities": ["audio"]}'
    with pytest.raises(InvalidRequest, match="modalities, store are not supported") as refusal:
        chat.READER.decode(body)
    assert refusal.value.param == "modalities"


def test_a_number_is_not_a_truth_value() -> None:
    with pytest.raises(InvalidRequest, match="use_beam_search"):
        decode("chat", use_beam_search=0)
    decode("chat", length_penalty=1)


def test_a_whole_number_may_be_written_with_a_point() -> None:
    """JSON has one type of numbers; beside one nothing else is taken for what it is not."""
    schema = {"json": {"const": 1.5}}
    body = decode("completions", max_tokens=5.0, top_k=2e0, structured_outputs=schema)
    assert (body.max_tokens, body.top_k, body.structured_outputs) == (5, 2, schema)
    for stream in ("true", 1, 1.0):
        with pytest.raises(InvalidRequest) as caught:
            decode("completions", max_tokens=5.0, stream=stream)
        assert (caught.value.param, caught.value.code) == ("stream", "invalid_type")
    assert decode("completions", prompt=[1.0, 2]).prompts() == [(1, 2)]
    for wrong in (5.5, "5", 1e30):
        with pytest.raises(InvalidRequest) as caught:
            decode("completions", max_tokens=wrong)
        assert (caught.value.param, caught.value.code) == ("max_tokens", "invalid_type")


def test_unknown_fields_are_ignored() -> None:
    assert decode("chat", nobody_knows_this=[1, 2]).messages[0].content == "hello"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"messages":[{"role":"bot","content":"x"}]}', "messages[0].role"),
        (
            b'{"messages":[{"role":"user","content":[{"type":"image_url"}]}]}',
            "messages[0].content[0].type",
        ),
        (
            b'{"messages":[{"role":"user","content":[{"text":"x"}]}]}',
            "messages[0].content[0].type",
        ),
        (b'{"messages":[],"temperature":"hot"}', "temperature"),
        (b'{"messages":[],"top_k":1.5}', "top_k"),
        (b'{"messages":[],"ignore_eos":1}', "ignore_eos"),
        (b'{"messages":[],"logit_bias":{"7":1,"x":1}}', "logit_bias.x"),
        (b'{"messages":[],"logit_bias":{"7":1,"8":"a"}}', "logit_bias.8"),
        # No JSON follows, so the key can't be found.
        (b'{"messages":[],"logit_bias":{"8":"a"},"x":tru}', "logit_bias"),
        (b'{"messages":[],"logit_bias":{"8":"a"},"\xf6":1}', "logit_bias"),
        (b'{"messages":[],"logit_bias":{"8":"a"},"x":' + b"[" * 9999, "logit_bias"),
        (b'{"messages":[],"metadata":{"a":1}}', "metadata.a"),
        (b'{"messages":[],"top_k":Infinity}', "top_k"),
        (b'{"messages":[],"top_k":1e400}', "top_k"),
        (b'{"messages":[],"stop":["a",5]}', "stop[1]"),
        (b'{"messages":[],"user":5}', "user"),
        (b"{}", "messages"),
        (b"[]", None),
        (b"{", None),
        (b"", None),
        (b"\xff", None),
        (b'{"model":"\xff"}', None),
        (b'{"messages":[],"temperature":NaN}', "temperature"),
        (b'{"messages":[{"role":"user","content":-Infinity}]}', "messages[0].content"),
        (b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "x"),
    ],
)
def test_a_body_at_fault_says_where(body: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat.READER.decode(body)
    assert caught.value.param == param
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.5}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"seed": 1 << 64}, "seed"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"detach_s": -1}, "detach_s"),
        ({"priority": 1 << 40}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"metadata": {"k": "x" * 513}}, "metadata.k"),
        ({"metadata": {"k" * 65: "x"}}, "metadata." + "k" * 64),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
    ],
)
def test_bounds_name_the_field_as_the_body_has_it(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode("chat", **fields).params({})
    assert caught.value.param == param


@pytest.mark.parametrize("field", ["function_call", "audio"])
def test_message_fields_that_are_not_done_are_refused_by_path(field: str) -> None:
    message = {"role": "assistant", "content": "x", field: [{"id": "1"}]}
    body = decode("chat", messages=[{"role": "user", "content": "x"}, message])
    with pytest.raises(InvalidRequest) as caught:
        body.template_messages()
    assert caught.value.param == f"messages[1].{field}"


def test_defaults_come_from_the_model_and_the_body_wins() -> None:
    defaults = {"temperature": 0.6, "top_k": 20.0, "something_else": 3.0}
    body = msgspec.convert({"top_k": 5}, SamplingFields)
    params = sampling_params(body, defaults, max_tokens=7, logprobs=None)
    assert (params.temperature, params.top_k, params.max_tokens) == (0.6, 5, 7)
    assert sampling_params(SamplingFields(), defaults, max_tokens=None, logprobs=None).top_k == 20


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", ["ab"]),
        ([1, 2], [(1, 2)]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
        (["a", [2]], ["a", (2,)]),
    ],
)
def test_prompt_forms(prompt: Any, expected: list[Any]) -> None:
    assert decode("completions", prompt=prompt).prompts() == expected


@pytest.mark.parametrize(
    ("prompt", "param"),
    [([], "prompt"), ([[]], "prompt[0]"), (["a", ""], "prompt[1]"), (["a", 3], "prompt[1]")],
)
def test_prompts_at_fault(prompt: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode("completions", prompt=prompt).prompts()
    assert caught.value.param == param


def test_a_batch_has_a_limited_number_of_choices() -> None:
    assert len(decode("completions", prompt=["x"] * 64, n=4).prompts()) == 64
    assert len(decode("completions", prompt=["x"] * 256).prompts()) == 256
    with pytest.raises(InvalidRequest, match="260 choices") as caught:
        decode("completions", prompt=["x"] * 65, n=4).prompts()
    assert caught.value.param == "n"


def test_metadata_is_bounded_on_sockets_too() -> None:
    decode("responses", metadata={"k" * 64: "x" * 512}).params({})
    with pytest.raises(InvalidRequest) as caught:
        decode("responses", metadata={str(i): "x" for i in range(17)}).params({})
    assert caught.value.param == "metadata"


@pytest.mark.parametrize(
    ("kind", "fields", "came", "accepted"),
    [
        (
            "chat",
            {"messages": [{"role": "critic"}]},
            "critic",
            "assistant developer system tool user",
        ),
        ("chat", {"messages": [{"role": 5}]}, "int", "assistant developer system tool user"),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "image_url",
            "text",
        ),
        (
            "responses",
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input_image",
            "input_text output_text reasoning_text",
        ),
        (
            "responses",
            {"input": [{"type": "compaction"}]},
            "compaction",
            "function_call function_call_output item_reference message reasoning",
        ),
    ],
)
def test_a_value_that_is_not_accepted_is_answered_with_those_that_are(
    kind: str, fields: dict[str, Any], came: str, accepted: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(kind, **fields)
    start, _, end = caught.value.message.partition("; accepted: ")
    assert came in start
    assert end == ", ".join(map(repr, accepted.split()))


def test_a_refused_field_says_what_to_do_instead() -> None:
    with pytest.raises(InvalidRequest, match="fill-in tokens"):
        decode("completions", suffix="end")


def test_input_items_have_a_role_and_a_text() -> None:
    items = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "hello", "annotations": []}],
        },
        {"role": "user", "content": [{"type": "input_text", "text": t} for t in ("a", "b")]},
    ]
    assert [(i.role, i.text) for i in decode("responses", input=items).items()] == [
        ("developer", "be brief"),
        ("user", "hi"),
        ("assistant", "hello"),
        ("user", "a\nb"),
    ]
    (only,) = decode("responses", input="hi").items()
    assert (only.role, only.text) == ("user", "hi")


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([{"type": "computer_call_output", "call_id": "1", "output": "x"}], "input[0].type"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0].type"),
        ([{"role": "user"}], "input[0].content"),
        ([{"content": "x"}], "input[0].role"),
        ([{"type": "item_reference"}], "input[0].id"),
    ],
)
def test_input_items_that_are_not_done_are_refused_by_path(items: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode("responses", input=items).items()
    assert caught.value.param == param


# ---------------------------------------------------------------- many small elements

BOMB = [[]] * 300_000


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("chat", {"tools": BOMB}, "tools[0]"),
        ("chat", {"messages": BOMB}, "messages[0]"),
        ("chat", {"stop": BOMB}, "stop[0]"),
        ("responses", {"text": {"format": BOMB}}, "text.format"),
        ("responses", {"metadata": {"x": BOMB}}, "metadata"),
    ],
)
def test_what_is_refused_is_not_built_first(
    kind: str, fields: dict[str, Any], param: str, is_packed: bool
) -> None:
    table, body, base = BODIES[kind]
    pack = msgspec.msgpack if is_packed else msgspec.json
    data = pack.encode({**base, **fields})
    reader = Reader({body: table}, is_packed=is_packed)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest) as caught:
            reader.decode(data)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.param == param
    assert peak_bytes < 4 * len(data)


@pytest.mark.parametrize("is_packed", [False, True])
def test_unknown_fields_are_not_built(is_packed: bool) -> None:
    base = BODIES["responses"][2]
    many = dict.fromkeys(map(str, range(100_000)), 1)
    pack = msgspec.msgpack if is_packed else msgspec.json
    data = pack.encode({**many, **base, "logit_bias": {"7": 1.0}})
    reader = Reader({responses.ResponseCreate: responses.FIELDS}, is_packed=is_packed)
    tracemalloc.start()
    try:
        body = reader.decode(data)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert body.logit_bias == {7: 1.0}
    assert peak_bytes < len(data)


def test_a_body_keeps_nothing_of_the_data_it_came_in() -> None:
    assert type(decode("responses", tools=[], reasoning={})) is responses.ResponseCreate


def test_calls_of_a_message_that_are_none_are_refused_and_not_built() -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": BOMB}
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest) as caught:
            decode("chat", messages=[message])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.param == "messages[0].tool_calls[0]"
    assert peak_bytes < 12 << 20  # the JSON that this test writes is 1.2 MB of it
    harmless = {**message, "tool_calls": [], "audio": None, "tool_call_id": ""}
    assert decode("chat", messages=[harmless]).template_messages()


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("completions", b'"prompt":"a","logit_bias":{"x":1},"logit_bias":5'),
        ("chat", b'"messages":[{"role":"user","content":"a"}],"metadata":{"a":5},"metadata":"x"'),
    ],
)
def test_a_key_at_fault_in_a_field_that_is_there_twice_is_a_wrong_type(
    kind: str, fields: bytes
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        READERS[kind].decode(b"{%b}" % fields)
    assert refused.value.param in ("logit_bias", "metadata")


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("chat", {"messages": [{"role": "user", "content": "a", "name": "x" * 4096}]}, "name"),
        ("chat", {"chat_template_kwargs": {"x": "y" * (1 << 15)}}, "chat_template_kwargs"),
        ("responses", {"input": [{"role": "user", "content": "a", "id": "x" * 4096}]}, "id"),
    ],
)
def test_what_is_kept_of_a_body_beside_its_prompt_is_bounded(
    kind: str, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        decode(kind, **fields)
    assert param in str(refused.value.param)


def test_a_refusal_looks_through_the_types_of_a_body_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes milliseconds of the loop, and a bad body costs its sender nothing."""
    looked: list[Any] = []
    type_info = msgspec.inspect.type_info
    monkeypatch.setattr(msgspec.inspect, "type_info", lambda k: (looked.append(k), type_info(k))[1])
    for content in (1, 2, 3):
        with pytest.raises(InvalidRequest):
            decode("chat", messages=[{"role": content}])
    assert len(looked) <= 1
