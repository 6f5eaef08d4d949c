"""Requests to a server over a GGUF file start from the sampling defaults that its author wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from tests.model.gguf.test_engine import demo
from tests.model.gguf_files import add_tokenizer, write_gguf
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
    asker = Asker(server_with(**{**BUNDLED, "model": str(file)}), monkeypatch)
    for kind in KINDS:
        best = asker.ask(kind, STORY, 24, temperature=0).text
        plain = asker.ask(kind, STORY, 24, seed=1)
        assert (plain.request.params.temperature, plain.request.params.top_k) == (2.0, 1)
        assert plain.text == best
        own = asker.ask(kind, STORY, 24, seed=1, top_k=50)
        assert (own.request.params.temperature, own.request.params.top_k) == (2.0, 50)
        assert own.text != best
