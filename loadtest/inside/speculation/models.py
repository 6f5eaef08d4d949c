"""Writes the models of `streamer bench speculation`: one that copies with edits, and dear ones.

`train` makes a tiny Llama that answers the edits workload, in minutes on two cores. `make_dear`
widens a checkpoint with zeros and appends layers whose output projections are zero: the same tokens
at the cost of a larger model. Run by command.py where a model is missing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, Final

from .edits import BEGIN, END, MARKS, VOCABULARY, edits

NUM_STEPS, BATCH = 2500, 24
MIN_LINES, MAX_LINES = 16, 120
RATE: Final = 2e-3
CONTEXT: Final = 1024
WIDER: Final = 4  # its root is exact
WIDE_LAYER: Final = 3 * 1024 * 3072  # parameters of a feed-forward of the model `half`
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}<answer>"


def shape() -> Any:
    """Of the model that copies."""
    from streamer.demo.training.shape import Shape

    return Shape(
        hidden_size=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        intermediate_size=256,
        vocab_size=len(VOCABULARY),
    )


def train(folder: Path, report: Callable[[int, float, float], None]) -> None:
    """Write a checkpoint that answers edits; `report` gets steps, loss, share of right tokens."""
    import torch
    import torch.nn.functional as F

    from streamer.demo.training.network import Network

    torch.manual_seed(0)
    network = Network(shape(), CONTEXT)
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, betas=(0.9, 0.98))
    warm = 100
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1.0, (i + 1) / warm) * max(0.02, 1 - i / NUM_STEPS)
    )
    lengths = random.Random(0)
    for step in range(NUM_STEPS):
        longest = MIN_LINES + (MAX_LINES - MIN_LINES) * min(1.0, step / (0.6 * NUM_STEPS))
        count = lengths.randint(MIN_LINES, int(longest))
        # as many tokens a batch at every length
        found = list(islice(edits(step + 1, count), max(8, BATCH * MAX_LINES // (2 * count))))
        ids = torch.tensor([e.prompt + e.answer for e in found])
        num_answer = len(found[0].answer)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = network(ids[:, :-1])[:, -num_answer:]
            logits = F.linear(hidden, network.embed.weight)
        targets = ids[:, -num_answer:]
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 49:
            right = (logits.argmax(-1) == targets).float().mean().item()
            report(step + 1, loss.item(), right)
    save(folder, network)


def save(folder: Path, network: Any) -> None:
    """Write the checkpoint of a network, and the tokenizer of the workload."""
    from safetensors.torch import save_file
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    from streamer.demo.training.shape import llama_config

    folder.mkdir(parents=True, exist_ok=True)
    save_file(network.llama_tensors(), folder / "model.safetensors", {"format": "pt"})
    begin, end = VOCABULARY.index(BEGIN), VOCABULARY.index(END)
    config = llama_config(network.shape, bos=begin, eos=[end], pad=end)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(VOCABULARY)}, END))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[^\n]*\n"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    about |= {"bos_token": BEGIN, "eos_token": END, "pad_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=1))


def make_dear(source: Path, folder: Path, num_bytes: int, *, wide_layer: int = WIDE_LAYER) -> None:
    """Write `source` so that a step reads about `num_bytes` of weights, and draws the same tokens.

    Hidden states are WIDER times as wide, the new parts zero (a norm over them is the old one,
    doubled, which its weights undo), the feed-forward is as wide as makes it `wide_layer`
    parameters, and layers whose output projections are zero are appended.
    """
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((source / "config.json").read_text())
    hidden, count = config["hidden_size"], config["num_hidden_layers"]
    wide = WIDER * hidden
    inner = wide_layer // (3 * wide)
    sizes = {hidden: wide, config["intermediate_size"]: inner}
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        is_norm = tensor.ndim == 1
        to = [sizes[n] if is_norm or _is_sized(name, i) else n for i, n in enumerate(tensor.shape)]
        padded = torch.zeros(to, dtype=tensor.dtype)
        part = tuple(slice(0, n) for n in tensor.shape)
        padded[part] = tensor * (1 / WIDER**0.5 if is_norm else 1)
        tensors[name] = padded
    more = max(1, num_bytes // (2 * wide_layer) - count)
    prefix = f"model.layers.{count - 1}."
    last = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    for i in range(count, count + more):
        for name, tensor in last.items():
            is_output = name in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
            tensors[f"model.layers.{i}.{name}"] = (
                torch.zeros_like(tensor) if is_output else tensor.clone()
            )
    config |= {"num_hidden_layers": count + more, "hidden_size": wide, "intermediate_size": inner}
    config["rms_norm_eps"] /= WIDER
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix == ".json" and file.name != "config.json":
            shutil.copyfile(file, folder / file.name)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _is_sized(name: str, dimension: int) -> bool:
    """Whether this dimension of a matrix is the hidden states' or the feed-forward's."""
    if "self_attn.o_proj" in name:
        return dimension == 0
    return dimension == 1 or "mlp" in name
