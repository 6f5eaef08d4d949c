"""Requests to a server over a GGUF file start from the sampling defaults that its author wrote.

The list of models and a session's first event have them, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import httpx
import pytest

from tests.model.gguf.test_engine import demo
from tests.model.gguf_files import add_tokenizer, write_gguf
from tests.server.responses.test_socket import dial, receive
from tests.server.support.calls import KINDS, Asker
from tests.server.support.greedy import STORY
from tests.server.support.running import BUNDLED


def test_the_files_defaults_are_taken_unless_a_request_names_its_own(
    tmp_path: Path, server_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a temperature of 2 the file's top_k of 1 makes every draw the best token."""
    folder = demo(tmp_path / "m")

    def add(writer: gguf.GGUFWriter) -> None:
        add_tokenizer(writer, folder)
        writer.add_float32("general.sampling.temp", 2.0)
        writer.add_int32("general.sampling.top_k", 1)

    file = write_gguf(folder, tmp_path / "m.gguf", add=add)
    server = server_with(**{**BUNDLED, "model": str(file)})
    (model,) = httpx.get(server.url + "/v1/models").json()["data"]
    told = {"temperature": 2.0, "top_p": 1.0, "top_k": 1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert model["sampling_defaults"] == told
    assert httpx.get(f"{server.url}/v1/models/{model['id']}").json() == model
    with dial(server, "streamer.v1.json") as socket:
        assert receive(socket)["sampling_defaults"] == told
    asker = Asker(server, monkeypatch)
    for kind in KINDS:
        best = asker.ask(kind, STORY, 24, temperature=0).text
        plain = asker.ask(kind, STORY, 24, seed=1)
        assert (plain.request.params.temperature, plain.request.params.top_k) == (2.0, 1)
        assert plain.text == best
        own = asker.ask(kind, STORY, 24, seed=1, top_k=50)
        assert (own.request.params.temperature, own.request.params.top_k) == (2.0, 50)
        assert own.text != best
