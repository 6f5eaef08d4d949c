"""The frames: those that websockets would write."""

from __future__ import annotations

import pytest
from websockets.frames import Frame, Opcode

from streamer.server.websocket_protocol import BINARY, TEXT, frame


@pytest.mark.parametrize("length", [0, 1, 125, 126, 127, 65_535, 65_536, 70_000])
@pytest.mark.parametrize(("kind", "opcode"), [(TEXT, Opcode.TEXT), (BINARY, Opcode.BINARY)])
def test_frames_are_those_of_websockets(kind: bytes, opcode: Opcode, length: int) -> None:
    data = bytes(length)
    assert frame(kind, data) == Frame(opcode, data).serialize(mask=False)
