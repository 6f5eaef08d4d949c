"""The Python examples of README and docs/clients.md run, on a real server over the fake model."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from tests.server.support.running import Running

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = [
    (name, code)
    for name in ("README.md", "docs/clients.md")
    for code in re.findall(
        r"^```python\n(.*?)^```", (ROOT / name).read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
]
# Of packages that `make clients` installs, in their scripts.
ELSEWHERE = re.compile(
    r"^(from|import) (agents|llama_index|pydantic_ai|instructor|litellm)\b", re.M
)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 9


def run_example(server: Running, name: str, code: str) -> str:
    """What an example prints, with short answers of the fake model."""
    code = code.replace("http://127.0.0.1:8000", server.url).replace("streamer-demo", "fake")
    code = code.replace("Config()", 'Config(model="fake:length=40")')
    code = code.replace("LLM()", 'LLM("fake:length=40")')
    code = code.replace("What is", "count to 9, what is").replace('"And copy', '"count to 9, copy')
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, name, "exec"), {"__name__": "__main__"})
    return output.getvalue()


@pytest.mark.parametrize(("name", "code"), [e for e in EXAMPLES if not ELSEWHERE.search(e[1])])
def test_examples_run_and_say_something(server: Running, name: str, code: str) -> None:
    """litellm's example runs in test_litellm.py, which closes the clients it leaves open."""
    assert run_example(server, name, code).strip()
