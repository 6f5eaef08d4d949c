"""uvicorn alone, the yardstick of `streamer bench stream`: prebuilt events over as many sockets.

A separate process: `python -m streamer.loadtest.inside.stream.plain ORDER`. It takes the client's
requests as the real server does, and answers each with the same event again and again, one in every
turn of the loop for every stream: what a server costs that has no engine, no text and no JSON.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from typing import Final

import msgspec
import uvicorn
from starlette.types import Receive, Scope, Send

from streamer.loadtest.inside.stream.client import TRANSPORTS, pin, raise_file_limit
from streamer.loadtest.inside.stream.server import Mark, Ready, tell

# As long as ours for the 12,345th token.
CHUNK: Final = (
    b'data: {"object":"chat.completion.chunk","id":"chatcmpl-0123456789abcdef01234567",'
    b'"created":1795000000,"model":"fake","choices":[{"index":0,"delta":{"content":" 12345"},'
    b'"logprobs":null,"finish_reason":null}],"system_fingerprint":"fp_0123456789"}\n\n'
)
DELTA: Final = (
    '{"type":"response.output_text.delta","sequence_number":12345,"item_id":'
    '"msg_0123456789abcdef01234567","delta":" 12345","output_index":0,"content_index":0,'
    '"logprobs":[],"stream_id":"lane-0"}'
)
ACCEPTED: Final = '{"type":"response.created"}'


class Order(msgspec.Struct, frozen=True):
    """The transport, whose lanes share a socket, and the core."""

    transport: str
    core: int | None = None


class App:
    """The ASGI application. `num_events` counts what it has sent."""

    def __init__(self, lanes: int) -> None:
        self.num_events = 0
        self._lanes = lanes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
            for _ in range(self._lanes):
                await receive()
            await send({"type": "websocket.send", "text": ACCEPTED})
            message: dict[str, object] = {"type": "websocket.send", "text": DELTA}
        else:
            while (await receive()).get("more_body"):
                pass
            await send({"type": "http.response.start", "status": 200, "headers": []})
            message = {"type": "http.response.body", "body": CHUNK, "more_body": True}
        while True:
            for _ in range(self._lanes):
                await send(message)
            self.num_events += self._lanes
            await asyncio.sleep(0)


def main() -> None:
    """Serve until standard input ends."""
    from streamer.cli.loop import new_runner

    order = msgspec.json.decode(sys.argv[1], type=Order)
    raise_file_limit()
    pin(order.core)
    with new_runner() as runner:
        runner.run(_serve(order))


async def _serve(order: Order) -> None:
    app = App(TRANSPORTS[order.transport])
    config = uvicorn.Config(
        app, port=0, ws_per_message_deflate=False, lifespan="off", log_config=None, access_log=False
    )
    await Server(config, app).serve()


class Server(uvicorn.Server):
    """uvicorn's server, which tells its port and answers "mark"."""

    def __init__(self, config: uvicorn.Config, app: App) -> None:
        super().__init__(config)
        self._app = app
        self._loop_thread = time.pthread_getcpuclockid(threading.get_ident())

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        threading.Thread(target=self._answer, daemon=True).start()
        tell(Ready(self.servers[0].sockets[0].getsockname()[1]))

    def _answer(self) -> None:
        for _ in sys.stdin:
            at, loop_cpu_s = time.perf_counter(), time.clock_gettime(self._loop_thread)
            num_events = self._app.num_events
            tell(Mark(at, loop_cpu_s, time.process_time(), 0, 0, num_events, is_steady=True))
        self.force_exit = self.should_exit = True


if __name__ == "__main__":
    main()
