"""What the comparisons with the papers stand on: a model's folder, requests, and the engine.

The real scheduler and runner under a Config, stepped by this thread: without the event loop, the
streams and the tokenizer, which a program that only generates has no use for either. Requests have
the lengths of the load tests' workloads and random token ids, so no two begin alike.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from streamer.core.plan import Add, StepOutput
from streamer.core.prefix import BlockHasher
from streamer.core.sampling import SamplingParams
from streamer.core.view import SchedulerView, Wanted

if TYPE_CHECKING:
    from streamer.core.model_info import ModelInfo
    from streamer.loadtest.workload import Model

CONTEXT = 2048  # tokens, as the paper's models have
TINY = {"vocabulary": 512, "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2}
TINY_SCALE = 8
EVERYTHING = Wanted((b"",))

Kind = Literal["ShareGPT", "Alpaca"]


class Ask(NamedTuple):
    """A request: token ids, and how many to answer with."""

    prompt: tuple[int, ...]
    num_output: int


def shape(name: str, *, tiny: bool) -> Model:
    """One of the load tests' models, or a tiny stand-in."""
    from msgspec.structs import replace

    from streamer.loadtest.workload import MODELS

    model = MODELS[name]
    return replace(model, **TINY, head_dim=16, ffn=128) if tiny else model


def write_model(folder: Path, model: Model) -> None:
    """Its checkpoint, with random weights and without a tokenizer."""
    import transformers

    from streamer.loadtest import models

    bars: Any = transformers.utils.logging
    bars.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    models.write_model(folder, model)


def asks(
    kind: Kind, count: int, model: Model, *, scale: int = 1, context: int = CONTEXT
) -> list[Ask]:
    """Requests with the lengths that jobs.py gives these data sets, within the context.

    scale  lengths are divided by it
    """
    from streamer.loadtest.jobs import ALPACA, SHAREGPT, SIGMAS, draw_length
    from streamer.loadtest.workload import FIRST_ID

    means = {"ShareGPT": SHAREGPT, "Alpaca": ALPACA}[kind]
    source = random.Random(kind)
    found = []
    for _ in range(count):
        drawn = [draw_length(source, mean, SIGMAS[means]) for mean in means]
        num_prompt, num_output = (max(1, n // scale) for n in drawn)
        num_prompt = min(num_prompt, context // 2)
        prompt = tuple(source.randrange(FIRST_ID, model.vocabulary) for _ in range(num_prompt))
        found.append(Ask(prompt, min(num_output, context - num_prompt)))
    return found


class Bed:
    """A checkpoint's folder behind the real scheduler and runner. To be closed.

    settings  fields of Config by name
    """

    def __init__(self, folder: Path, **settings: int | float | str | bool) -> None:
        from streamer.config import Config
        from streamer.core.scheduler import Scheduler
        from streamer.core.sizes import sizes_of
        from streamer.engine.core import EngineCore, Inbox
        from streamer.model.runner import load_runner

        given: dict[str, int | float | str | bool] = {
            "max_model_len": CONTEXT,
            "device": "cpu",
            "load_progress": False,
            **settings,
        }
        config = Config(model=str(folder), **given)  # type: ignore[arg-type]
        runner, info = load_runner(config)
        self.info: ModelInfo = info
        self._scheduler = Scheduler(
            sizes_of(config, info, ()), BlockHasher(info.block_size, b"paper" * 8)
        )
        self._inbox = Inbox()
        self._core = EngineCore(runner, self._scheduler, self._inbox)
        self._num_added = 0

    def add(self, prompt: Sequence[int], num_output: int, temperature: float, n: int = 1) -> str:
        """One more request, that only its length ends; its id."""
        self._num_added += 1
        request_id = str(self._num_added)
        params = SamplingParams(
            temperature=temperature, seed=self._num_added, max_tokens=num_output, n=n,
            ignore_eos=True,
        )  # fmt: skip
        self._inbox.put(Add(request_id, tuple(prompt), params))
        return request_id

    def step(self) -> StepOutput | None:
        """One step; None when all is done."""
        return self._core.step()

    def look(self) -> SchedulerView:
        """Pools and page tables now."""
        return self._scheduler.snapshot(EVERYTHING)

    def close(self) -> None:
        """Free the pools."""
        self._core.close()

    def __enter__(self) -> Bed:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def page_tables(view: SchedulerView) -> list[tuple[int, memoryview]]:
    """(tokens whose KV is there, device block ids) of each sequence that has any."""
    return [
        (seq.computed, memoryview(seq.blocks).cast("I"))
        for request in view.requests
        for seq in request.sequences
        if seq.blocks
    ]
