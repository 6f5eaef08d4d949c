"""build: the only place where rooms are wired together.

Finds the model that a Config names and returns its loaders, for AsyncEngine.from_config. Imported
lazily, and imports every room inside functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache
from glob import escape
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from streamer.config import Config
    from streamer.constraints.grammars import Grammars
    from streamer.engine.core import ModelInfo, Owner, Runner, Tokenizer
    from streamer.tokenizer.tokenizer import Tokenizer as FolderTokenizer

DEMO_NAME = "streamer-demo"
# Weights are fetched as safetensors or GGUF only: nothing is unpickled and no code runs.
HUB_TEXTS = ("*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "spiece.model")
PEEK_BYTES = 1 << 16


LoadRunner: TypeAlias = "Callable[[Owner], tuple[Runner, ModelInfo]]"
LoadTokenizer: TypeAlias = "Callable[[], Tokenizer]"


def loaders(config: Config) -> tuple[LoadRunner, LoadTokenizer]:
    """Functions that load a Config's runner and tokenizer; this call loads and fetches nothing."""
    from streamer.errors import ConfigError
    from streamer.fake.model import is_fake

    if is_fake(config.model):
        return _fake_loaders(config)

    if config.node_rank:
        raise ConfigError(f"node_rank {config.node_rank}: only serve has it", param="node_rank")

    # Runner and tokenizer share the folder, so that a hub id is fetched once.
    @cache
    def folder() -> Path:
        return _checkpoint(config)

    def load(owner: Owner) -> tuple[Runner, ModelInfo]:
        from streamer.model.runner.load import load_runner

        found = _with_draft(_with_folder(config, folder()), folder())
        if config.tensor_parallel_size == 1:
            return load_runner(found, go_on=owner.check_stop)
        from streamer.model.ranks.runner import load_ranked

        return load_ranked(found, owner.check_stop, owner.fail)

    def load_tokenizer() -> Tokenizer:
        return read_tokenizer(folder(), config.chat_template)

    return load, load_tokenizer


def _checkpoint(config: Config) -> Path:
    from streamer.model.checkpoint import open_checkpoint

    path = resolve_model(config)
    open_checkpoint(path)  # reads only headers; refuses an incomplete folder
    return path


def run_node(config: Config) -> int:
    """Compute for the server of another host, `node_rank` above 0; the process's exit code."""
    from streamer.errors import ConfigError
    from streamer.fake.model import is_fake
    from streamer.model.ranks.node import serve

    if is_fake(config.model):
        raise ConfigError("node_rank: the fake model has no ranks", param="node_rank")
    folder = _checkpoint(config)
    return serve(_with_draft(_with_folder(config, folder), folder))


def run_rank() -> int:
    """Be one of the processes that compute a model together, which the first one has started."""
    from streamer.engine.requests import grammars_of, with_end
    from streamer.model.ranks.worker import main

    def make_grammars(config: Config, info: ModelInfo) -> Grammars:
        tokenizer = read_tokenizer(Path(config.model or ""))
        return grammars_of(tokenizer, with_end(info, tokenizer.eos_token_id))

    return main(make_grammars)


def read_tokenizer(model: Path, chat_template: str | None = None) -> FolderTokenizer:
    """The tokenizer of a checkpoint folder or a GGUF file; `chat_template`: a file, instead."""
    from streamer.tokenizer import gguf
    from streamer.tokenizer.tokenizer import Tokenizer as FolderTokenizer

    if model.is_dir():
        return FolderTokenizer.from_folder(model, chat_template)
    from streamer.model.gguf.header import read_header

    return gguf.from_metadata(read_header(model, gguf.ARRAYS).metadata, chat_template)


def _fake_loaders(config: Config) -> tuple[LoadRunner, LoadTokenizer]:
    from streamer.errors import ConfigError
    from streamer.fake.model import load_fake, parse_name
    from streamer.fake.tokenizer import TOOL_TEMPLATE, load_fake_tokenizer
    from streamer.tokenizer.tokenizer import read_template

    if config.draft_model is not None:
        raise ConfigError("speculative_model: the fake model has none", param="speculative_model")
    options = parse_name(config.model or "fake")  # a bad name is refused at once

    def load_tokenizer() -> Tokenizer:
        if config.chat_template is not None:
            return load_fake_tokenizer(read_template(config.chat_template))
        return load_fake_tokenizer(None if config.script is None else TOOL_TEMPLATE)

    return lambda _: load_fake(config, options), load_tokenizer


def resolve_model(config: Config) -> Path:
    """The checkpoint of a Config: the bundled folder, a path, or a hub id, fetched.

    A folder, or a GGUF file; `owner/name:Q4_K_M` and `folder:Q4_K_M` are the file of that
    quantization.

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
    if path := _local(config.model):
        return path  # what a file is, open_checkpoint says
    if _looks_like_path(config.model):
        raise ConfigError(f"there is no folder or file {config.model}", param="model")
    return _fetch(config)


def _local(model: str) -> Path | None:
    """The folder or file here that a model's name means, if any; ConfigError: no such GGUF file."""
    from streamer.model.gguf.names import choose_file

    path = _expanded(model)
    if path.exists():
        return path
    name, _, quantization = model.rpartition(":")
    folder = _expanded(name)
    if not name or not quantization or not folder.is_dir():
        return None
    found = [file for file in folder.rglob("*.gguf") if file.is_file()]
    files = [file.relative_to(folder).as_posix() for file in found]
    return folder / choose_file(files, name, quantization)


def _expanded(name: str) -> Path:
    """The path; "~" is this user's home, and stays where there is none of that name."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def _looks_like_path(model: str) -> bool:
    """A hub id is `name` or `owner/name`, and a quantization or a file's name after a colon."""
    name = model.partition(":")[0]
    return (
        model.startswith((".", "/", "~"))
        or "\\" in model
        or re.match(r"[A-Za-z]:/", model) is not None
        or name.count("/") > 1
        or name.endswith(".gguf")
    )


def _fetch(config: Config) -> Path:
    """A hub id's files, from the cache or the hub; progress bars if requested, on a terminal."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars
    from rich.console import Console

    from streamer.errors import ConfigError

    model = config.model or ""
    is_seen = config.load_progress and Console(stderr=True).is_terminal
    (enable_progress_bars if is_seen else disable_progress_bars)()
    name, _, quantization = model.partition(":")
    try:
        if quantization:
            return _fetch_gguf(name, config.revision, quantization)
        return _fetch_folder(name, config.revision)
    except (HFValidationError, OSError) as e:  # the hub's other errors are OSErrors
        why = _why_not_fetched(e)
        if "/" not in name:
            why += "; a hub id is OWNER/NAME, such as Qwen/Qwen3-0.6B"
        raise ConfigError(
            f"{model} is no folder or file here, and the hub did not provide it: {why}",
            param="model",
        ) from e


def _why_not_fetched(error: Exception) -> str:
    """Why the hub did not provide a model: huggingface's advice is for callers of its functions."""
    from huggingface_hub import constants, errors

    match error:
        case errors.LocalEntryNotFoundError() if constants.HF_HUB_OFFLINE:
            return "HF_HUB_OFFLINE is set, and it is not in the cache"
        case errors.LocalEntryNotFoundError():
            return "it can't be reached, and the model is not in its cache"
        case errors.GatedRepoError():
            return "it asks for a token (HF_TOKEN) of someone who accepted the model's terms there"
        case errors.RepositoryNotFoundError():
            return "it has none of this name, or none without a token (HF_TOKEN) that may read it"
        case errors.RevisionNotFoundError():
            return "it has no such revision of it"
        case _:
            return str(error).strip().partition("\n")[0].rstrip(".")


def _fetch_folder(model: str, revision: str | None) -> Path:
    """Texts come first: a model that can't be served is refused before its weights are fetched, and
    only weights that will be read are fetched.
    """
    from huggingface_hub import snapshot_download

    from streamer.model.checkpoint import read_config, weight_files
    from streamer.model.inspect import check_config

    def fetch(names: Iterable[str]) -> Path:
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(names)))

    folder = fetch(HUB_TEXTS)
    if not (folder / "config.json").is_file():
        _refuse_gguf(model, revision)
    check_config(read_config(folder))
    weights = weight_files(folder)
    folder = fetch((*HUB_TEXTS, *weights))
    if not any((folder / name).is_file() for name in weights):
        _refuse_gguf(model, revision)
    return folder  # what else it lacks, open_checkpoint says


def _refuse_gguf(model: str, revision: str | None) -> None:
    """ConfigError for a repository that has GGUF files: one has to be named."""
    from streamer.errors import ConfigError
    from streamer.model.gguf.names import models_of

    if files := models_of(_gguf_files(model, revision)):
        raise ConfigError(
            f"{model} has no weights in safetensors, but GGUF files; name one or its "
            f"quantization, such as {model}:{files[0]}: {', '.join(files)[:2000]}",
            param="model",
        )


def _fetch_gguf(model: str, revision: str | None, quantization: str) -> Path:
    """The one GGUF file of that quantization; of a split one all files, and the first's path.

    An architecture that can't be served is refused by the file's first bytes.
    """
    from huggingface_hub import snapshot_download

    from streamer.model.gguf.config import architecture_of
    from streamer.model.gguf.header import peek
    from streamer.model.gguf.names import choose_file, files_of

    listed = _gguf_files(model, revision)
    chosen = choose_file(listed, model, quantization)
    patterns = [escape(name) for name in files_of(chosen, listed, model)]
    if known := peek(_first_bytes(f"{model}/{chosen}", revision)):
        architecture_of(known)
    folder = snapshot_download(model, revision=revision, allow_patterns=patterns)
    return Path(folder, chosen)


def _gguf_files(model: str, revision: str | None) -> list[str]:
    """Names of a repository's files; if the hub is out of reach, of GGUF files in the cache."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        siblings = HfApi().model_info(model, revision=revision).siblings
    except (HfHubHTTPError, HFValidationError):
        raise
    except Exception:  # whatever its HTTP client raises
        folder = snapshot_download(
            model,
            revision=revision,
            local_files_only=True,
            allow_patterns=[],  # else a file that was not fetched is missed
        )
        cached = Path(folder)
        return [f.relative_to(cached).as_posix() for f in cached.rglob("*.gguf")]
    return [file.rfilename for file in siblings or ()]


def _first_bytes(file: str, revision: str | None) -> bytes:
    """The beginning of a file on the hub; nothing where that fails: the download says why."""
    from huggingface_hub import HfFileSystem

    try:
        with HfFileSystem().open(file, revision=revision, block_size=PEEK_BYTES) as f:
            return bytes(f.read(PEEK_BYTES))
    except Exception:
        return b""


def _with_draft(config: Config, model: Path) -> Config:
    """The Config with its draft model's folder or file; ConfigError if that has other tokens."""
    from msgspec.structs import replace

    from streamer.errors import ConfigError

    if config.draft_model is None:
        return config
    try:
        path = resolve_model(replace(config, model=config.draft_model, revision=None))
    except ConfigError as e:
        raise ConfigError(f"speculative_model: {e.message}", param="speculative_model") from e
    ours, theirs = read_tokenizer(model).token_bytes(), read_tokenizer(path).token_bytes()
    if ours != theirs:
        pairs = enumerate(zip_longest(ours, theirs))
        at, (one, other) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
        raise ConfigError(
            f"speculative_model: {path} has other tokens than {model}: token {at} is {other!r} "
            f"there, {one!r} here; a draft model needs the same tokenizer",
            param="speculative_model",
        )
    method = replace(config.speculative_config, method=config.speculation_method, model=None)
    return replace(config, speculative_model=str(path), speculative_config=method)


def _with_folder(config: Config, folder: Path) -> Config:
    """The Config of that folder or file, under the name that clients will see."""
    from msgspec.structs import replace

    from streamer.model.gguf.names import model_name

    name = config.served_model_name or config.model or DEMO_NAME
    if config.served_model_name is None and config.model is not None and _local(config.model):
        name = model_name(folder.resolve().name)
    return replace(config, model=str(folder), served_model_name=name)
