"""Prompts that can't fit are refused by their length, before any pass over them."""

from __future__ import annotations

import asyncio

import pytest

from streamer.errors import ContextLengthExceeded, InvalidRequest
from streamer.fake.tokenizer import VOCAB_SIZE
from tests.engine.helpers import DEADLINE_S, make_engine, request

CONTEXT = 100


async def test_too_many_ids_are_refused_without_reading_them() -> None:
    async with asyncio.timeout(DEADLINE_S), make_engine(max_model_len=CONTEXT) as engine:
        with pytest.raises(ContextLengthExceeded, match=str(CONTEXT)):
            engine.submit(request(prompt=(VOCAB_SIZE,) * CONTEXT))
        with pytest.raises(InvalidRequest, match="not a token id"):
            engine.submit(request(prompt=(VOCAB_SIZE,)))


async def test_a_text_longer_than_any_tokens_could_be_is_not_encoded() -> None:
    """The fake's longest token is <|assistant|>: thirteen bytes."""
    longest = 13 * (CONTEXT - 1)
    async with asyncio.timeout(DEADLINE_S), make_engine(max_model_len=CONTEXT) as engine:
        assert len(await engine.encode("x" * longest, add_special_tokens=False)) == longest
        assert len(await engine.encode("<|assistant|>" * (CONTEXT - 1))) == CONTEXT - 1
        for text in ("x" * (longest + 1), "é" * (longest // 2 + 1)):
            with pytest.raises(ContextLengthExceeded, match=f"at least {CONTEXT} tokens") as e:
                await engine.encode(text)
            assert e.value.param == "prompt"
        for word in ("x", "<|user|>"):
            with pytest.raises(ContextLengthExceeded, match="at least") as e:
                await engine.encode_chat([{"role": "user", "content": word * longest}])
            assert e.value.param == "messages"
