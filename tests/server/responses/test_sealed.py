"""`encrypted_content` of reasoning: sent back without `store`, by the official client."""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from typing import Any

import httpx
import openai
import pytest

from streamer.errors import InvalidRequest
from streamer.server.responses.sealed import MAC_BYTES, PREFIX, seal, unseal
from tests.server.support.running import Running

KEYS = ("key-one", "key-two")
# `when` looks at the last message, and the template writes reasoning into the assistant's
SCRIPT = [{"when": "", "answer": "<think>\nAll foxes are red. 🦊\n</think>\n\nRed."}]
ASKED: list[Any] = [{"role": "user", "content": "Which colour?"}]
ENCRYPTED: Any = ["reasoning.encrypted_content"]


def running() -> Running:
    return Running(script=SCRIPT, api_key=KEYS).start()


def client_of(server: Running, key: str = KEYS[0]) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)


def prompt_of(server: Running, items: list[Any]) -> str:
    """What the model reads: a byte a token."""
    body = {"input": items, "return_token_ids": True, "stream": True, "store": False}
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    sent = httpx.post(f"{server.url}/v1/responses", json=body, headers=headers, timeout=20)
    first = next(line for line in sent.text.splitlines() if line.startswith("data: "))
    ids = json.loads(first[6:])["prompt_token_ids"]
    return bytes(i for i in ids if i < 256).decode()


def test_reasoning_is_sent_back_through_a_restart() -> None:
    server = running()
    with client_of(server) as client:
        plain = client.responses.create(model="fake", input=ASKED, store=False)
        assert plain.output[0].type == "reasoning"
        assert plain.output[0].encrypted_content is None
        with client.responses.stream(
            model="fake", input=ASKED, store=False, include=ENCRYPTED
        ) as stream:
            done = [e for e in stream if e.type == "response.output_item.done"]
            whole = stream.get_final_response()
    server.stop()
    (item, message) = whole.output
    assert item.type == "reasoning"
    assert item.encrypted_content
    assert done[0].item == item  # the same value in the event
    # As clients keep it that drop what they can't show.
    kept = {"type": "reasoning", "id": item.id, "summary": []}
    kept["encrypted_content"] = item.encrypted_content
    items = [*ASKED, kept, message.model_dump(), {"role": "user", "content": "Sure?"}]

    server = running()
    try:
        given = prompt_of(server, items)
        assert "<think>\nAll foxes are red. 🦊\n</think>\n\nRed." in given
        spelled = [*ASKED, {**kept, "content": item.model_dump()["content"]}, *items[2:]]
        del spelled[1]["encrypted_content"]
        assert prompt_of(server, spelled) == given
        with (
            client_of(server, KEYS[1]) as other,
            pytest.raises(openai.BadRequestError) as refused,
        ):
            other.responses.create(model="fake", input=items, store=False)
        assert refused.value.code == "invalid_encrypted_content"
        assert refused.value.param == "input[1].encrypted_content"
    finally:
        server.stop()


@pytest.mark.parametrize("text", ["", "a", "Füchse 🦊\n" * 1000])
@pytest.mark.parametrize("tenant", ["", "a" * 64])
def test_a_value_opens_for_its_tenant_alone(text: str, tenant: str) -> None:
    value = seal(text, tenant)
    assert unseal(value, tenant, "p") == text
    assert len(value) <= len(PREFIX) + 4 * ((MAC_BYTES + len(text.encode())) // 3 + 1)
    for wrong in (
        *(value[:-4], value + "AAAA", value.removeprefix(PREFIX), "sr0_" + value[4:]),
        *("", "gAAAAABo", "é", PREFIX, PREFIX + "AAAA" * 6, value[:9] + "_" + value[10:]),
    ):
        if wrong != value:
            with pytest.raises(InvalidRequest):
                unseal(wrong, tenant, "p")
    with pytest.raises(InvalidRequest):
        unseal(value, tenant + "b", "p")


def test_a_forged_value_that_is_no_text_is_a_400() -> None:
    """Without keys anyone can compute the digest."""
    from streamer.server.responses import sealed

    data = b"\xff\xfe"
    forged = PREFIX + urlsafe_b64encode(sealed._mac(data, "") + data).decode()
    with pytest.raises(InvalidRequest):
        unseal(forged, "", "p")
