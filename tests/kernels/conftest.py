"""The backends that every test of the ops runs on."""

from __future__ import annotations

import pytest

from streamer.kernels import ops, reference


@pytest.fixture(params=["torch", "native"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The ops' backend for this test."""
    name: str = request.param
    if name == "native":
        if ops.why_not_native:
            pytest.fail(f"the native kernels do not compile here: {ops.why_not_native}")
        from streamer.kernels.cpu import native

        monkeypatch.setattr(ops, "_backend", native)
    else:
        monkeypatch.setattr(ops, "_backend", reference)
    return name
