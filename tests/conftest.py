"""Shared by all tests: an environment without settings, offline, hypothesis' profiles, and the sums
that a run prints at its end.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Generator

import pytest
from hypothesis import settings

# No test may reach a model hub; set before anything imports huggingface_hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Without a GPU Triton's kernels run in its interpreter; read when triton is imported, which
# transformers does. With one they are compiled, and tests/gpu has them.
if not os.path.exists("/dev/nvidiactl"):
    os.environ["TRITON_INTERPRET"] = "1"
# Each of httpx' clients would read all authorities that certifi has, 20 ms; no test asks outside.
os.environ["SSL_CERT_DIR"] = os.path.dirname(__file__)
for name in ("COLUMNS", "LINES"):  # GNU readline, which pytest imports, gives its children these
    os.environ.pop(name, None)
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a newer one when imported

# Time limits of single examples measure the machine's load, not the code.
settings.register_profile("suite", deadline=None, print_blob=True)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's STREAMER_ variables must not change what a test sees."""
    for name in [name for name in os.environ if name.startswith("STREAMER_")]:
        monkeypatch.delenv(name)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Garbage collections leave out what the imports made: 2 million objects, a third of a second
    for each server, request or test that collects. While they are made, none is worth its time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else Triton's modules report leaks


@pytest.fixture(params=["torch", "native"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernels' backend for a test that uses this: each in turn."""
    from streamer.kernels import ops

    name: str = request.param
    if name == "torch":
        monkeypatch.setenv("STREAMER_KERNELS", "torch")
    elif why := ops.why_not_native():
        pytest.fail(f"the native kernels do not compile here: {why}")
    return name


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How often greedy parity rested on rounding (tests/model/greedy_oracle.py), also on a pass."""
    sums = Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if report.when == "call" and name.startswith("greedy_"):
                    sums[name] += value
    if sums:
        terminalreporter.write_line(
            f"greedy parity with transformers: {sums['greedy_tokens']} tokens; at "
            f"{sums['greedy_within_rounding']} its two best were within rounding, and at "
            f"{sums['greedy_second_best']} of those the second best was drawn"
        )
