"""`python -m streamer.loadtest.tools`: Locust, guidellm and lm-eval, unchanged, against a server.

Installs each in an environment of its own (beside compare's peers), starts `streamer serve` with
the bundled model, or takes the server at --url, and runs them. What they print is kept in
loadtest/results/tools/. Exit code 1 if one of them failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..compare.command import RESULTS, device, num_cores
from ..compare.engines import ENGINES, OURS, Places, environment
from ..compare.install import make_environment
from ..processes import EngineFailed, Process, Server, free_port
from ..sse import BadAnswer
from ..target import Target
from . import kept, with_guidellm, with_lm_eval, with_locust
from .parts import MODEL, Command, Setting, Tool, Verdict

OK, FAILED = 0, 1
FAULTS = (EngineFailed, BadAnswer, OSError, ValueError, LookupError, subprocess.CalledProcessError)
TOOLS = {each.TOOL.name: each.TOOL for each in (with_locust, with_guidellm, with_lm_eval)}
SECONDS, LIMIT_S = 20, 900.0  # of a load; of a command
HERE = Path(__file__).absolute().parent
ROOT = HERE.parents[2]
BUNDLED = HERE.parents[1] / "demo" / "checkpoint"
FILES = {  # in every command's folder
    "locust_users.py": HERE.parent / "users" / "locustfile.py",
    "locust_plain.py": HERE / "locust_plain.py",
    "slo.toml": HERE / "slo.toml",
}
VERSIONS = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"


class Where(NamedTuple):
    """The server, given or to be started, and the folder of its model."""

    url: str
    model_folder: Path
    seconds: int


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(prog="python -m streamer.loadtest.tools", description=__doc__)
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    add = flags.add_argument
    add("--tools", nargs="+", choices=TOOLS, default=list(TOOLS), help="instead of all")
    add("--url", default="", help="a server that runs already, instead of one with our model")
    says = "of the served model: its tokenizer, and its weights for lm-eval's oracle"
    add("--model-folder", type=Path, default=BUNDLED, help=says)
    add("--seconds", type=int, default=SECONDS, help="of each load")
    add("--out", type=Path, default=RESULTS / "tools", help="folder for what they print")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen tools; returns the exit code."""
    args, console = parser().parse_args(argv), Console(soft_wrap=True, emoji=False)
    places = Places.found()
    where = Where(args.url, args.model_folder.absolute(), args.seconds)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    failed = []
    try:
        for name in args.tools:
            console.print(f"[bold]{name}")
            verdict = use(TOOLS[name], where, places, args.out, console)
            console.print(verdict.line, markup=False, highlight=False)
            for failure in verdict.failures:
                console.print(f"Failed: {failure}", markup=False, highlight=False)
            failed += [name] * bool(verdict.failures)
    except KeyboardInterrupt:
        console.print("Interrupted")
        return FAILED
    finally:
        signal.signal(signal.SIGTERM, before)
    console.print(f"Failed: {', '.join(failed)}" if failed else "All passed")
    return FAILED if failed else OK


def use(tool: Tool, where: Where, places: Places, out: Path, console: Console) -> Verdict:
    """Install one tool, run it and write its output."""
    try:
        versions = installed(tool, places, console)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary).resolve()
            furnish(folder, where.model_folder)
            with server(tool, where, places, folder) as setting:
                commands = tool.commands(setting)
                outputs, failures = run(tool, commands, places, folder, console)
            verdict = tool.judge(folder, outputs)
    except FAULTS as error:
        return Verdict((f"{tool.name}: {error}",), (), None, "it could not be run")
    verdict = Verdict((*failures, *verdict.failures), verdict.parts, verdict.data, verdict.line)
    head = {"date": datetime.datetime.now().strftime("%Y-%m-%d %H:%M")}
    head["device"] = ", ".join(map(str, device().values()))
    served = [] if where.model_folder == BUNDLED else [where.model_folder.name]
    head["server"] = where.url or " ".join(["streamer serve", *served, *tool.server])
    kept.write(out, tool.name, kept.About.of(head, versions, commands), verdict)
    return verdict


def installed(tool: Tool, places: Places, console: Console) -> dict[str, str]:
    """The versions in the tool's environment, made anew unless all pins are met."""
    found = versions_of(tool, places)
    if not found or any(pin not in found[name] for name, pin in tool.pins.items()):
        console.print(f"Installing {tool.name}")
        make_environment(places.home / tool.name, tool.packages)
        found = versions_of(tool, places)
    return {name: found[name] for name in tool.shown}


def versions_of(tool: Tool, places: Places) -> dict[str, str]:
    """Package -> version; {} where one is missing."""
    python = places.python(tool.engine)
    if not python.exists():
        return {}
    names = list(dict.fromkeys([*tool.shown, *tool.pins]))
    command = [str(python), "-c", VERSIONS, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return dict(zip(names, done.stdout.split(), strict=True)) if not done.returncode else {}


def furnish(folder: Path, model_folder: Path) -> None:
    """Put the model, tasks and locustfiles into a command's folder."""
    (folder / MODEL).symlink_to(model_folder, target_is_directory=True)
    shutil.copytree(HERE / "tasks", folder / "tasks")
    for name, source in FILES.items():
        shutil.copy(source, folder / name)


@contextmanager
def server(tool: Tool, where: Where, places: Places, folder: Path) -> Iterator[Setting]:
    """The values for command lines, while the server runs."""
    about = json.loads((where.model_folder / "config.json").read_bytes())
    context = int(about["max_position_embeddings"])
    if where.url:
        target = Target.of(where.url)
        yield Setting(where.url.rstrip("/").removesuffix("/v1"), target.first_model(), False,
                      context, where.seconds)  # fmt: skip
        return
    port = free_port()
    python = str(places.python(ENGINES[OURS]))
    command = [python, "-m", "streamer", "serve", str(where.model_folder), *tool.server]
    command += ["--port", str(port), "--no-load-progress", "--log-level", "warning"]
    env = environment(ENGINES[OURS], places, num_cores())
    with Server(command, port, env, folder / "server.log") as process:
        process.wait(ENGINES[OURS].ready)
        url = f"http://127.0.0.1:{port}"
        yield Setting(url, Target.of(url).first_model(), True, context, where.seconds)


def run(
    tool: Tool, commands: Sequence[Command], places: Places, folder: Path, console: Console
) -> tuple[dict[str, str], list[str]]:
    """Each command's output by its name, and the commands that failed."""
    env = environment(tool.engine, places, num_cores()) | tool.variables
    env |= {"HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    env |= {"NO_COLOR": "1", "COLUMNS": "160", "PYTHONPATH": str(ROOT)}
    outputs: dict[str, str] = {}
    failures: list[str] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=len(commands))
        for command in commands:
            progress.update(task, description=command.says)
            log = folder / f"{command.name}.log"
            line = [str(places.program(tool.engine, command.program)), *command.flags]
            with Process(line, env, log) as process:
                code = ended(process)
            output = log.read_text(encoding="utf-8", errors="replace")
            outputs[command.name] = kept.cleaned(output, stands_for(folder, places))
            if code:
                failures.append(f"{command.name}: exit code {code}: {last_line(output)}")
            progress.update(task, advance=1)
    return outputs, failures


def ended(process: Process) -> int:
    """Wait for the process's exit code; EngineFailed after LIMIT_S."""
    deadline = time.monotonic() + LIMIT_S
    while (code := process.exit_code) is None:
        if time.monotonic() > deadline:
            raise process.failure(f"no end after {LIMIT_S:.0f} s")
        time.sleep(0.1)
    return code


def stands_for(folder: Path, places: Places) -> dict[str, str]:
    """Path -> what is written in its place."""
    return {str(folder): ".", str(places.home): "PEERS", str(ROOT): ".", str(Path.home()): "~"}


def last_line(output: str) -> str:
    """The last line that is not empty."""
    return next((line for line in reversed(output.splitlines()) if line.strip()), "")[:200]


if __name__ == "__main__":
    sys.exit(main())
