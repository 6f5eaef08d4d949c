"""Trains the demo model and its draft model, writes both checkpoint folders and the report.

`python -m streamer.demo.train --out streamer/demo --held-out tests/demo/held_out.txt` reproduces
what is in the repository: the numbers of tokens and the seeds are fixed here. Takes about an hour
on two cores. Nobody imports this module but the tests.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.progress import Progress

from streamer.demo.corpus import (
    BOS,
    END,
    END_OF_TEXT,
    Packed,
    documents,
    encoded_documents,
    pack,
    special_id,
)
from streamer.demo.held_out import excluded_phrasings, read_held_out
from streamer.demo.questions import Entry, read_questions
from streamer.demo.shape import DEMO, DRAFT, Shape, llama_config
from streamer.demo.tokenizer_training import train_tokenizer, write_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

    from streamer.demo.network import Network

SEED = 20_26
LEARNING_RATE = 3e-3
WARM_UP = 0.03
LOG_EVERY = 50
SNAPSHOT_EVERY = 250


class Phase(msgspec.Struct, frozen=True):
    """A part of the training with rows of one length (in tokens)."""

    length: int
    rows_a_step: int
    num_steps: int

    @property
    def num_tokens(self) -> int:
        """Tokens trained on in this phase, padding included."""
        return self.length * self.rows_a_step * self.num_steps


# Attention is 30% of a step with rows of 1024 tokens and half of that with 512 (two cores of an
# EPYC Zen 5, torch 2.13), so most steps use short rows.
DEMO_PHASES = (Phase(512, 12, 1800), Phase(1024, 6, 320))
DRAFT_PHASES = (Phase(512, 12, 850), Phase(1024, 6, 150))


class Masters:
    """fp32 copies of bf16 parameters, trained by Muon (matrices) and AdamW (the rest)."""

    def __init__(self, network: Network, learning_rate: float) -> None:
        import torch

        def copies(parameters: list[Any]) -> list[Tensor]:
            return [p.detach().float().clone().requires_grad_() for p in parameters]

        matrices, others = network.hidden_matrices(), network.other_parameters()
        self.parameters = matrices + others
        copied = copies(matrices), copies(others)
        self.masters = copied[0] + copied[1]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                copied[0], lr=learning_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(copied[1], lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.learning_rate = learning_rate

    def step(self, scale: float) -> None:
        """One update from the parameters' gradients, at `scale` times the learning rate."""
        import torch

        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter.grad is not None:
                master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate * scale
            optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)


def schedule(step: int, num_steps: int) -> float:
    """Warm up linearly, then fall linearly to zero."""
    warm = max(1, int(WARM_UP * num_steps))
    return min((step + 1) / warm, (num_steps - step) / (num_steps - warm))


def steps(
    phases: tuple[Phase, ...],
    tokenizer: Tokenizer,
    entries: tuple[Entry, ...],
    excluded: frozenset[str],
    seed: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """The (ids, weights) of every step, packed ahead a hundred steps at a time."""
    import torch

    pad = special_id(tokenizer, END_OF_TEXT)
    rows = encoded_documents(documents(seed, entries, excluded), tokenizer)
    for phase in phases:
        done = 0
        while done < phase.num_steps:
            ahead = min(100, phase.num_steps - done)
            packed: Packed = pack(rows, phase.length + 1, ahead * phase.rows_a_step, pad)
            for index in range(ahead):
                part = slice(index * phase.rows_a_step, (index + 1) * phase.rows_a_step)
                ids = torch.from_numpy(packed.ids[part]).long()
                yield ids, torch.from_numpy(packed.weights[part]).float()
            done += ahead


def train(
    network: Network,
    batches: Iterator[tuple[Tensor, Tensor]],
    num_steps: int,
    *,
    title: str,
    console: Console,
    compiled: bool,
    snapshot: Callable[[], None] | None = None,
) -> None:
    """Train the network in place, with a progress bar and a line of figures now and then."""
    import torch

    losses_of = torch.compile(network.token_losses) if compiled else network.token_losses
    masters = Masters(network, LEARNING_RATE)
    began, seen, running = time.monotonic(), 0, 0.0
    with Progress(console=console) as progress:
        task = progress.add_task(title, total=num_steps)
        for step, (ids, weights) in enumerate(batches):
            targets, wanted = ids[:, 1:], weights[:, 1:].flatten()
            loss = (losses_of(ids[:, :-1], targets) * wanted).sum() / wanted.sum()
            loss.backward()  # type: ignore[no-untyped-call]
            masters.step(schedule(step, num_steps))
            seen += targets.numel()
            running = loss.item() if step == 0 else 0.95 * running + 0.05 * loss.item()
            progress.advance(task)
            if (step + 1) % LOG_EVERY == 0 or step == 0:
                rate = seen / (time.monotonic() - began)
                console.print(
                    f"{title}: step {step + 1}/{num_steps}, loss {running:.3f}, "
                    f"{seen / 1e6:.1f} M tokens, {rate:,.0f} tokens/s"
                )
            if snapshot is not None and (step + 1) % SNAPSHOT_EVERY == 0:
                snapshot()


def save(network: Network, tokenizer: Tokenizer, folder: Path) -> None:
    """Write an ordinary Llama checkpoint folder."""
    from safetensors.torch import save_file

    write_tokenizer(tokenizer, folder)
    eos = [special_id(tokenizer, END), special_id(tokenizer, END_OF_TEXT)]
    bos, pad = special_id(tokenizer, BOS), special_id(tokenizer, END_OF_TEXT)
    config = llama_config(network.shape, bos=bos, eos=eos, pad=pad)
    generation = {
        "bos_token_id": bos,
        "do_sample": True,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "temperature": 0.7,
        "top_p": 0.9,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_file(network.llama_tensors(), str(folder / "model.safetensors"), {"format": "pt"})


def make_one(
    shape: Shape,
    phases: tuple[Phase, ...],
    folder: Path,
    *,
    title: str,
    console: Console,
    tokenizer: Tokenizer,
    entries: tuple[Entry, ...],
    excluded: frozenset[str],
    compiled: bool,
    snapshots: Path | None,
) -> float:
    """Train a model of that shape into a checkpoint folder; returns the seconds it took."""
    import torch

    from streamer.demo.network import Network

    torch.manual_seed(SEED)
    network = Network(shape, max(phase.length for phase in phases)).bfloat16()
    num_steps = sum(phase.num_steps for phase in phases)
    tokens = sum(phase.num_tokens for phase in phases)
    console.print(f"{title}: {shape.num_parameters:,} parameters, {tokens / 1e6:.1f} M tokens")
    batches = steps(phases, tokenizer, entries, excluded, SEED)
    began = time.monotonic()
    train(
        network,
        batches,
        num_steps,
        title=title,
        console=console,
        compiled=compiled,
        snapshot=None if snapshots is None else lambda: save(network, tokenizer, snapshots),
    )
    save(network, tokenizer, folder)
    return time.monotonic() - began


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m streamer.demo.train", description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="gets checkpoint/, draft/ and report.md"
    )
    parser.add_argument(
        "--held-out", type=Path, help="phrasings to keep out of training and to ask at the end"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--snapshots", type=Path, help="folder for a checkpoint every few minutes")
    parser.add_argument("--only", choices=("demo", "draft", "report"), help="do one part alone")
    parser.add_argument(
        "--no-compile", action="store_true", help="do not use torch.compile (15%% slower)"
    )
    return parser.parse_args()


def note_training(out: Path, title: str, figures: dict[str, float]) -> None:
    """Keep what the training of one model took in training.json, for the report."""
    path = out / "training.json"
    noted = json.loads(path.read_text()) if path.exists() else {}
    noted[title] = figures
    path.write_text(json.dumps(noted, indent=2) + "\n")


def main() -> None:
    """Train both models and write the report."""
    import torch

    options = arguments()
    torch.set_num_threads(options.threads)
    console = Console()
    entries = read_questions()
    asked = () if options.held_out is None else read_held_out(options.held_out)
    excluded = excluded_phrasings(asked)
    tokenizer = train_tokenizer(entries, SEED)
    compiled = not options.no_compile and shutil.which("g++") is not None
    jobs = (("demo", DEMO, DEMO_PHASES, "checkpoint"), ("draft", DRAFT, DRAFT_PHASES, "draft"))
    for title, shape, phases, name in jobs:
        if options.only not in (None, title):
            continue
        seconds = make_one(
            shape,
            phases,
            options.out / name,
            title=title,
            console=console,
            tokenizer=tokenizer,
            entries=entries,
            excluded=excluded,
            compiled=compiled,
            snapshots=None if options.snapshots is None else options.snapshots / name,
        )
        tokens = sum(phase.num_tokens for phase in phases)
        figures = {"parameters": shape.num_parameters, "tokens": tokens, "minutes": seconds / 60}
        note_training(options.out, title, figures)
    if options.only in (None, "report"):
        from streamer.demo.report import write_report

        write_report(options.out, entries, asked, console)


if __name__ == "__main__":
    main()
