"""The ranks of another host than the first one's: started, and started again when the set ends.

Has neither scheduler nor server; its ranks take everything but their checkpoint from the first
rank, and wait for it as long as it takes. Called by build.py, on the main thread.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from typing import TYPE_CHECKING, NoReturn

from streamer.handshake import read_secret
from streamer.model.ranks import processes
from streamer.model.ranks.leader import resolve

if TYPE_CHECKING:
    from streamer.config import Config

log = logging.getLogger(__name__)

AGAIN_S = 1.0  # between two sets, where the first rank ended in order


class _Stop(Exception):
    """SIGTERM."""


def serve(config: Config) -> int:
    """Keep this host's ranks running until SIGTERM or Ctrl-C; the process's exit code.

    config  with the checkpoints of this host. ConfigError where the first rank can't be looked for
    """
    address, port = resolve(config)
    secret = read_secret(config.ranks_secret_file or "", "ranks_secret_file")
    on_host = config.tensor_parallel_size // config.nnodes
    first = config.node_rank * on_host
    places = [
        processes.Rendezvous(
            index=index,
            on_host=on_host,
            address=address,
            port=port,
            secret=secret,
            is_far=True,
            model=config.model,
            draft_model=config.draft_model,
        )
        for index in range(first, first + on_host)
    ]
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        return _serve(places)
    except (_Stop, KeyboardInterrupt):
        return 0
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(*_: object) -> NoReturn:
    raise _Stop


def _serve(places: list[processes.Rendezvous]) -> int:
    failures: list[float] = []
    while True:
        where = f"{places[0].address}:{places[0].port}"
        log.info(
            "ranks %d to %d look for the first at %s", places[0].index, places[-1].index, where
        )
        if not _run(places):
            time.sleep(AGAIN_S)
            continue
        failures.append(time.monotonic())
        if not processes.may_try_again(failures, failures[-1]):
            log.critical("ranks of this host failed %d times", processes.MAX_TRIES + 1)
            return 1
        time.sleep(processes.pause_s(failures, failures[-1]))


def _run(places: list[processes.Rendezvous]) -> bool:
    """One set of ranks, from its start to its end; whether one of them failed."""
    with contextlib.ExitStack() as stack:
        ranks = []
        for place in places:
            ranks.append(processes.start(place))
            stack.callback(processes.end, ranks, 0.0)
        while all(rank.poll() is None for rank in ranks):
            time.sleep(0.1)
        failed = any(rank.poll() for rank in ranks)
        processes.end(ranks)  # the first rank cuts the others off
    return failed
