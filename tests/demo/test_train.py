"""The training's batches and schedule, and that a training step improves a network."""

import random
from itertools import islice
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from streamer.demo.training.corpus import (
    LOOKBACK_MIX,
    documents,
    encoded_documents,
    single_documents,
)
from streamer.demo.training.network import Network
from streamer.demo.training.shape import DEMO, DRAFT, Shape
from streamer.demo.training.texts.lookback import fact_exchange, lookback_exchange, repeat_exchange
from streamer.demo.training.texts.questions import read_questions
from streamer.demo.training.train import DEMO_PHASES, DRAFT_PHASES, Masters, Phase, steps

TOKENIZER = Path(__file__).parents[2] / "streamer/demo/checkpoint/tokenizer.json"
BOS, PAD = 0, 3


def test_words_to_repeat_are_the_answer_and_stand_in_the_question() -> None:
    rng = random.Random(1)
    for _ in range(200):
        asked, answer = repeat_exchange(rng)
        assert answer.content in asked.content


def test_facts_are_answered_from_the_question() -> None:
    rng = random.Random(2)
    for _ in range(200):
        asked, answer = fact_exchange(rng)
        name = answer.content.split()[0].lower()
        assert name in asked.content.lower()


def test_short_tasks_are_short() -> None:
    rng = random.Random(3)
    drawn = [lookback_exchange(rng) for _ in range(300)]
    assert max(len(turn.content) for turns in drawn for turn in turns) < 260


def test_single_documents_have_a_row_each() -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    stream = documents(4, read_questions(), frozenset(), LOOKBACK_MIX)
    rows = encoded_documents(stream, tokenizer)
    for ids, weights in islice(single_documents(rows, 2048, PAD), 40):
        assert ids.shape == weights.shape
        assert (ids.shape[1] - 1) % 64 == 0
        assert ids.shape[0] * (ids.shape[1] - 1) >= 2048
        assert (ids[:, 0] == BOS).all()
        assert not (ids[:, 1:] == BOS).any()
        assert (weights[ids == PAD] <= 1).all()
        assert (weights.sum(axis=1) > 0).all()


def test_a_step_has_at_least_its_tokens() -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    rows = encoded_documents(documents(5, read_questions()), tokenizer)
    for parts in steps(single_documents(rows, 2048, PAD), 5):
        assert sum(ids[:, 1:].numel() for ids, _ in parts) >= 6144
        assert all(ids.dtype == torch.int64 for ids, _ in parts)


def test_rate_warms_up_and_falls_to_its_end() -> None:
    phase = Phase(mix={}, num_steps=1000, first_rate=2e-3, last_rate=0.0)
    assert phase.rate(0) == pytest.approx(2e-3 / 63)
    assert phase.rate(62) == pytest.approx(2e-3 * (1 - 62 / 1000))
    assert phase.rate(999) == pytest.approx(2e-6)
    for phases in (DEMO_PHASES, DRAFT_PHASES):
        assert phases[-1].last_rate == 0.0


def test_shapes_count_their_parameters() -> None:
    for shape in (DEMO, DRAFT):
        network = Network(shape, 64)
        assert sum(p.numel() for p in network.parameters()) == shape.num_parameters
    assert DRAFT.num_parameters * 10 <= DEMO.num_parameters


def test_steps_lower_the_loss_of_a_tiny_network() -> None:
    torch.manual_seed(0)
    shape = Shape(
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=64,
        vocab_size=50,
    )
    network = Network(shape, 64).bfloat16()
    masters = Masters(network)
    ids = torch.randint(0, 50, (4, 33))
    losses = []
    for _ in range(60):
        loss = network.token_losses(ids[:, :-1], ids[:, 1:]).mean()
        loss.backward()
        masters.step(3e-3)
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
    names = set(network.llama_tensors())
    assert "model.layers.1.self_attn.q_proj.weight" in names
    assert "lm_head.weight" not in names
