"""`streamer bench accuracy`: what quantized weights, or a quantized KV cache, cost in accuracy.

A text is cut into windows of --context tokens; in each, the second half is scored against the same
checkpoint in --reference-dtype: perplexity, the mean Kullback-Leibler divergence of the next-token
distributions and its 99th percentile, and how often both find the same token likeliest. These are
the windows and figures of llama.cpp's `llama-perplexity --kl-divergence`, so that its output on the
same file can stand beside. Logits come from the engine's own runner, kernels and cache included.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from streamer.config import Config
from streamer.errors import ConfigError
from streamer.loadtest.table import terminal

if TYPE_CHECKING:
    import torch
    from rich.console import Console

BLOCK = 16
SEED, NUM_STORIES, NUM_FILES = 10_007, 200, 100
COLUMNS = ("weights, KV", "perplexity", "KL mean", "KL p99", "same best, %")


class Case(msgspec.Struct, frozen=True):
    """One way to run the model: the file or folder, the dtype, --quantization, --kv-cache-dtype."""

    name: str
    model: str | None
    dtype: str
    quantization: str | None = None
    kv_cache_dtype: str = "auto"


class Score(msgspec.Struct, frozen=True):
    """One case over all windows; the divergences are from the reference, in nats a token."""

    name: str
    num_tokens: int
    perplexity: float
    kl_mean: float
    kl_p99: float
    same_best: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The reference, the cases, the text."""
    add = parser.add_argument
    add("--model", help="the reference checkpoint (the bundled model)")
    add("--dtype", default="bfloat16", help="computed in (bfloat16)")
    add("--reference-dtype", help="of the reference (--dtype); another makes the dense a case")
    add("--quantization", nargs="+", default=[], metavar="NAME", help="made of it when loaded")
    add("--files", nargs="+", default=[], help="quantized files or folders of the same model")
    add("--kv-cache-dtype", nargs="+", default=[], metavar="NAME", help="with dense weights")
    add("--text", type=Path, help="the text to score (the bundled model: stories; others: code)")
    add("--context", type=int, default=512, help="tokens of a window (512)")
    add("--windows", type=int, default=8, help="windows at most (8)")
    add("--json", type=Path, metavar="FILE", help="write every figure there too")


def run(args: argparse.Namespace, console: Console) -> int:
    """Score the reference and every case; print a table."""
    if args.context < 2 or args.windows < 1:
        raise ConfigError("--context must be at least 2 and --windows at least 1", param="context")
    dtype, reference = args.dtype, args.reference_dtype or args.dtype
    cases = [Case(dtype, args.model, dtype)] if reference != dtype else []
    cases += [Case(name, args.model, dtype, name) for name in args.quantization]
    cases += [Case(Path(file).name, file, dtype) for file in args.files]
    cases += [Case(f"KV {name}", args.model, dtype, None, name) for name in args.kv_cache_dtype]
    scores = list(measure(Case(reference, args.model, reference), cases, args, console))
    rows = [COLUMNS, *(row(score) for score in scores)]
    title = f"{scores[0].num_tokens:,} tokens, windows of {args.context}"
    console.print(terminal(rows, title))
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(scores), indent=1) + b"\n")
    return 0


def row(score: Score) -> tuple[str, ...]:
    """The score as a row of the table."""
    return (
        score.name,
        f"{score.perplexity:.4f}",
        f"{score.kl_mean:.6f}",
        f"{score.kl_p99:.5f}",
        f"{100 * score.same_best:.2f}",
    )


def measure(
    reference: Case, cases: Sequence[Case], args: argparse.Namespace, console: Console
) -> Iterator[Score]:
    """The reference's score, then each case's."""
    truth, tokenizer = load(reference)
    text = args.text.read_text(encoding="utf-8") if args.text else some_text(args.model)
    windows = cut(tokenizer.encode(text), args.context, args.windows)
    expected = [log_probs(truth, window) for window in windows]
    yield score(reference.name, windows, expected, expected)
    del truth
    for case in cases:
        with console.status(f"Scoring {case.name}"):
            runner, _ = load(case)
            found = [log_probs(runner, window) for window in windows]
            yield score(case.name, windows, expected, found)
            del runner


def some_text(model: str | None) -> str:
    """Stories of the kind that the bundled model learned, of a seed it has not seen; for another
    model files of Python's library."""
    if model is None:
        from streamer.demo.training.texts.stories import make_story

        random_ = random.Random(SEED)
        return "\n".join(make_story(random_).text for _ in range(NUM_STORIES))
    from streamer.loadtest.compare.models import library_text

    return "".join(islice(library_text(), NUM_FILES))


def load(case: Case) -> tuple[Any, Any]:
    """The case's runner and tokenizer."""
    from streamer.build import loaders
    from streamer.engine.core import Inbox

    settings: dict[str, Any] = {"dtype": case.dtype, "kv_cache_dtype": case.kv_cache_dtype}
    if case.quantization:
        settings["quantization"] = case.quantization
    config = Config(
        model=case.model,
        num_gpu_blocks_override=1,
        max_model_len=BLOCK,
        max_num_seqs=1,
        load_progress=sys.stderr.isatty(),
        **settings,
    )
    load_runner, load_tokenizer = loaders(config)
    return load_runner(Inbox())[0], load_tokenizer()


def cut(tokens: Sequence[int], context: int, max_count: int) -> list[list[int]]:
    """Whole windows from the text's beginning; ConfigError for a text that has none."""
    count = min(max_count, len(tokens) // context)
    if not count:
        raise ConfigError(f"the text has {len(tokens)} tokens, a window {context}", param="text")
    return [list(tokens[i * context : (i + 1) * context]) for i in range(count)]


def log_probs(runner: Any, window: Sequence[int]) -> torch.Tensor:
    """Log probabilities [context / 2, V] after each token of the window's second half but the
    last, in float32; the window is computed in two chunks, the second from the cache."""
    import torch

    from streamer.kernels import ops

    model, kernels = runner.model, ops.for_cpu()
    blocks = -(-len(window) // BLOCK)
    pool = kernels.new_pool(
        blocks, model.num_layers, BLOCK, model.num_kv_heads, model.head_dim, runner.kv_dtype
    )
    table = torch.arange(blocks)
    half = len(window) // 2
    logits = torch.empty(0)
    with torch.inference_mode():
        for start, end in ((0, half), (half, len(window) - 1)):
            positions = torch.arange(start, end)
            batch = ops.AttentionBatch.of_row(table, start, end, BLOCK)
            tokens = torch.tensor(window[start:end])
            logits = model.forward(tokens, positions, batch, pool, None)
        return torch.log_softmax(logits.float(), -1)


def score(
    name: str,
    windows: Sequence[Sequence[int]],
    expected: Sequence[torch.Tensor],
    found: Sequence[torch.Tensor],
) -> Score:
    """Figures of all windows together."""
    import torch

    losses, divergences, same = [], [], []
    for window, p, q in zip(windows, expected, found, strict=True):
        targets = torch.tensor(window[-len(q) :])
        losses.append(-q[torch.arange(len(q)), targets])
        divergences.append((p.exp() * (p - q)).sum(-1))
        same.append(p.argmax(-1) == q.argmax(-1))
    kl = torch.cat(divergences)
    return Score(
        name,
        len(kl),
        math.exp(float(torch.cat(losses).mean())),
        float(kl.mean()),
        float(kl.quantile(0.99)),
        float(torch.cat(same).float().mean()),
    )
