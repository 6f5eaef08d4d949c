"""lm-eval: the same tasks through the server (`local-completions`) and through transformers (`hf`).

The second is the reference: accuracies and greedy answers must be the same, log-likelihoods and
perplexities equal within rounding, which in float32 is far below the effect of any error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..table import plain
from .parts import MODEL, Command, Setting, Tool, Verdict, at, read_json

SERVED, ORACLE = "local-completions", "hf"
TASKS = ("streamer_choice", "streamer_text", "streamer_answer")
AT_ONCE = 8
ROUNDING = 1e-5  # relative, of sums over a few hundred tokens


def commands(setting: Setting) -> list[Command]:
    """Both runs. The first cuts long texts into windows of context - 2, so the second does too."""
    url = f"{setting.url}/v1/completions"
    served = f"model={setting.model},base_url={url},tokenizer={MODEL}"
    served += f",tokenizer_backend=huggingface,max_length={setting.context}"
    served += f",num_concurrent={AT_ONCE}"
    oracle = f"pretrained={MODEL},dtype=float32,add_bos_token=False"
    oracle += f",max_length={setting.context - 2}"
    return [
        command(SERVED, "through the server", served, ()),
        command(ORACLE, "through transformers", oracle, ("--device", "cpu", "--batch_size", "8")),
    ]


def command(name: str, says: str, arguments: str, more: tuple[str, ...]) -> Command:
    """A run of all tasks that keeps every answer, to compare them one by one."""
    flags: tuple[str, ...] = (
        "--model",
        name,
        "--model_args",
        arguments,
        "--tasks",
        ",".join(TASKS),
    )
    flags += ("--include_path", "tasks", "--apply_chat_template", *more)
    return Command(name, says, "lm_eval", (*flags, "--output_path", name, "--log_samples"))


class Pair(NamedTuple):
    """One number in both runs."""

    task: str
    what: str
    served: float | None
    oracle: float | None
    tolerance: float

    @property
    def is_same(self) -> bool:
        """Whether both are equal within the relative tolerance."""
        if self.served is None or self.oracle is None:
            return False
        return abs(self.served - self.oracle) <= self.tolerance * abs(self.oracle)


def judge(folder: Path, outputs: Mapping[str, str]) -> Verdict:
    """Compare both runs."""
    found = [*metrics(folder), *likelihoods(folder)]
    failures = [
        f"{p.task} {p.what}: {p.served} through the server, {p.oracle} by transformers"
        for p in found
        if not p.is_same
    ]
    texts = [pair for pair in answers(folder) if pair[0] != pair[1]]
    failures += [f"an answer differs: {a!r} and {b!r}" for a, b in texts]
    rows = [["task, metric", SERVED, ORACLE, "difference", ""]]
    for p in found:
        shown = ["-" if v is None else f"{v:.6f}" for v in (p.served, p.oracle)]
        gap = "-" if None in (p.served, p.oracle) else f"{(p.served or 0) - (p.oracle or 0):+.1e}"
        rows.append([f"{p.task} {p.what}", *shown, gap, "same" if p.is_same else "differs"])
    parts = [("side by side", plain(rows))]
    parts += [(name, table(output)) for name, output in outputs.items()]
    line = ", ".join(f"{p.task} {p.what} {p.served}" for p in metrics(folder))
    return Verdict(tuple(failures), tuple(parts), [pair._asdict() for pair in found], line)


def metrics(folder: Path) -> Iterator[Pair]:
    """Every metric that one of the runs has."""
    both = [results(folder / name) for name in (SERVED, ORACLE)]
    if not all(both):
        yield Pair("both runs", "results", None, None, 0.0)
    for task in TASKS:
        for key in {**_of(both[0], task), **_of(both[1], task)}:
            name = key.partition(",")[0]
            tolerance = ROUNDING if "perplexity" in name or "bits" in name else 0.0
            served, oracle = (_of(values, task).get(key) for values in both)
            yield Pair(task, name, served, oracle, tolerance)


def _of(values: Mapping[str, object], task: str) -> dict[str, float]:
    found = at(values, "results", task, default={})
    kept = found.items() if isinstance(found, dict) else ()
    return {k: v for k, v in kept if isinstance(v, float | int) and "," in k and "stderr" not in k}


def results(folder: Path) -> dict[str, object]:
    """lm-eval's results file; {} if there is none."""
    return read_json(next(folder.glob("*/results_*.json"), folder / "missing"))


def samples(folder: Path, task: str) -> dict[int, Any]:
    """Document number -> lm-eval's filtered responses."""
    file = next(folder.glob(f"*/samples_{task}_*.jsonl"), None)
    lines = file.read_text(encoding="utf-8").splitlines() if file else []
    rows = map(json.loads, lines)
    return {row["doc_id"]: row["filtered_resps"] for row in rows}


def likelihoods(folder: Path) -> Iterator[Pair]:
    """The pair of log-likelihoods with the largest difference, of each task that has any."""
    for task in TASKS[:2]:
        served, oracle = (samples(folder / name, task) for name in (SERVED, ORACLE))
        if served.keys() != oracle.keys():
            yield Pair(task, "documents", len(served), len(oracle), 0.0)
        pairs = [
            pair
            for doc in sorted(served.keys() & oracle.keys())
            for pair in zip(_sums(served[doc]), _sums(oracle[doc]), strict=True)
        ]
        a, b = max(pairs, key=lambda p: abs(p[0] - p[1]) / abs(p[1]), default=(None, None))
        yield Pair(task, f"log-likelihood, worst of {len(pairs)}", a, b, ROUNDING)


def _sums(values: list[Any]) -> list[float]:
    """Each is a number, or a number and whether it was the greedy answer."""
    return [float(v[0] if isinstance(v, list) else v) for v in values]


def answers(folder: Path) -> list[tuple[Any, Any]]:
    """Both runs' answers, question by question."""
    served, oracle = (samples(folder / name, TASKS[2]) for name in (SERVED, ORACLE))
    return [(served.get(doc), oracle.get(doc)) for doc in sorted({*served, *oracle})]


def table(output: str) -> str:
    """The table that lm-eval prints at the end, with the line of arguments above."""
    lines = output.splitlines()
    begins = [i for i, line in enumerate(lines) if line.startswith("|") and "Tasks" in line]
    return "\n".join(lines[max(0, begins[-1] - 1) :] if begins else lines[-20:]).strip()


TOOL = Tool(
    name="lm-eval",
    packages=(("torch==2.13.0",), ("lm-eval[api,hf]==0.4.13", "transformers==5.23.0")),
    shown=("lm-eval", "transformers", "torch"),
    server=("--dtype", "float32"),
    commands=commands,
    judge=judge,
)
