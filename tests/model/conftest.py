"""Checkpoints are made once a session: `checkpoint("llama", 1, tie_word_embeddings=True)`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.checkpoints import make_checkpoint, reference_model

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

CheckpointFactory = Callable[..., Path]
ReferenceFactory = Callable[[Path], Any]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny models: one thread is faster, and results do not depend on the machine's cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFactory:
    """make_checkpoint, remembered by its arguments; the folder is shared, do not change it."""
    made: dict[str, Path] = {}

    def get(family: str, seed: int = 0, **overrides: Any) -> Path:
        key = repr((family, seed, sorted(overrides.items(), key=str)))
        if key not in made:
            folder = tmp_path_factory.mktemp(family, numbered=True)
            made[key] = make_checkpoint(folder, family, seed, **overrides)
        return made[key]

    return get


@pytest.fixture(scope="session")
def reference() -> ReferenceFactory:
    """transformers' model of a checkpoint, in fp32, loaded once."""
    loaded: dict[Path, Any] = {}

    def get(folder: Path) -> Any:
        if folder not in loaded:
            loaded[folder] = reference_model(folder)
        return loaded[folder]

    return get
