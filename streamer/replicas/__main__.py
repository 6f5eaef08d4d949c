"""`python -m streamer.replicas`: one replica as a process of its own, started by Processes.

Reads an Order on standard input and prints its Member; drains at SIGTERM, and ends at once when its
input does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamer.config import Config
    from streamer.replicas.processes import Order


async def serve(order: Order, config: Config) -> int:
    """Serve until it is told to end, or its engine dies."""
    import msgspec

    from streamer.cli.loop import freeze_heap
    from streamer.replicas.messages import Member
    from streamer.replicas.replica import BEAT_S, ReplicaServer

    server = ReplicaServer(config, name=order.name, secret=order.secret, host=order.host)
    loop, is_over = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, is_over.set)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # of a terminal: whoever started it drains
    reading = asyncio.create_task(asyncio.to_thread(sys.stdin.buffer.read))
    reading.add_done_callback(lambda _: os._exit(0))
    try:
        await server.start()
        freeze_heap()
        member = Member(order.name, server.address)
        sys.stdout.buffer.write(msgspec.json.encode(member) + b"\n")
        sys.stdout.buffer.flush()
        while not is_over.is_set() and not server.is_dead:
            try:
                async with asyncio.timeout(BEAT_S):
                    await is_over.wait()
            except TimeoutError:
                continue
        if not server.is_dead:
            await server.drain(config.drain_timeout)
    finally:
        await server.aclose()
    return int(server.is_dead)


def main() -> None:
    """Run the replica that standard input orders."""
    import msgspec

    from streamer.cli.loop import SWITCH_INTERVAL_S, new_runner
    from streamer.config import Config
    from streamer.replicas.processes import Order

    line = sys.stdin.buffer.readline()
    if not line:
        return
    order = msgspec.json.decode(line, type=Order)
    config = msgspec.convert(order.config, Config)
    logging.basicConfig(level=config.log_level.upper(), format=f"{order.name} %(message)s")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with new_runner() as runner:
        code = runner.run(serve(order, config))
    sys.stdout.flush()
    logging.shutdown()
    os._exit(code)  # the thread that reads the input can't be joined


if __name__ == "__main__":
    main()
