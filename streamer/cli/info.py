"""`streamer info MODEL`: what a checkpoint is, what it needs, and whether it can be served here.

Reads only headers, configs and the tokenizer, never weights; a refused checkpoint is shown with the
reason, and the exit code is 1.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import msgspec

from streamer.cli.arguments import UsageError, add_config_flags, config_from
from streamer.cli.console import printable
from streamer.errors import StreamerError

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from streamer.config import Config
    from streamer.model.inspect import CheckpointFacts

SERVED_BY = {"decoder": "the engine's own decoder", "transformers": "transformers' modelling code"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A model, and the settings that decide what fits."""
    add_config_flags(parser, sections=("model", "scheduling and memory"))


def run(args: argparse.Namespace, console: Console) -> int:
    """Print the facts; 0 if the checkpoint can be served here, else 1."""
    from streamer.build import resolve_model
    from streamer.fake.model import is_fake
    from streamer.model.inspect import inspect_checkpoint

    config = config_from(args)
    if is_fake(config.model):
        raise UsageError("MODEL: the fake model has no checkpoint")
    path = resolve_model(config)
    facts = inspect_checkpoint(path, config)
    if not facts.refused:
        facts = msgspec.structs.replace(facts, refused=_fault_of_tokenizer(path, config))
    for name, text in rows(facts, config):
        console.print(f"{name:>14}  ", end="", style="dim")
        console.print(printable(text), markup=False, soft_wrap=True)
    if facts.refused:
        console.print(f"{'refused':>14}  ", end="", style="red")
        console.print(printable(facts.refused), markup=False, soft_wrap=True)
    return 1 if facts.refused else 0


def _fault_of_tokenizer(path: Path, config: Config) -> str:
    """Why there is no tokenizer for the checkpoint, or ""."""
    from streamer.build import read_tokenizer

    try:
        read_tokenizer(path, config.chat_template)
    except StreamerError as e:
        return e.message
    return ""


def rows(facts: CheckpointFacts, config: Config) -> list[tuple[str, str]]:
    """(name, text) of every known fact."""
    found = [("checkpoint", facts.path)]
    if facts.architecture:
        by = SERVED_BY.get(facts.served_by)
        found.append(("architecture", facts.architecture + (f", served by {by}" if by else "")))
    if facts.num_parameters:
        stored = f"{_mib(facts.stored_bytes)} stored as {facts.stored_as}"
        found.append(("parameters", f"{facts.num_parameters:,}, {stored}"))
    if facts.dtype:
        if facts.scheme:
            found.append(("quantized", facts.scheme))
        bits = f"{facts.bits_per_weight:.2f} bits a weight, computed in {facts.dtype}"
        found.append(("weights", f"{_mib(facts.weight_bytes)}, {bits}"))
        found.append(("vocabulary", f"{facts.vocab_size:,} tokens, ends {facts.eos_token_ids}"))
        block_bytes = facts.kv_bytes_per_token * config.block_size
        kv = f"{facts.kv_bytes_per_token:,} bytes a token, {block_bytes:,} a block"
        found.append(("KV cache", f"{kv} of {config.block_size}"))
        found.append(("context", f"up to {facts.model_limit:,} tokens"))
    found.append(("free memory", _mib(facts.free_bytes)))
    if facts.num_blocks:
        pool = f"{facts.fitting_tokens:,} tokens in {facts.num_blocks:,} blocks"
        found.append(("fits here", f"{pool}; a sequence of {facts.max_model_len:,} tokens at most"))
    if facts.limited_by:
        found.append(("limited by", facts.limited_by))
    return found


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.1f} MiB"
