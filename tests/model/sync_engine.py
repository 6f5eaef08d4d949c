"""Scheduler and runner without threads: what the parity suite runs against transformers.

Plans are launched as far ahead as the runner says, as EngineCore does.

The policy is the scheduler's own; `costs` only replaces what the runner measured, so that a test
can choose between swap and recompute as a machine with those costs would, and `depth` how many
plans are launched before the oldest one's results are read.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from pathlib import Path

import msgspec

from streamer.config import Config
from streamer.constraints.grammars import Grammars, Vocabulary
from streamer.core.blocks import BlockHasher
from streamer.core.plan import Add, Drawn, Finish, Plan, Reasoning, StepStats, TokenLogprob
from streamer.core.recovery.trials import Fault, Verdict
from streamer.core.sampling import SamplingParams
from streamer.core.scheduler import Scheduler, SchedulerConfig
from streamer.core.sizes import MAX_SCORED, batched_tokens
from streamer.core.speculation.interface import Speculation
from streamer.engine.core import InFlight, Runner
from streamer.model.ranks.runner import load_ranked
from streamer.model.runner.load import load_runner
from tests.model.where import Where

END = 255  # of answers with a grammar
GREEDY = SamplingParams(temperature=0.0)


def _in_pairs(token_bytes: tuple[bytes, ...], text: str) -> list[int]:
    """Token ids of a text's letters, two by two."""
    pairs = (text[i : i + 2].encode() for i in range(0, len(text), 2))
    return [token_bytes.index(pair) for pair in pairs if pair in token_bytes]


def grammars_in_pairs(token_bytes: tuple[bytes, ...]) -> Grammars:
    """Of tokens that have two letters each."""
    return Grammars(Vocabulary(token_bytes, {}, (END,), partial(_in_pairs, token_bytes)))


class Injected(Exception):
    """A fault of a test."""


class SyncEngine:
    """One checkpoint, served step by step on this thread."""

    def __init__(
        self, folder: Path, *, costs: dict[str, float] | None = None, check: bool = True,
        max_scored_tokens: int = MAX_SCORED, token_bytes: tuple[bytes, ...] = (),
        speculation: Speculation | None = None, depth: int | None = None,
        **settings: int | float | str | bool,
    ) -> None:  # fmt: skip
        config = Config(
            model=str(folder),
            load_progress=False,
            **(  # type: ignore[arg-type]
                {
                    "dtype": "float32",
                    "device": "cpu",
                    "num_gpu_blocks_override": 512,
                    "swap_space": 0.01,
                }
                | settings
            ),
        )
        self.runner: Runner
        if config.tensor_parallel_size == 1:
            self.runner, self.info = load_runner(config, Where.make())
        else:
            self.runner, self.info = load_ranked(config, lambda: None, lambda _: None)
        self._launched: deque[tuple[Plan, InFlight]] = deque()
        self.costs = costs or {}
        self.verdicts: list[Verdict] = []
        self.check = check
        self.scheduler = Scheduler(
            SchedulerConfig(
                block_size=self.info.block_size,
                num_blocks=self.info.num_blocks,
                num_host_blocks=self.info.num_host_blocks,
                block_bytes=self.info.block_bytes,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=batched_tokens(config, self.info.device),
                max_model_len=self.info.max_model_len,
                max_scored_tokens=max_scored_tokens,
                enable_prefix_caching=config.enable_prefix_caching,
                token_bytes=token_bytes,
            ),
            BlockHasher(self.info.block_size, b"k" * 32),
            speculation,
        )
        if token_bytes:
            self.runner.constrain(grammars_in_pairs(token_bytes))
        self.depth = self.runner.depth if depth is None else depth
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.logprobs: dict[tuple[str, int], list[float]] = {}  # of those that asked for them
        self.details: dict[tuple[str, int], list[TokenLogprob]] = {}  # the same, with alternatives
        self.scores: dict[str, list[TokenLogprob]] = {}  # log probabilities of prompts
        self.finishes: dict[tuple[str, int], Finish] = {}
        self.stats = StepStats()
        self.steps = 0
        self.widest = 0  # rows that drew in one step

    def add(
        self, request_id: str, prompt: list[int], max_tokens: int,
        params: SamplingParams = GREEDY, *, share_with: str | None = None,
        stop_ids: frozenset[int] = frozenset(), outputs: tuple[Drawn, ...] = (),
        reasoning: Reasoning | None = None,
    ) -> None:  # fmt: skip
        """Queue a request; the model's end tokens are ordinary tokens, as in the oracle."""
        params = msgspec.structs.replace(params, max_tokens=max_tokens, seed=params.seed or 7)
        for choice in range(params.n):
            self.tokens[request_id, choice] = list(outputs[choice].tokens) if outputs else []
            self.details[request_id, choice] = list(outputs[choice].logprobs) if outputs else []
            if outputs and (finish := outputs[choice].finish) is not None:
                self.finishes[request_id, choice] = finish
        stop = tuple(one.encode() for one in params.stop)
        self.scheduler.command(
            Add(
                request_id, tuple(prompt), params, stop_ids, stop,
                share_with=share_with, outputs=outputs, reasoning=reasoning,
            )
        )  # fmt: skip

    def drawn(self, request_id: str) -> tuple[Drawn, ...]:
        """What the request's choices drew so far, for another engine."""
        keys = [key for key in self.tokens if key[0] == request_id]
        return tuple(
            Drawn(tuple(self.tokens[k]), tuple(self.details[k]), self.finishes.get(k)) for k in keys
        )

    def step(self) -> bool:
        """One iteration; False when nothing is left to do."""
        while len(self._launched) <= self.depth:
            facts = msgspec.structs.replace(self.runner.facts(), **self.costs)
            launched = self.scheduler.schedule(facts)
            if launched is None:
                break
            try:
                self._launched.append((launched, self.runner.launch(launched)))
            except (MemoryError, Injected) as error:
                return self._reset(launched, error)
        if not self._launched:
            return False
        plan, in_flight = self._launched.popleft()
        try:
            result = in_flight.collect()
        except (MemoryError, Injected) as error:
            return self._reset(plan, error)
        out = self.scheduler.apply(plan, result)
        if self.check:
            self.scheduler.check()
        self.steps += 1
        self.widest = max(self.widest, plan.num_samples)
        self.stats = out.stats
        for i, key in enumerate(zip(out.request_ids, out.choices, strict=True)):
            self.tokens[key].append(out.tokens[i])
            if i in out.logprobs:
                self.logprobs.setdefault(key, []).append(out.logprobs[i].logprob)
                self.details[key].append(out.logprobs[i])
        for request_id, scores in out.prompt_logprobs.items():
            self.scores.setdefault(request_id, []).extend(scores)
        for finish in out.finishes:
            self.finishes[finish.request_id, finish.choice] = finish
        return True

    def _reset(self, plan: Plan, error: Exception) -> bool:
        """After a fault, as EngineCore."""
        is_memory = isinstance(error, MemoryError)
        self.verdicts.append(self.scheduler.reset(Fault(plan.num_tokens, is_memory)))
        launched = max([plan.number, *(other.number for other, _ in self._launched)])
        self._launched.clear()
        self.runner.reset(launched)
        return True

    def run(self, limit: int = 20_000) -> None:
        """Run until every request has ended."""
        for _ in range(limit):
            if not self.step():
                break
        missing = set(self.tokens) - set(self.finishes)
        if missing:
            raise AssertionError(f"{len(missing)} choices unfinished after {self.steps} steps")

    @property
    def preemptions(self) -> tuple[int, int]:
        """(number by swap, number by recompute)."""
        return self.stats.preemptions_swap, self.stats.preemptions_recompute
