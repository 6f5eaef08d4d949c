"""`streamer doctor`: checks this machine, says what is missing and how to fix it.

Changes nothing. Each check is a function that returns findings; a finding with a remedy is a flaw,
and only the states "missing" and "failing" make the exit code 1.
"""

from __future__ import annotations

import argparse
import errno
import os
import platform
import re
import shutil
import socket
import sys
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from streamer.cli.arguments import add_config_flags, config_from

if TYPE_CHECKING:
    from rich.console import Console

    from streamer.config import Config

DISTRIBUTION = "streamer-llm"  # "streamer" on an index is another program
BROWSERS = ("chromium", "chromium-browser", "google-chrome")  # the Makefile looks for the same
MARKS = {
    "good": "[green]ok[/]",
    "note": "[yellow]note[/]",
    "missing": "[red]missing[/]",
    "failing": "[red]fails[/]",
}


class Finding(msgspec.Struct, frozen=True):
    """The result of one check. `remedy` is empty where nothing has to be done."""

    what: str
    state: Literal["good", "note", "missing", "failing"]
    detail: str
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The settings that are checked: where the server would listen."""
    add_config_flags(parser, sections=("server",), model=False)


def run(args: argparse.Namespace, console: Console) -> int:
    """Print every finding; 1 if a requirement is missing or fails."""
    from rich.table import Table

    config = config_from(args)
    findings = [
        *python(),
        *packages(),
        *torch_build(),
        *memory(),
        browser(),
        port_free(config),
    ]
    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in findings:
        detail = f"{finding.detail}. {finding.remedy}" if finding.remedy else finding.detail
        table.add_row(MARKS[finding.state], finding.what, detail)
    console.print(table)
    return 1 if any(f.state in ("missing", "failing") for f in findings) else 0


def python() -> list[Finding]:
    """The interpreter, and whether it runs in an environment of its own."""
    version = platform.python_version()
    found = [Finding("python", "good", f"{version} on {platform.system()} {platform.machine()}")]
    if sys.prefix == sys.base_prefix:
        found.append(
            Finding("environment", "note", "not a virtual environment", "`make serve` makes one")
        )
    return found


def packages() -> list[Finding]:
    """The version of every package that pyproject.toml requires, or that it is not installed."""
    try:
        required = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return [Finding(DISTRIBUTION, "missing", "not installed", "pip install -e .")]
    findings = []
    for line in required:
        requirement, _, marker = line.partition(";")
        if "extra" in marker:
            continue
        name = re.split(r"[^A-Za-z0-9._-]", requirement.strip(), maxsplit=1)[0]
        try:
            findings.append(Finding(name, "good", metadata.version(name)))
        except metadata.PackageNotFoundError:
            # a package that a platform marker leaves out is a note: the engine starts without it
            state: Literal["note", "missing"] = "note" if marker else "missing"
            findings.append(Finding(name, state, "not installed", f"pip install '{line.strip()}'"))
    return findings


def torch_build() -> list[Finding]:
    """Threads, bfloat16 and the accelerator that torch sees."""
    if util.find_spec("torch") is None:
        return []
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = torch.get_num_threads()
    findings = [Finding("threads", "good", f"torch uses {threads} of {cores} cores")]
    if cores and threads > cores:
        findings[0] = Finding(
            "threads", "note", f"torch uses {threads} on {cores} cores", "unset OMP_NUM_THREADS"
        )
    findings += [_bfloat16(), _kernels()]
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name(0)
        findings.append(Finding("gpu", "good", f"{name}; --device auto takes it"))
    else:
        findings.append(Finding("gpu", "good", "none; the model runs on the CPU"))
    return findings


def _kernels() -> Finding:
    """Whether the native kernels compile here."""
    from streamer.kernels import ops

    why = ops.why_not_native()
    if not why:
        return Finding("kernels", "good", "native, compiled for this CPU")
    return Finding("kernels", "note", f"torch's own operators: {why}")  # which says what mends it


def _bfloat16() -> Finding:
    flags = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        flags = next((x for x in cpuinfo.read_text().splitlines() if x.startswith("flags")), "")
    for flag, name in (("amx_bf16", "AMX"), ("avx512_bf16", "AVX512-BF16")):
        if flag in flags.split():
            return Finding("bfloat16", "good", f"in hardware ({name})")
    return Finding(
        "bfloat16", "note", "no instructions for it were found", "--dtype float32 may be faster"
    )


def memory() -> list[Finding]:
    """Memory that is free for weights and KV cache, within this process's limits."""
    from streamer.model.memory import free_bytes

    free_gib = free_bytes() / (1 << 30)
    detail = f"{free_gib:.1f} GiB free for weights and KV cache"
    if free_gib < 1.0:
        return [Finding("memory", "note", detail, "lower --gpu-memory-utilization or free some")]
    return [Finding("memory", "good", detail)]


def browser() -> Finding:
    """The browser that the page's tests drive; serving does not need it."""
    for name in BROWSERS:
        path = shutil.which(name)
        if path:
            return Finding("chromium", "good", path)
    return Finding("chromium", "note", "not found; only tests need it", "apt-get install chromium")


def port_free(config: Config) -> Finding:
    """Whether the server can listen on the configured address or socket."""
    if config.uds:
        folder = Path(config.uds).resolve().parent
        if not os.access(folder, os.W_OK):
            return Finding("socket", "failing", f"{folder} can't be written to", "choose --uds")
        return Finding("socket", "good", config.uds)
    where, host = f"{config.host}:{config.port}", config.host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, config.port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                remedy = "Stop what listens there, or choose another with --port"
                return Finding("port", "failing", f"{where} is in use", remedy)
            detail = f"can't listen on {where}: {error.strerror or error}"
            return Finding("port", "failing", detail, "Choose --host and --port")
    return Finding("port", "good", f"{where} is free")
