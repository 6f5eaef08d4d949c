"""The fake model: its text, the plans it refuses, and the real scheduler over it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamer.config import Config
from streamer.core.blocks import BlockHasher
from streamer.core.plan import Add, Cancel, Finish, FinishReason, Pause, Plan, Resume
from streamer.core.sampling import SamplingParams
from streamer.core.scheduler import Scheduler
from streamer.core.sizes import sizes_of
from streamer.errors import ConfigError
from streamer.fake.model import (
    FakeOptions,
    FakeRunner,
    expected_text,
    expected_tokens,
    fake_tokenizer,
    is_fake,
    load_fake,
    parse_name,
)
from streamer.fake.tokenizer import END, MAX_LENGTH, SINGLES, VOCAB_SIZE, num_tokens_to

# ------------------------------------------------------------ its text


def text_of(tokens: list[int]) -> str:
    table = fake_tokenizer().token_bytes()
    return b"".join(table[t] for t in tokens).decode()


def test_it_counts() -> None:
    assert expected_text(4) == " 1 2 3 4"
    assert text_of(expected_tokens(0, 4)) == " 1 2 3 4"
    assert text_of(expected_tokens(98, 3)) == " 99 100 101"


def test_it_counts_on_where_numbers_take_two_tokens() -> None:
    """No number is missing or doubled around the change."""
    text = text_of(expected_tokens(0, num_tokens_to(SINGLES + 2_001)))
    assert [int(word) for word in text.split()] == [*range(1, SINGLES + 2_002)]


@given(st.integers(0, MAX_LENGTH), st.integers(0, 40))
def test_any_slice_is_known_from_its_place(start: int, count: int) -> None:
    tokens = expected_tokens(start, count)
    assert all(END < token < VOCAB_SIZE for token in tokens)
    half = count // 2
    assert tokens[half:] == expected_tokens(start + half, count - half)
    words = text_of(tokens).split()
    if start + count > SINGLES:  # the text may begin and end inside a number
        words = words[1:-1]
    first = int(words[0]) if words else 0
    assert [int(word) for word in words] == [*range(first, first + len(words))]
    assert not words or start + count > SINGLES or first == start + 1


def test_expected_text_is_the_tokens_text() -> None:
    count = SINGLES + 30
    assert expected_text(count) == text_of(expected_tokens(0, count))


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_any_prompt_is_bytes_and_comes_back(text: str) -> None:
    t = fake_tokenizer()
    ids = t.encode(text)
    if not t.special_ids & {*ids}:
        assert len(ids) == len(text.encode())
    assert t.decode(ids, skip_special_tokens=False) == text


def test_tokenizer_and_model_agree() -> None:
    _, info = load_fake(Config(model="fake"))
    t = fake_tokenizer()
    assert info.vocab_size == t.vocab_size == len(t.token_bytes()) == VOCAB_SIZE
    assert info.eos_token_ids == (t.eos_token_id,) == (END,)
    messages = [{"role": "user", "content": "hi"}]
    assert t.render_chat(messages) == "<|bos|><|user|>hi<|end|><|assistant|>"


# ------------------------------------------------------------ its name and settings


def test_names() -> None:
    assert is_fake("fake")
    assert is_fake("fake:depth=1")
    assert not any(map(is_fake, (None, "fakes", "./fake", "someone/fake")))
    assert parse_name("fake") == FakeOptions()
    assert parse_name("fake:tokens_per_s=50,depth=1,length=3") == FakeOptions(50.0, 1, 3)


@pytest.mark.parametrize(
    "name", ["depth=2", "tokens_per_s=-1", "tokens_per_s=inf", "speed=3", "depth", "length=x"]
)
def test_a_bad_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_fake(Config(model=f"fake:{name}"))
    assert caught.value.param == "model"


def test_settings_reach_the_pools() -> None:
    _, info = load_fake(Config(model="fake"))
    assert (info.name, info.max_model_len, info.num_host_blocks) == ("fake", MAX_LENGTH, 1024)
    config = Config(
        model="fake", served_model_name="x", max_model_len=50, num_gpu_blocks_override=7,
        block_size=8, swap_space=0.0,
    )  # fmt: skip
    runner, info = load_fake(config, depth=1)
    assert (info.name, info.max_model_len, info.num_blocks) == ("x", 50, 7)
    assert (info.block_size, info.num_host_blocks, runner.depth) == (8, 0, 1)


def test_neither_torch_nor_transformers_is_loaded() -> None:
    script = """
import sys
from streamer.fake.model import fake_tokenizer, load_fake
from streamer.config import Config
load_fake(Config(model="fake")), fake_tokenizer().token_bytes()
sys.exit(", ".join({"torch", "transformers"} & set(sys.modules)) or 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------ the real scheduler over it


class Engine:
    """Scheduler and fake runner, without threads."""

    def __init__(self, *, depth: int = 0, **settings: Any) -> None:
        settings = {"num_gpu_blocks_override": 64, "block_size": 4, "swap_space": 0.001} | settings
        length = settings.pop("length", 0)
        config = Config(model=f"fake:length={length}", **settings)
        self.runner, info = load_fake(config, depth=depth)
        self.scheduler = Scheduler(
            sizes_of(config, info, fake_tokenizer().token_bytes()),
            BlockHasher(info.block_size, b"s" * 32),
        )
        self.launched: deque[tuple[Plan, Any]] = deque()
        self.plans: list[Plan] = []
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.finishes: dict[tuple[str, int], Finish] = {}
        self.logprobs: dict[tuple[str, int], list[Any]] = {}

    def add(self, prompt: str | list[int] = "x", **params: Any) -> str:
        ids = fake_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
        request_id = f"r{len({r for r, _ in self.tokens})}"
        known = SamplingParams(**({"max_tokens": 8, "seed": 1} | params))
        for choice in range(known.n):
            self.tokens[request_id, choice] = []
        ends = frozenset() if known.ignore_eos else frozenset([END])
        stop = tuple(s.encode() for s in known.stop)
        self.scheduler.command(Add(request_id, tuple(ids), known, stop_ids=ends, stop=stop))
        return request_id

    def step(self) -> bool:
        while len(self.launched) <= self.runner.depth:
            plan = self.scheduler.schedule(self.runner.facts())
            if plan is None:
                break
            self.plans.append(plan)
            self.launched.append((plan, self.runner.launch(plan)))
        if not self.launched:
            return False
        plan, in_flight = self.launched.popleft()
        out = self.scheduler.apply(plan, in_flight.collect())
        for i, key in enumerate(zip(out.request_ids, out.choices, strict=True)):
            self.tokens[key].append(out.tokens[i])
            if i in out.logprobs:
                self.logprobs.setdefault(key, []).append(out.logprobs[i])
        for finish in out.finishes:
            self.finishes[finish.request_id, finish.choice] = finish
        return True

    def run(self) -> None:
        steps = 0
        while self.step():
            steps += 1
            assert steps < 10_000, "it does not end"
        self.scheduler.check()


@pytest.mark.parametrize("depth", [0, 1])
def test_many_choices_through_preemption_pause_and_cancel(depth: int) -> None:
    """A pool far too small for all of them: every output is whole all the same."""
    e = Engine(depth=depth, num_gpu_blocks_override=40, max_num_seqs=8, max_num_batched_tokens=16)
    lengths = {e.add("a" * i, max_tokens=10 + 4 * i, n=1 + i % 3): 10 + 4 * i for i in range(1, 10)}
    for _ in range(12):
        e.step()
    e.scheduler.command(Pause("r0"))
    e.scheduler.command(Cancel("r4"))
    for _ in range(12):
        e.step()
    e.scheduler.command(Resume("r0"))
    e.run()
    stats = e.scheduler.state.stats()
    assert stats.preemptions_swap + stats.preemptions_recompute > 0
    assert any(plan.copies for plan in e.plans)
    for (request_id, choice), tokens in e.tokens.items():
        assert tokens == expected_tokens(0, len(tokens))
        reason = e.finishes[request_id, choice].reason
        if request_id == "r4":
            assert reason is FinishReason.CANCELLED
        else:
            assert (reason, len(tokens)) == (FinishReason.LENGTH, lengths[request_id])


@pytest.mark.parametrize(
    ("prompt", "params", "count"),
    [
        ("count to 12", {}, 12),
        ("Please Count To 3, then count to 5.", {}, 5),
        ("count to 12", {"max_tokens": 7}, 7),
        ("count to 12", {"ignore_eos": True}, 60),
        ("count to 4", {"min_tokens": 9}, 9),
        ("count, please", {}, 60),
        ("<|user|>count to 5<|end|><|assistant|> 1 2<|end|><|user|>hi<|end|><|assistant|>", {}, 60),
        ("<|user|>hi<|end|><|assistant|>x<|end|><|user|>count to 5<|end|><|assistant|>", {}, 5),
    ],
)
def test_it_ends_where_the_prompt_says(prompt: str, params: dict[str, Any], count: int) -> None:
    e = Engine()
    request_id = e.add(prompt, **({"max_tokens": 60} | params))
    e.run()
    numbers = [t for t in e.tokens[request_id, 0] if t != END]
    assert numbers == expected_tokens(0, count)
    is_stop = e.finishes[request_id, 0].reason is FinishReason.STOP
    assert is_stop is (e.tokens[request_id, 0][-1] == END)
    assert is_stop is (count < 60 and "max_tokens" not in params)


def test_length_ends_a_request_without_another_end() -> None:
    e = Engine(length=6)
    for prompt in ("x", "count to 3"):
        e.add(prompt, max_tokens=50)
    e.run()
    assert [len(tokens) for tokens in e.tokens.values()] == [7, 4]  # with the end token


def test_stop_strings_cut_its_text() -> None:
    e = Engine()
    e.add(max_tokens=50, stop=("1 1",))
    e.run()
    assert e.finishes["r0", 0].text_bytes == len(expected_text(11)) - 1  # "... 11 12"


def test_log_probabilities_where_requested() -> None:
    e = Engine()
    for logprobs in (None, 0, 3):
        e.add(max_tokens=4, logprobs=logprobs)
    e.run()
    assert ("r0", 0) not in e.logprobs
    assert [len(each.top) for each in e.logprobs["r1", 0]] == [0] * 4
    for token, each in zip(e.tokens["r2", 0], e.logprobs["r2", 0], strict=True):
        assert each.token_id == each.top[0][0] == token
        assert [p for _, p in each.top] == sorted((p for _, p in each.top), reverse=True)
        assert len({t for t, _ in each.top}) == 3


def test_a_rate_is_kept_on_average() -> None:
    """30 steps at 500 a second take at least 60 ms, however late single ones are."""
    e = Engine()
    e.runner = FakeRunner(block_size=4, num_blocks=64, num_host_blocks=9, tokens_per_s=500.0)
    e.add(max_tokens=30)
    begin = time.monotonic()
    e.run()
    assert time.monotonic() - begin >= 30 / 500
