"""Requests with the lengths of the papers' data sets, and what their page tables hold.

Lengths are drawn as the load tests' workloads draw them; token ids are random, so no two requests
begin alike. Called by the modules of `streamer bench paper`.
"""

from __future__ import annotations

import random
from typing import Literal, NamedTuple

from streamer.core.view import SchedulerView
from streamer.loadtest.paper.steps import FIRST_ID, LAST_ID

CONTEXT = 2048  # tokens, as the paper's models have
TINY_SCALE = 8

Kind = Literal["ShareGPT", "Alpaca"]


class Ask(NamedTuple):
    """A request: token ids, and how many to answer with."""

    prompt: tuple[int, ...]
    num_output: int


def asks(kind: Kind, count: int, *, scale: int = 1, context: int = CONTEXT) -> list[Ask]:
    """Requests with the lengths that jobs.py gives these data sets, within the context.

    scale  lengths are divided by it
    """
    from streamer.loadtest.open_loop.jobs import ALPACA, SHAREGPT, SIGMAS, draw_length

    means = {"ShareGPT": SHAREGPT, "Alpaca": ALPACA}[kind]
    source = random.Random(kind)
    found = []
    for _ in range(count):
        drawn = [draw_length(source, mean, SIGMAS[means]) for mean in means]
        num_prompt, num_output = (max(1, n // scale) for n in drawn)
        num_prompt = min(num_prompt, context // 2)
        prompt = tuple(source.randrange(FIRST_ID, LAST_ID) for _ in range(num_prompt))
        found.append(Ask(prompt, min(num_output, context - num_prompt)))
    return found


def page_tables(view: SchedulerView) -> list[tuple[int, memoryview]]:
    """(tokens whose KV is there, device block ids) of each sequence that has any."""
    return [
        (seq.computed, memoryview(seq.blocks).cast("I"))
        for request in view.requests
        for seq in request.sequences
        if seq.blocks
    ]
