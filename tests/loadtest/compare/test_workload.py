"""Prompts and lengths: the same for every engine, and new in every round."""

from __future__ import annotations

import random

from streamer.loadtest.compare.engines import ENGINES
from streamer.loadtest.compare.turns import Turn, asks_of
from streamer.loadtest.compare.workload import FIRST_ID, MODELS, PROMPT_TOKENS, WORKS, prompts

SMALL = MODELS["small"]


def test_prompts_are_the_same_every_time() -> None:
    random.seed(1)
    first = prompts(SMALL, 3, "eq 0")
    random.seed(2)
    assert prompts(SMALL, 3, "eq 0") == first
    assert first[0][:4] == [13102, 6294, 225, 13987]  # on every machine


def test_every_round_workload_and_model_has_its_own() -> None:
    seeds = [(model, f"{work} {i}") for model in MODELS.values() for work in WORKS for i in (0, 1)]
    drawn = {tuple(prompts(model, 1, seed)[0]) for model, seed in seeds}
    assert len(drawn) == len(seeds)


def test_prompts_keep_within_the_vocabulary() -> None:
    ids = [i for prompt in prompts(SMALL, 50, "x") for i in prompt]
    assert len(ids) == 50 * PROMPT_TOKENS
    assert min(ids) >= FIRST_ID
    assert max(ids) < SMALL.vocabulary


def test_how_many_tokens_a_workload_has() -> None:
    assert {name: work.num_tokens for name, work in WORKS.items()} == {
        "eq": 4096,
        "mix": 3840,
        "one": 256,
        "prompt": 8,
        "stream": 4096,
    }
    rated = {name: work.rated_tokens for name, work in WORKS.items()}
    assert (rated["eq"], rated["prompt"]) == (4096, 8 * 512)


def test_clients_share_out_the_prompts() -> None:
    from streamer.loadtest.compare.engines import Places

    turn = Turn(ENGINES["vllm"], SMALL, 0, (WORKS["stream"],), True)
    clients = asks_of(turn, WORKS["stream"], Places.found())
    assert [len(asks) for asks in clients] == [2] * 16
    assert {ask.max_tokens for asks in clients for ask in asks} == {128}
    given = [ask.prompt for asks in zip(*clients, strict=True) for ask in asks]
    assert given == turn.prompts(WORKS["stream"])


def test_every_round_has_prompts_of_its_own_for_all_engines_alike() -> None:
    ours = Turn(ENGINES["streamer"], SMALL, 3, (), False)
    theirs = Turn(ENGINES["vllm"], SMALL, 3, (), False)
    later = Turn(ENGINES["vllm"], SMALL, 4, (), False)
    assert ours.prompts(WORKS["eq"]) == theirs.prompts(WORKS["eq"])
    assert ours.prompts(WORKS["eq"]) != later.prompts(WORKS["eq"])
    assert [len(prompt) for prompt in ours.prompts(WORKS["prompt"])] == [512] * 8
