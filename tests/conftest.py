"""What every test shares: an environment without settings, offline, and hypothesis' profiles."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# No test may reach a model hub; set before anything imports huggingface_hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# Time limits of single examples measure the machine's load, not the code.
settings.register_profile("suite", deadline=None, print_blob=True)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's STREAMER_ variables must not change what a test sees."""
    for name in [name for name in os.environ if name.startswith("STREAMER_")]:
        monkeypatch.delenv(name)
