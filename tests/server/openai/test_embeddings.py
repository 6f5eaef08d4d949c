"""POST /v1/embeddings by OpenAI's package: the vectors of transformers, at any load."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

from tests.checkpoints import make_checkpoint, reference_model
from tests.server.support.running import Running

PROMPTS = [[1, 2, 3], [7], list(range(1, 60)), [1, 2, 3, 4, 5, 6, 7, 8] * 6]
TOKENIZER = Path(__file__).parents[3] / "streamer" / "demo" / "checkpoint"


def served(folder: Path, **settings: Any) -> Running:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TOKENIZER / name).read_bytes())
    return Running(model=str(folder), dtype="float32", device="cpu", **settings).start()


def expected(folder: Path, prompts: list[list[int]]) -> np.ndarray:
    """The last hidden states, normalized, by transformers' own forward."""
    model = reference_model(folder)
    found = []
    with torch.inference_mode():
        for prompt in prompts:
            out = model(torch.tensor([prompt]), output_hidden_states=True)
            found.append(out.hidden_states[-1][0, -1])
    states = torch.stack(found)
    return (states / states.norm(dim=-1, keepdim=True)).numpy()


def vectors(answer: Any) -> np.ndarray:
    assert [each.index for each in answer.data] == list(range(len(answer.data)))
    return np.array([each.embedding for each in answer.data])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_they_are_the_last_hidden_states(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path / family, family, vocab_size=4096)
    # chunks of 16 tokens, and blocks for the longest alone: chunked, batched, preempted
    server = served(folder, max_num_seqs=4, max_num_batched_tokens=16, num_gpu_blocks_override=9)
    try:
        asked = {"model": server.engine.info.name}
        with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
            wanted = expected(folder, PROMPTS)
            # the package asks for base64 and decodes it
            answer = client.embeddings.create(**asked, input=PROMPTS)
            np.testing.assert_allclose(vectors(answer), wanted, atol=2e-5)
            assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, PROMPTS))
            # the second time most of the prompts come from the prefix cache
            numbers = client.embeddings.create(**asked, input=PROMPTS, encoding_format="float")
            np.testing.assert_allclose(vectors(numbers), wanted, atol=2e-5)
            one = client.embeddings.create(**asked, input=PROMPTS[0], dimensions=5)
            short = wanted[0, :5] / np.linalg.norm(wanted[0, :5])
            np.testing.assert_allclose(vectors(one), [short], atol=2e-5)
            with pytest.raises(openai.BadRequestError) as refused:
                client.embeddings.create(**asked, input="x", dimensions=4096)
            assert refused.value.param == "dimensions"
            texts = ["A fox.", "Foxes are red."]
            ids = [server.engine.tokenizer.encode(text) for text in texts]
            spelled = vectors(client.embeddings.create(**asked, input=texts))
            np.testing.assert_allclose(spelled, expected(folder, ids), atol=2e-5)
        asyncio.run(beside_answers(server, asked, wanted))
        server.wait_idle()
    finally:
        server.stop()


async def beside_answers(server: Running, asked: Any, wanted: np.ndarray) -> None:
    """Embeddings in the same steps as answers that run, which are what they are alone."""
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x") as client:
        drawn: Any = {**asked, "prompt": [5, 6, 7], "max_tokens": 30, "seed": 1}
        drawn["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
        alone = await client.completions.create(**drawn)
        beside, *found = await asyncio.gather(
            client.completions.create(**drawn),
            *(client.embeddings.create(**asked, input=p) for p in PROMPTS),
        )
    assert beside.choices[0].text == alone.choices[0].text
    np.testing.assert_allclose(np.concatenate([vectors(f) for f in found]), wanted, atol=2e-5)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [["a"]]}, "input"),
        ({"input": [1, "a"]}, "input[0]"),
        ({"input": [1 << 30]}, "input"),
        ({"input": ["a"] * 1025}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 9}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
        ({"input": "a", "priority": 1 << 40}, "priority"),
        ({"input": "a", "user": 5}, "user"),
    ],
    ids=str,
)
def test_bad_input_names_the_field(server: Running, body: dict[str, Any], param: str) -> None:
    refused = httpx.post(server.url + "/v1/embeddings", json=body)
    assert refused.status_code == 400
    assert (refused.json()["error"]["param"] or "").startswith(param)


def test_the_fake_model_embeds_too(server: Running) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x") as client:
        made = client.embeddings.create(model="fake", input=["a", "b", "a"], user="me")
        one, other, again = vectors(made)
    assert one.tolist() == again.tolist() != other.tolist()
    np.testing.assert_allclose(np.linalg.norm(one), 1.0, atol=1e-6)
    server.wait_idle()
