"""What serves requests to their ends: transformers, and this engine, also in static batches.

The same door for all three, so that paper/batching.py can compare them. All requests are there from
the start, and are served in their order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from streamer.loadtest.paper.asks import Ask
from streamer.loadtest.paper.steps import Steps

if TYPE_CHECKING:
    import torch

PAD = 2


class Run(msgspec.Struct, frozen=True):
    """Requests served to their ends.

    seconds  until the last one ended;  slots  rows there were, summed over the steps
    ends     seconds until each ended;  answers  each one's tokens
    """

    seconds: float
    slots: int
    ends: tuple[float, ...]
    answers: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        """Of all answers, as far as they were asked for."""
        return sum(map(len, self.answers))

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def slot_efficiency(self) -> float:
        """Share of the slots that drew a token which was asked for."""
        return self.num_tokens / self.slots

    @property
    def latency_s(self) -> float:
        """The mean over requests of seconds from the start to their end, a token of the answer."""
        each = zip(self.ends, self.answers, strict=True)
        return sum(end / len(answer) for end, answer in each) / len(self.ends)


class Server(Protocol):
    """Something that serves requests, all of them there from the start."""

    def __call__(self, requests: Sequence[Ask]) -> Run: ...


class Generate:
    """transformers: static batches of up to `size`, padded on the left, until the longest ends."""

    def __init__(self, folder: Path, size: int, dtype: torch.dtype, threads: int) -> None:
        import transformers

        bars: Any = transformers.utils.logging
        bars.disable_progress_bar()
        self._size = size
        self._threads = threads
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            # with a mask for padding, in bfloat16, SDPA takes several times as long on a CPU
            str(folder),
            dtype=dtype,
            attn_implementation="eager",
        )
        self._model.generation_config.eos_token_id = None  # every answer is as long as asked for

    def __call__(self, requests: Sequence[Ask]) -> Run:
        now, slots = 0.0, 0
        ends: list[float] = []
        answers: list[tuple[int, ...]] = []
        for first in range(0, len(requests), self._size):
            batch = requests[first : first + self._size]
            began = time.perf_counter()
            answers += self._answer(batch)
            now += time.perf_counter() - began
            ends += [now] * len(batch)
            slots += self._size * max(ask.num_output for ask in batch)
        return Run(now, slots, tuple(ends), tuple(answers))

    def _answer(self, batch: Sequence[Ask]) -> list[tuple[int, ...]]:
        import torch

        torch.set_num_threads(self._threads)
        width = max(len(ask.prompt) for ask in batch)
        longest = max(ask.num_output for ask in batch)
        padding = [width - len(ask.prompt) for ask in batch]
        ids = torch.tensor([[PAD] * n + [*a.prompt] for n, a in zip(padding, batch, strict=True)])
        mask = torch.tensor([[0] * n + [1] * (width - n) for n in padding])
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=longest,
                do_sample=False,
                pad_token_id=PAD,
            )
        came = out[:, width:].tolist()
        return [tuple(row[: a.num_output]) for row, a in zip(came, batch, strict=True)]


class Engine:
    """This engine with up to `size` rows; `is_static`: it gets a batch when the last has ended."""

    def __init__(self, steps: Steps, size: int, *, is_static: bool) -> None:
        self._steps = steps
        self._num_served = 0
        self._size = size
        self._is_static = is_static

    def __call__(self, requests: Sequence[Ask]) -> Run:
        now, num_steps = 0.0, 0
        names = [str(self._num_served + i) for i in range(len(requests))]
        self._num_served += len(requests)
        waiting = deque(zip(names, requests, strict=True))
        inside: set[str] = set()
        ends: dict[str, float] = {}
        while waiting or inside:
            for _ in range(self._num_welcome(len(waiting), len(inside))):
                name, ask = waiting.popleft()
                self._steps.add(name, *ask)
                inside.add(name)
            began = time.perf_counter()
            output = self._steps.step()
            now += time.perf_counter() - began
            num_steps += 1
            if output is None:
                raise RuntimeError(f"the engine stopped before {len(inside)} requests had ended")
            for finish in output.finishes:
                ends[finish.request_id] = now
                inside.remove(finish.request_id)
        self._steps.run()  # rows leave with a step of their own
        answers = tuple(tuple(self._steps.answers[name]) for name in names)
        return Run(now, num_steps * self._size, tuple(ends[name] for name in names), answers)

    def _num_welcome(self, num_waiting: int, num_inside: int) -> int:
        """How many of those who wait are let in now."""
        if not self._is_static:
            return num_waiting  # the engine has a queue of its own
        return 0 if num_inside else min(num_waiting, self._size)
