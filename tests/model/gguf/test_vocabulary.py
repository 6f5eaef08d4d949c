"""A vocabulary of 151,936 with a tied embedding: packed, it is both the table and the head."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from streamer.kernels import ops
from tests.checkpoints import reference_model
from tests.model.gguf_files import Kind, write_gguf
from tests.model.greedy_oracle import GreedyOracle
from tests.model.sync_engine import SyncEngine

SIZES: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "tie_word_embeddings": True,
}
CLEAR = 0.2  # between the two best logits, where int8 activations decide nothing


@pytest.mark.skipif(ops.why_not_native() != "", reason="of the native kernels")
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q8_0], ids=lambda kind: kind.name)
def test_tokens_of_a_large_vocabulary_are_transformers(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    """Of the dequantized model: all with torch's kernels, with the native ones up to where int8
    activations may choose the second best."""
    folder = Path(shutil.copytree(checkpoint("qwen3", 1, **SIZES), tmp_path / "m"))
    file = write_gguf(folder, tmp_path / "m.gguf", lambda name: kind, architecture="qwen3")
    rng = random.Random(0)
    asks = [([rng.randrange(3, 151_936) for _ in range(n)], 6) for n in (1, 5, 9, 20) * 8]
    oracle = GreedyOracle(reference_model(folder))
    answers = oracle.answers(asks)
    num_clear = 0
    for kernels in ("native", "torch"):
        monkeypatch.setenv("STREAMER_KERNELS", kernels)
        engine = SyncEngine(file)
        for i, (prompt, count) in enumerate(asks):
            engine.add(f"r{i}", prompt, count)
        engine.run()
        found = [engine.tokens[f"r{i}", 0] for i in range(len(asks))]
        if kernels == "torch":
            oracle.compare(found, asks, lambda name, value: None)
            continue
        for tokens, answer in zip(found, answers, strict=True):
            clear = next((i for i, m in enumerate(answer.margins) if m < CLEAR), 6)
            assert tokens[:clear] == answer.tokens[:clear]
            num_clear += clear
    assert num_clear > 30
