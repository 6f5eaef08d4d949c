"""Writes the synthetic checkpoints: `python -m streamer.loadtest.compare.models FOLDER MODEL ...`.

Random weights in bfloat16 with the shapes in workload.py, and a tokenizer learned from Python's own
library, so that nothing is fetched. Greedy answers never end early: the rows of the special tokens
in the last matrix are zero, and some other logit is always above it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from .workload import MODELS, Model

SPECIAL = ("<|endoftext|>", "<|bos|>", "<|pad|>")  # 0, 1, 2
CONTEXT = 4096
SPREAD = 0.03  # of the weights
TEXT_CHARACTERS = 14_000_000
TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


def library_text() -> Iterator[str]:
    """Sources of Python's library in a fixed order, up to TEXT_CHARACTERS."""
    root = Path(random.__file__).parent
    files = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    random.Random(0).shuffle(files)
    left = TEXT_CHARACTERS
    for file in files:
        text = file.read_text(encoding="utf-8", errors="ignore")
        yield text
        left -= len(text)
        if left < 0:
            return


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """A byte-level BPE of `vocabulary` tokens, and a template that only joins messages."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel
    tokenizer.pre_tokenizer = level(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(library_text(), trainer)
    missing = vocabulary - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<unused {i}>" for i in range(missing)])
    tokenizer.save(str(folder / "tokenizer.json"))
    end, begin, pad = SPECIAL
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    about |= {"bos_token": begin, "eos_token": end, "pad_token": pad}
    (folder / "tokenizer_config.json").write_bytes(msgspec.json.encode(about))


def write_model(folder: Path, model: Model) -> None:
    """config.json and the weights, by transformers."""
    import torch
    import transformers

    torch.manual_seed(0)
    config: Any = transformers.LlamaConfig(
        vocab_size=model.vocabulary,
        hidden_size=model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        intermediate_size=model.ffn,
        max_position_embeddings=CONTEXT,
        initializer_range=SPREAD,
        tie_word_embeddings=False,
        eos_token_id=0,
        bos_token_id=1,
        pad_token_id=2,
    )
    network: Any = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        network.lm_head.weight[: len(SPECIAL)] = 0
    network.to(torch.bfloat16).save_pretrained(folder)


def make(folder: Path, model: Model) -> None:
    """Write the whole checkpoint, renamed to its final name only when complete."""
    part = folder.with_name(folder.name + ".part")
    part.mkdir(parents=True, exist_ok=True)
    write_model(part, model)
    write_tokenizer(part, model.vocabulary)
    part.rename(folder)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        make(Path(sys.argv[1]) / f"{name}-bf16", MODELS[name])
