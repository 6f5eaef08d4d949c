"""Both pools of KV blocks full, beneath clients of every feature, over HTTP and the CPU's runner.

A victim that finds no room on the host is computed again. Which of the two becomes of it no client
can see: each answer is what it is on an idle server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from streamer.core.kv import KVManager
from tests.chaos.clients import Server
from tests.chaos.test_kills import asks, outcomes
from tests.chaos.test_soak import check_each_step
from tests.server.support.running import BUNDLED, Running

NUM_BLOCKS, NUM_HOST = 40, 12  # an answer of the mix needs 8 or so, 13 of them run at once
BLOCK_BYTES = 16 * 6 * 2 * 2 * 64 * 4  # of the bundled model, in float32
PREEMPTIONS = [f'streamer_preemptions_total{{kind="{kind}"}}' for kind in ("swap", "recompute")]


async def test_bundled_answers_are_the_same_where_both_pools_are_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full: list[bool] = []
    cost = KVManager.swap_cost

    def seen(kv: KVManager, seqs: Iterable[Any]) -> tuple[int, int, bool]:
        found = cost(kv, seqs)
        full.append(found[0] > kv.host.num_free)
        return found

    async def lost() -> None:
        raise AssertionError("the server lost a connection")

    monkeypatch.setattr(KVManager, "swap_cost", seen)
    num_checks = check_each_step(monkeypatch)
    settings = {**BUNDLED, "num_gpu_blocks_override": NUM_BLOCKS, "max_model_len": 512}
    settings |= {"swap_space": NUM_HOST * BLOCK_BYTES / (1 << 30), "max_wait_s": 0.0}
    server = Running(**settings).start()
    try:
        assert server.engine.info.num_host_blocks == NUM_HOST
        client = Server(server.url, lost)
        wanted = {name: await ask(client) for name, ask in asks(5).items()}
        assert set(server.metrics(PREEMPTIONS).values()) == {0.0}
        found = await outcomes(client, asks(5))
        for name, outcome in found.items():
            assert outcome == wanted[name], name
        swapped, recomputed = server.metrics(PREEMPTIONS).values()
        assert swapped
        assert recomputed
        assert any(full)
        await asyncio.to_thread(server.wait_idle)
        assert num_checks[0] >= server.metric("streamer_steps_total")
    finally:
        await asyncio.to_thread(server.stop)
    assert server.exit_code == 0
