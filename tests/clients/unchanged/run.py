"""`make clients`: every client of the table against `streamer serve`, each in its environment.

Prints a table, and keeps what each client printed in build/clients/printed/, with the requests that
the server refused. Exit code 1 if a client failed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from streamer.loadtest.processes import Server, free_port
from streamer.loadtest.table import markdown, terminal
from tests.clients.unchanged.running import PLACE, Ran, Served, environment, installed, run
from tests.clients.unchanged.table import BY_NAME, CLIENTS, HERE, MODEL, ROOT, Client

FAKE = ("fake:length=40", "--num-gpu-blocks-override", "65536", "--served-model-name", "fake")
# The bundled model was never taught to call: what it must call, its grammar makes it.
CALLS = ("--tool-call-parser", "hermes")
START_S = 60.0
HEADING = ("client", "version", "seconds", "", "what it did")


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(prog="make clients", description=__doc__)
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(BY_NAME)}")
    flags.add_argument("--out", type=Path, default=PLACE / "printed", help="folder of the output")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen clients; returns the exit code."""
    flags = parser()
    args = flags.parse_args(argv)
    if unknown := [name for name in args.clients if name not in BY_NAME]:
        flags.error(f"no client {', '.join(unknown)}; there are {', '.join(BY_NAME)}")
    chosen = [BY_NAME[name] for name in args.clients] or list(CLIENTS)
    console = Console(soft_wrap=True, emoji=False, stderr=True)
    args.out.mkdir(parents=True, exist_ok=True)
    rows = [HEADING]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with (
        tempfile.TemporaryDirectory() as temporary,
        server(Path(temporary) / "bundled.log", MODEL, *CALLS) as bundled,
        Progress(*columns, TimeElapsedColumn(), console=console) as progress,
    ):
        task = progress.add_task("", total=len(chosen))
        for client in chosen:
            progress.update(task, description=client.name)
            rows.append(tried(client, bundled, args.out))
            progress.update(task, advance=1)
    (args.out / "summary.md").write_text(markdown(rows) + "\n", encoding="utf-8")
    Console(emoji=False).print(terminal(rows, words=(0, 1, 3, 4)))
    return int(any(row[3] == "failed" for row in rows))


def tried(client: Client, bundled: Served, out: Path) -> tuple[str, ...]:
    """Install and run one client; its row of the table."""
    begun = time.monotonic()
    try:
        folder = installed(client)
        with tempfile.TemporaryDirectory() as temporary:
            log = Path(temporary) / "server.log"
            answers = str(HERE / "scripts" / client.answers)
            with server(log, "fake", *FAKE, "--script", answers) as fake:
                ran = run(client, fake, bundled, folder)
            refused = [line for line in log.read_text().splitlines() if "streamer.refused" in line]
    except Exception as error:  # one that can't be installed does not end the others
        ran, refused = Ran(-1, f"{type(error).__name__}: {error}\n"), []
    printed = "".join([ran.printed, *(f"refused: {line}\n" for line in refused)])
    (out / f"{client.name}.txt").write_text(printed, encoding="utf-8")
    last = next((line for line in reversed(ran.printed.splitlines()) if line.strip()), "")
    verdict = "ok" if ran.code == 0 else "failed"
    return client.name, client.version, f"{time.monotonic() - begun:.0f}", verdict, last[:160]


@contextmanager
def server(log: Path, model: str, *flags: str) -> Iterator[Served]:
    """`streamer serve` on a port of its own."""
    port = free_port()
    command = [sys.executable, "-m", "streamer", "serve", *flags, "--port", str(port)]
    variables = {**environment(log.parent), "PYTHONPATH": str(ROOT)}
    with Server([*command, "--no-load-progress"], port, variables, log) as process:
        process.wait("/ready", START_S)
        yield Served(f"http://127.0.0.1:{port}", model)


if __name__ == "__main__":
    sys.exit(main())
