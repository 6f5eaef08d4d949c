"""guidellm: synthetic prompts over chat completions, completions and responses.

guidellm exits with 0 even if every request failed, so its JSON is judged instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from ..table import number
from .parts import MODEL, Command, Setting, Tool, Verdict, at, read_json

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
STREAMS = 8  # at once
SWEEP = 4  # strategies: one at a time, maximum throughput, and rates between
BEGINS = "Run Summary Info"
TIMES = ("request_latency", "time_to_first_token_ms", "inter_token_latency_ms")
RATES = ("requests_per_second", "output_tokens_per_second", "request_concurrency")
KINDS = {
    "chat-completions": f"kind=sweep,sweep_size={SWEEP},max_concurrency={4 * STREAMS}",
    "completions": f"kind=concurrent,streams={STREAMS}",
    "responses": f"kind=concurrent,streams={STREAMS}",
}


def commands(setting: Setting) -> list[Command]:
    """A run per kind of request."""
    return [command(kind, profile, setting) for kind, profile in KINDS.items()]


def command(kind: str, profile: str, setting: Setting) -> Command:
    """Tokens are drawn with the served model's tokenizer."""
    path = "/v1/" + kind.replace("-", "/")
    backend = f"kind=openai_http,target={setting.url},request_format={path}"
    data = f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"
    limit = f"kind=max_duration,seconds={setting.seconds}"
    asks = ("--backend", backend, "--tokenizer", f"kind=hf_auto,model={MODEL}", "--data", data)
    load = ("--profile", profile, "--constraint", limit, "--disable-progress")
    out = ("--output", "kind=console", "--output", f"kind=json,path={kind}.json")
    return Command(kind, path, "guidellm", ("run", *asks, *load, *out))


def judge(folder: Path, outputs: Mapping[str, str]) -> Verdict:
    """Every strategy must have answers, and no errors."""
    failures: list[str] = []
    parts, kept, lines = [], {}, []
    for kind, output in outputs.items():
        found = strategies(read_json(folder / f"{kind}.json"))
        if not found:
            failures.append(f"{kind}: it has measured nothing")
        for strategy in found:
            totals = cast("dict[str, int]", strategy["requests"])
            if totals["errored"] or not totals["successful"]:
                failures.append(f"{kind}, {strategy['strategy']}: {totals}")
        best = max((_rate(strategy) for strategy in found), default=0.0)
        lines.append(f"{kind}: up to {number(best)} output tokens/s")
        parts.append((kind, tables(output)))
        kept[kind] = found
    return Verdict(tuple(failures), tuple(parts), kept, "; ".join(lines))


def _rate(strategy: Mapping[str, object]) -> float:
    return float(cast("float", at(strategy, "output_tokens_per_second", "mean", default=0.0)))


def strategies(report: Mapping[str, object]) -> list[dict[str, object]]:
    """Per strategy of guidellm's report: counts of requests, means and percentiles."""
    found = []
    for benchmark in cast("list[object]", at(report, "benchmarks", default=[])):
        strategy = cast("dict[str, object]", at(benchmark, "config", "strategy", default={}))
        metrics = at(benchmark, "metrics", default={})
        kept: dict[str, object] = {"strategy": strategy.get("type_")}
        kept |= {"rate": strategy["rate"]} if "rate" in strategy else {}
        kept["requests"] = at(metrics, "request_totals")
        for name in (*RATES, *TIMES):
            values = at(metrics, name, "successful", default={})
            kept[name] = {
                "mean": at(values, "mean"),
                **{p: at(values, "percentiles", p) for p in ("p50", "p95", "p99")},
            }
        found.append(kept)
    return found


def tables(output: str) -> str:
    """The tables that guidellm prints at the end; it prints them twice."""
    lines = output.splitlines()
    begins = [i for i, line in enumerate(lines) if BEGINS in line]
    ends = [i for i, line in enumerate(lines) if "Benchmarking complete" in line]
    kept = lines[begins[-1] : ends[-1] if ends else None] if begins else lines[-20:]
    return "\n".join(kept).strip()


TOOL = Tool(
    name="guidellm",
    packages=(("torch==2.13.0",), ("guidellm==0.8.1", "transformers==5.23.0")),
    shown=("guidellm", "transformers", "httpx"),
    server=(),
    commands=commands,
    judge=judge,
    variables={"GUIDELLM__MAX_WORKER_PROCESSES": "1"},  # the server has these cores too
)
