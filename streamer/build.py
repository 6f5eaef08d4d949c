"""build: the only place where rooms are wired together.

Finds the model that a Config names and returns its loaders, for AsyncEngine.from_config. Imported
lazily, and imports every room inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from streamer.config import Config
    from streamer.engine.core import ModelInfo, Runner, Tokenizer

DEMO_NAME = "streamer-demo"
# Weights are fetched as safetensors only: nothing is unpickled and no code runs.
HUB_TEXTS = ("*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "spiece.model")


LoadRunner: TypeAlias = "Callable[[], tuple[Runner, ModelInfo]]"
LoadTokenizer: TypeAlias = "Callable[[], Tokenizer]"


def loaders(config: Config) -> tuple[LoadRunner, LoadTokenizer]:
    """Functions that load a Config's runner and tokenizer; this call loads and fetches nothing."""
    from streamer.fake.model import is_fake

    if is_fake(config.model):
        return _fake_loaders(config)

    # Runner and tokenizer share the folder, so that a hub id is fetched once.
    found: list[Path] = []

    def folder() -> Path:
        if not found:
            from streamer.model.checkpoint import open_checkpoint

            path = resolve_model(config)
            open_checkpoint(path)  # reads only headers; refuses an incomplete folder
            found.append(path)
        return found[0]

    def load() -> tuple[Runner, ModelInfo]:
        from streamer.model.runner.load import load_runner

        return load_runner(_with_folder(config, folder()))

    def load_tokenizer() -> Tokenizer:
        from streamer.tokenizer.tokenizer import Tokenizer as FolderTokenizer

        return FolderTokenizer.from_folder(folder(), config.chat_template)

    return load, load_tokenizer


def _fake_loaders(config: Config) -> tuple[LoadRunner, LoadTokenizer]:
    from streamer.fake.model import load_fake, parse_name
    from streamer.fake.tokenizer import load_fake_tokenizer
    from streamer.tokenizer.tokenizer import read_template

    options = parse_name(config.model or "fake")  # a bad name is refused at once

    def load_tokenizer() -> Tokenizer:
        given = config.chat_template
        return load_fake_tokenizer(read_template(given) if given is not None else None)

    return lambda: load_fake(config, options), load_tokenizer


def resolve_model(config: Config) -> Path:
    """The checkpoint folder of a Config: the bundled one, a path, or a hub id, fetched.

    Raises ConfigError if there is no such model.
    """
    from streamer.errors import ConfigError
    from streamer.fake.model import is_fake

    if is_fake(config.model):
        raise ConfigError("the fake model has no checkpoint", param="model")
    if config.model is None:
        from streamer.demo import CHECKPOINT

        if not CHECKPOINT.is_dir():
            raise ConfigError(f"the bundled model is not there: {CHECKPOINT}", param="model")
        return CHECKPOINT
    path = Path(config.model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(
            f"{config.model} is a file; a model is a folder with config.json, model.safetensors "
            "and tokenizer.json, or a hub id",
            param="model",
        )
    if _looks_like_path(config.model):
        raise ConfigError(f"there is no folder {config.model}", param="model")
    return _fetch(config)


def _looks_like_path(model: str) -> bool:
    """A hub id is `name` or `owner/name`."""
    return model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model


def _fetch(config: Config) -> Path:
    """A hub id's files, from the cache or the hub; progress bars if wanted, on a terminal.

    Texts come first: a model that can't be served is refused before its weights are fetched, and
    only weights that will be read are fetched.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars
    from rich.console import Console

    from streamer.errors import ConfigError
    from streamer.model.checkpoint import read_config, wanted_weights
    from streamer.model.inspect import check_config

    model = config.model or ""
    is_seen = config.load_progress and Console(stderr=True).is_terminal
    (enable_progress_bars if is_seen else disable_progress_bars)()

    def fetch(names: Iterable[str]) -> Path:
        return Path(snapshot_download(model, revision=config.revision, allow_patterns=list(names)))

    try:
        folder = fetch(HUB_TEXTS)
        check_config(read_config(folder))
        return fetch((*HUB_TEXTS, *wanted_weights(folder)))
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as e:
        raise ConfigError(
            f"{model} is not a folder here, and the hub did not provide it: {e}", param="model"
        ) from e


def _with_folder(config: Config, folder: Path) -> Config:
    """The Config of that folder, under the name that clients will see."""
    from msgspec.structs import replace

    name = config.served_model_name or config.model or DEMO_NAME
    if Path(name).expanduser().is_dir():
        name = folder.resolve().name
    return replace(config, model=str(folder), served_model_name=name)
