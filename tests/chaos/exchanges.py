"""One exchange on a socket, and what is wrong with how it ended.

A whole request is owed a whole answer and the end of the connection. What may not be whole is
followed by half a close: the server may have waited for the rest until then, and has to end now.
"""

from __future__ import annotations

import contextlib
import io
import socket
import time
from http.client import HTTPException, HTTPResponse

from websockets.exceptions import ProtocolError
from websockets.frames import Frame
from websockets.streams import StreamReader

LIMIT_S = 60.0  # on a machine that does other work too
HEAD_END = b"\r\n\r\n"


class _Read:
    """Bytes, where http.client wants a socket."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def answer(
    address: tuple[str, int], parts: tuple[bytes, ...], *, is_whole: bool, limit_s: float = LIMIT_S
) -> bytes:
    """Send the parts, each after the head of an answer to the one before it; all that came.

    TimeoutError where the connection has not ended within the limit.
    """
    end, came = time.monotonic() + limit_s, b""

    def left_s() -> float:
        if (left := end - time.monotonic()) <= 0:
            raise TimeoutError
        return left

    with socket.create_connection(address, limit_s) as client:
        try:
            for i, part in enumerate(parts):
                while i and HEAD_END not in came:
                    client.settimeout(left_s())
                    if not (more := client.recv(1 << 16)):
                        return came
                    came += more
                client.settimeout(left_s())
                with contextlib.suppress(ConnectionError):  # it was refused before it was read
                    client.sendall(part)
            if not is_whole:
                with contextlib.suppress(OSError):  # it has ended already
                    client.shutdown(socket.SHUT_WR)
            while True:
                client.settimeout(left_s())
                if not (more := client.recv(1 << 16)):
                    return came
                came += more
        except ConnectionError:  # reset: a close with something unread
            return came
        except TimeoutError:
            raise TimeoutError(f"no end within {limit_s:g} s, after {came[:200]!r}") from None


def fault(came: bytes, *, is_owed: bool) -> str:
    """What is wrong with an answer that has ended, or ""; `is_owed`: it had to come as a whole."""
    if not came:
        return "no answer" if is_owed else ""
    if not came.startswith(b"HTTP/1.1 "):
        return "no HTTP"
    if came.startswith(b"HTTP/1.1 101 "):
        return _fault_of_frames(came.partition(HEAD_END)[2])
    try:
        response = HTTPResponse(_Read(came), method="POST")  # type: ignore[arg-type]
        response.begin()
        response.read()
    except HTTPException as e:
        return f"an answer that is not whole: {e!r}" if is_owed else ""
    return ""


def _fault_of_frames(data: bytes) -> str:
    """What is wrong with frames of a server (RFC 6455, 5.2), as the package reads them."""
    reader = StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    while reader.buffer:
        try:
            list(Frame.parse(reader.read_exact, mask=False))
        except EOFError:
            return "a frame that is cut"
        except ProtocolError as e:
            return f"a frame that is none: {e}"
    return ""
