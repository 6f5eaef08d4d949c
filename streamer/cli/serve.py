"""`streamer serve`: settings in, a running server out.

Refuses to listen beyond this machine without a key, starts engine and server on one event loop and
prints what is served where. The server handles draining and signals. Where ranks compute together
and one of them is gone, the process begins anew.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import ipaddress
import logging
import os
import sys
import time
from typing import TYPE_CHECKING

from streamer.cli.arguments import UsageError, add_config_flags, config_from
from streamer.cli.loop import SWITCH_INTERVAL_S, freeze_heap, new_runner
from streamer.errors import RankFailed, StreamerError

if TYPE_CHECKING:
    from rich.console import Console

    from streamer.config import Config
    from streamer.core.sizes import ModelInfo
    from streamer.engine.base import Engine

log = logging.getLogger(__name__)

# Of the environment: when the ranks of this process failed, since it begins anew after that.
FAILURES = "_STREAMER_RANKS_FAILED"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every setting is a flag here."""
    add_config_flags(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Serve until stopped; 0 after a drain, 1 when the engine died or never started."""
    config = config_from(args, start_log=_start_log)
    if config.node_rank:
        from streamer.build import run_node

        return run_node(config)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        with new_runner() as runner:
            return runner.run(_serve(config, console))
    except StreamerError as error:
        is_again = isinstance(error, RankFailed) and FAILURES in os.environ
        if config.log_format == "text" and not is_again:
            raise  # the command line prints it
        log.critical("%s", error.message)
        if is_again:
            _begin_anew()
        return 1


def _start_log(config: Config) -> None:
    from streamer.server.telemetry.logs import setup

    check_bind(config)
    setup(config.log_level, config.log_format)


def _engine_of(config: Config) -> Engine:
    if config.replicas > 1:
        from streamer.replicas.launch import RayCluster

        return RayCluster(config)
    from streamer.engine.engine import AsyncEngine

    return AsyncEngine.from_config(config)


async def _serve(config: Config, console: Console) -> int:
    gc.set_threshold(0)  # until it is ready: what imports make is kept, and to look takes 0.1 s
    from streamer.server.lifecycle import serve

    engine = _engine_of(config)

    def ready(url: str) -> None:
        freeze_heap()
        if config.log_format == "text":  # in JSON the log has a line for it
            _announce(engine.info, config, url, console)

    code = await serve(engine, config, on_ready=ready)
    if code and engine.death is not None and isinstance(engine.death.__cause__, RankFailed):
        _begin_anew()
    if engine.is_hung:
        _leave(code)
    return code


def _begin_anew() -> None:
    """Run this command line again in this process, whose id stays; returns after too many times.

    A new program, since what a set of ranks leaves behind is not certain: a thread in a sum that
    never ends, a GPU in an error. With a journal the answers go on. Ranks that can't even begin the
    first time have another reason, and the process ends.
    """
    from streamer.model.ranks import processes

    now = time.time()
    failures = [float(at) for at in os.environ.get(FAILURES, "").split()]
    failures = [at for at in failures if now - at < processes.TRIES_S] + [now]
    if not processes.may_try_again(failures, now):
        log.critical("the ranks failed %d times within a minute", len(failures))
        return
    pause_s = processes.pause_s(failures, now)
    log.warning("the ranks are started again in %g s", pause_s)
    time.sleep(pause_s)
    logging.shutdown()
    sys.stdout.flush()
    os.environ[FAILURES] = " ".join(map(str, failures))
    os.execv(sys.executable, sys.orig_argv)


def _leave(code: int) -> None:
    """End the process although a thread of the engine hangs: nothing can join it."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def check_bind(config: Config) -> None:
    """UsageError if other machines could use the engine without a key."""
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


def _announce(info: ModelInfo, config: Config, url: str, console: Console) -> None:
    with contextlib.suppress(SystemExit):  # as rich leaves for a pipe whose reader is gone
        try:
            announce(info, config, url, console)
        except OSError:  # a full disk
            console.on_broken_pipe()


def announce(info: ModelInfo, config: Config, url: str, console: Console) -> None:
    """Print the model, its sizes, what was asked for and the address, before the first request."""
    tokens = info.num_blocks * info.block_size
    millions = info.num_parameters / 1e6
    kv_mib = info.num_blocks * info.block_bytes / (1 << 20)
    swap_mib = info.num_host_blocks * info.block_bytes / (1 << 20)
    kv_dtype = "" if config.kv_cache_dtype == "auto" else f", {config.kv_cache_dtype}"
    weights = (f"{info.weight_bytes / (1 << 20):,.0f} MiB", info.quantization)
    drafts = (config.speculation_method, config.draft_model)
    for name, text in (
        ("model", info.name + (f", {millions:,.1f} M parameters" if millions else "")),
        ("weights", ", ".join(filter(None, weights)) if info.weight_bytes else ""),
        ("dtype", f"{info.dtype} on {info.device}"),
        ("context", f"{info.max_model_len:,} tokens"),
        (
            "KV cache",
            f"{tokens:,} tokens in {info.num_blocks:,} blocks ({kv_mib:,.0f} MiB{kv_dtype})",
        ),
        ("swap", f"{info.num_host_blocks:,} blocks ({swap_mib:,.0f} MiB)"),
        ("speculation", "" if drafts[0] == "none" else ", ".join(filter(None, drafts))),
        ("serving on", f"{url}  (Ctrl-C drains and stops)"),
    ):
        if text:
            console.print(f"{name:>11}  ", end="", style="dim")
            console.print(text, markup=False, soft_wrap=True)
