"""`streamer quantize [MODEL] --to int4 --out DIR`: a dense checkpoint as a compressed-tensors one.

Reads a folder or hub id, writes a new folder that this engine, vLLM and transformers load.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from streamer.cli.arguments import UsageError

if TYPE_CHECKING:
    from rich.console import Console

KINDS = ("int8", "int4", "fp8")
GROUPS = (32, 64, 128)  # columns of int4 that share a scale
MAX_TEXT = 4 << 20  # characters of a calibration that are read: 64 for each of its tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, what it becomes, and where it is written."""
    says = "checkpoint folder or hub id, dense (the bundled model)"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=says)
    parser.add_argument("--to", required=True, choices=KINDS, help="what its matrices become")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a new folder")
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="text like what the model will read: int4 loses about half as much (GPTQ on its "
        "first 65,536 tokens)",
    )
    parser.add_argument(
        "--group-size",
        type=int,
        choices=GROUPS,
        help="columns of int4 that share a scale (32): fewer lose less, more are faster",
    )
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit on the hub")


def run(args: argparse.Namespace, console: Console) -> int:
    """Write the checkpoint and say what it takes; 0."""
    from streamer.build import resolve_model
    from streamer.config import Config
    from streamer.fake.model import is_fake
    from streamer.model.inspect import inspect_checkpoint
    from streamer.model.quantization.on_the_fly import GROUP
    from streamer.model.quantization.write import quantize_checkpoint

    if is_fake(args.model):
        raise UsageError("MODEL: the fake model has no weights")
    if args.calibration is not None and args.to != "int4":
        raise UsageError(f"--calibration: {args.to} loses next to nothing; it is for int4")
    if args.group_size is not None and args.to != "int4":
        raise UsageError(f"--group-size: {args.to} has a scale for each output; it is for int4")
    folder = resolve_model(Config(model=args.model, revision=args.revision))
    tokens = None
    if args.calibration is not None:
        tokens = _tokens(folder, args.calibration)
    group = args.group_size or GROUP
    dense = quantize_checkpoint(folder, args.out, args.to, tokens, group, show_progress=True)
    facts = inspect_checkpoint(args.out)
    size = sum(file.stat().st_size for file in args.out.glob("*.safetensors"))
    bits = 8 * size / facts.num_parameters
    whose = args.model or "the bundled model"
    says = (
        f"{whose} in {args.out}: {facts.scheme}; {size:,} bytes, {bits:.2f} bits a weight in the "
    )
    stays = "file with what stays as it is: embeddings and the last matrix"
    console.print(says + stays, markup=False)
    if dense:
        says = f"{len(dense)} matrices stay dense: their inputs are no multiple of a group"
        console.print(f"{says}, {dense[0]} for one", markup=False)
    console.print(f"`streamer serve {shlex.quote(str(args.out))}` serves it", markup=False)
    return 0


def _tokens(folder: Path, file: Path) -> list[int]:
    """The file's text in the model's tokens."""
    from streamer.tokenizer.tokenizer import Tokenizer

    if file.exists() and not file.is_file():  # a pipe without a writer would be waited for
        raise UsageError(f"--calibration {file}: it is no regular file")
    try:
        with file.open(encoding="utf-8") as f:
            text = f.read(MAX_TEXT)
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else e
        raise UsageError(f"--calibration {file}: {why}; it is the path of a text file") from None
    return list(Tokenizer.from_folder(folder, None).encode(text))
