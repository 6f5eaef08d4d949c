"""`streamer serve`: settings in, a running server out.

Refuses to listen beyond this machine without a key, starts engine and server on one event loop and
says what is served where. Draining and signals are the server's; the exit code says how it ended.
"""

from __future__ import annotations

import argparse
import ipaddress
import sys
from typing import TYPE_CHECKING

from streamer.cli.arguments import UsageError, add_config_flags, config_from
from streamer.cli.loop import new_runner

if TYPE_CHECKING:
    from rich.console import Console

    from streamer.config import Config
    from streamer.engine.engine import AsyncEngine

# Threads hand the GIL over after so many seconds: with 5 ms of Python a step in the engine's
# thread, the loop's p99 lag was 4.8 to 5.0 ms at Python's default and 0.7 to 0.9 at this value,
# for under 7% of throughput (2 cores of an EPYC Zen 5, 2026-11-20).
SWITCH_INTERVAL_S = 0.0005


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every setting is a flag here."""
    add_config_flags(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Serve until stopped; 0 after a drain, 1 when the engine died."""
    config = config_from(args)
    check_bind(config)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with new_runner() as runner:
        return runner.run(_serve(config, console))


async def _serve(config: Config, console: Console) -> int:
    from streamer.build import build_engine
    from streamer.server.lifecycle import serve

    engine = build_engine(config)
    await serve(engine, config)
    return 1 if engine.is_dead else 0


def check_bind(config: Config) -> None:
    """UsageError if anybody on the network could use the engine without a key."""
    if config.uds or config.api_key or config.allow_public_bind or _is_loopback(config.host):
        return
    raise UsageError(
        f"--host {config.host} is reachable from other machines and no --api-key is set; "
        "set a key (STREAMER_API_KEY keeps it out of the process list), "
        "or say --allow-public-bind"
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False  # a name: it may resolve to anything


def url_of(config: Config) -> str:
    """Where a client on this machine finds the server."""
    if config.uds:
        return f"unix:{config.uds}"
    scheme = "https" if config.ssl_certfile else "http"
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(config.host, config.host)
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"{scheme}://{host}:{config.port}{config.root_path}"


def announce(engine: AsyncEngine, config: Config, console: Console) -> None:
    """The lines a person reads before the first request."""
    info = engine.info
    context = info.num_blocks * info.block_size
    kv_bytes = info.num_blocks * info.block_bytes
    console.print(
        f"[bold]{info.name}[/]  {info.num_parameters / 1e6:,.1f} M parameters, {info.dtype} "
        f"on {info.device}, context {info.max_model_len:,} tokens"
    )
    console.print(
        f"KV cache  {context:,} tokens in {info.num_blocks:,} blocks of {info.block_size} "
        f"({kv_bytes / (1 << 20):,.0f} MiB), {info.num_host_blocks:,} host blocks for swapping"
    )
    console.print(f"Serving on [bold cyan]{url_of(config)}[/]  (Ctrl-C drains and stops)")
