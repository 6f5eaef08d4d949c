"""Ranks on GPUs: sums over NCCL, and where there are two, the tokens of one.

A machine with one GPU runs the group of one alone.
"""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.gpu.on_device import require_cuda

require_cuda()

from streamer import AsyncEngine, SamplingParams  # noqa: E402
from streamer.config import Config  # noqa: E402
from streamer.engine.engine import GenerateRequest  # noqa: E402
from streamer.model.ranks.group import LOOPBACK, Group, OtherLeft, Seat  # noqa: E402
from streamer.model.ranks.store import FirstStore  # noqa: E402

WHERE = torch.device("cuda", 0)


def test_a_group_of_one() -> None:
    """NCCL meets through our store, and computes on the device."""
    group = Group(Seat(0, 1, 1, LOOPBACK, WHERE), FirstStore(30.0))
    part = torch.randn(5, 8, device=WHERE)
    assert torch.equal(group.sum(part), part)
    assert torch.equal(group.concatenate(part, [8]), part)
    assert group.minima((3, -1)) == [3, -1]
    assert not group.can_meet_again
    group.leave()
    with pytest.raises(OtherLeft, match="this rank has left"):
        group.sum(part)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_have_the_tokens_of_one() -> None:
    """Of the bundled model, each rank on its own GPU, in fp32: greedy and seeded ones at once."""
    assert asyncio.run(answers(2)) == asyncio.run(answers(1))


async def answers(num_ranks: int) -> list[list[int]]:
    config = Config(
        dtype="float32", device="cuda", tensor_parallel_size=num_ranks,
        num_gpu_blocks_override=64, load_progress=False,
    )  # fmt: skip
    async with AsyncEngine.from_config(config) as engine:
        streams = []
        for i in range(6):
            params = SamplingParams(
                max_tokens=40, ignore_eos=True, seed=i, temperature=float(i % 2)
            )
            prompt = tuple(range(3 + i, 40 + 3 * i))
            streams.append(engine.submit(GenerateRequest(prompt=prompt, params=params)))
        for stream in streams:
            await stream.wait()
        return [list(stream.token_ids()) for stream in streams]
