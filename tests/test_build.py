"""build: which model a Config means, and what its engine is made of."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import httpx
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

import streamer.demo
from streamer.build import _with_folder, loaders, resolve_model
from streamer.config import Config
from streamer.engine.engine import AsyncEngine
from streamer.errors import ConfigError, ModelNotSupported
from streamer.model.checkpoint import open_checkpoint

DEADLINE_S = 30.0


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_model(Config(model=str(tmp_path))) == tmp_path


def test_no_model_is_the_bundled_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamer.demo, "CHECKPOINT", tmp_path)
    assert resolve_model(Config()) == tmp_path
    monkeypatch.setattr(streamer.demo, "CHECKPOINT", tmp_path / "gone")
    with pytest.raises(ConfigError, match="gone"):
        resolve_model(Config())


def test_a_file_is_a_gguf_or_refused_as_what_it_is(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"x")
    assert resolve_model(Config(model=str(file))) == file
    with pytest.raises(ModelNotSupported, match=r"model\.gguf is a file, and no GGUF; a model is"):
        open_checkpoint(file)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ModelNotSupported, match=r"model\.gguf is a pointer of Git LFS"):
        open_checkpoint(file)


@pytest.mark.parametrize(
    "model",
    [
        *("./nothing", "/nothing/here", "~/nothing", "a/b/c", "nope.gguf", "a/nope.gguf"),
        *("./a:Q4_0", "C:/models/x", "~no-such-user/x"),
    ],
)
def test_a_missing_path_is_never_searched_on_the_hub(model: str) -> None:
    with pytest.raises(ConfigError, match="there is no folder or file") as refusal:
        resolve_model(Config(model=model))
    assert refusal.value.param == "model"


def test_a_draft_model_needs_the_models_tokenizer(tmp_path: Path) -> None:
    """Refused before weights are read, by the first token that differs; and a path that is none."""
    model, draft = tmp_path / "model", tmp_path / "draft"
    for folder in (model, draft):
        shutil.copytree(streamer.demo.DRAFT, folder)
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    (first, one), (second, two) = [item for item in vocab.items() if 300 < item[1] < 303]
    vocab[first], vocab[second] = two, one
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    for path, says in ((draft, "token 301 is"), (tmp_path / "gone", "there is no folder")):
        load, _ = loaders(Config(model=str(model), speculative_model=str(path)))
        with pytest.raises(ConfigError, match=says) as refusal:
            load(lambda: None)
        assert refusal.value.param == "speculative_model"


def test_a_folder_has_the_file_of_a_quantization(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a repository has, and served by the file's name; it comes before the hub's of that id."""
    folder = tmp_path / "some" / "model"
    (folder / "sub").mkdir(parents=True)
    file = folder / "sub" / "x-Q4_0.gguf"
    file.touch()
    monkeypatch.chdir(tmp_path)
    for model in (f"{folder}:q4_0", "./some/model:Q4_0", "some/model:sub/x-Q4_0.gguf"):
        config = Config(model=model)
        found = resolve_model(config)
        assert found.resolve() == file
        assert _with_folder(config, found).served_model_name == "x-Q4_0"
    with pytest.raises(ConfigError, match=r"model has no Q8_0, but: sub/x-Q4_0\.gguf"):
        resolve_model(Config(model=f"{folder}:Q8_0"))


def test_a_served_name_may_be_a_folders_too(tmp_path: Path) -> None:
    name = str(tmp_path)
    found = _with_folder(Config(model=name, served_model_name=name), tmp_path)
    assert found.served_model_name == name


@pytest.mark.parametrize("model", ["absent/no-such-model", "absent/no-such-model:Q8_0"])
def test_a_hub_id_out_of_reach_is_a_clear_refusal(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests are offline: only the cache could have it."""
    with pytest.raises(ConfigError) as refusal:
        resolve_model(Config(model=model, load_progress=False))
    assert refusal.value.param == "model"
    assert refusal.value.message == (
        f"{model} is no folder or file here, and the hub did not provide it: "
        "HF_HUB_OFFLINE is set, and it is not in the cache"
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", _unreachable)
    with pytest.raises(ConfigError, match="it can't be reached, and the model is not in its cache"):
        resolve_model(Config(model="absent/no-such-model", load_progress=False))


def _unreachable(*_: object, **__: object) -> str:
    raise LocalEntryNotFoundError("Got: ConnectError.\nPlease check your internet connection")


@pytest.mark.parametrize("model", ["llama3", "llama3:8b"])
def test_ollamas_names_are_told_what_a_hub_id_is(model: str) -> None:
    with pytest.raises(ConfigError, match="; a hub id is OWNER/NAME, such as"):
        resolve_model(Config(model=model, load_progress=False))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (GatedRepoError, "accepted the model's terms"),
        (RepositoryNotFoundError, "it has none of this name"),
        (RevisionNotFoundError, "it has no such revision of it"),
        (HfHubHTTPError, "500 Server Error"),
    ],
)
def test_what_the_hub_answers_is_said_in_one_line(
    kind: type[HfHubHTTPError], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> str:
        response = httpx.Response(500, request=httpx.Request("GET", "http://hub"))
        raise kind("500 Server Error\n\nadvice", response=response)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ConfigError, match=says) as refusal:
        resolve_model(Config(model="some/model", load_progress=False))
    assert "advice" not in refusal.value.message


class Hub:
    """A hub with one repository of GGUF files, `start` being the first's first bytes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, start: bytes = b"") -> None:
        import huggingface_hub

        self.folder = folder
        self.start = start
        self.is_reached = True
        self.names = [f"x-Q4_K_M-0000{i}-of-00002.gguf" for i in (1, 2)]
        self.downloads: list[Any] = []
        for name in self.names:
            (folder / name).write_bytes(start)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: self)
        monkeypatch.setattr(huggingface_hub, "HfFileSystem", lambda: self)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.download)

    def model_info(self, model: str, revision: str | None) -> Any:
        if not self.is_reached:
            raise ConnectionError("no route")
        files = [*self.names, "x-Q8_0.gguf", "config.json"]
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=f) for f in files])

    def open(self, file: str, revision: str | None, block_size: int) -> io.BytesIO:
        if not self.is_reached:
            raise ConnectionError("no route")
        assert file == f"some/model/{self.names[0]}"
        return io.BytesIO(self.start)

    def download(self, model: str, **given: Any) -> str:
        self.downloads.append((model, given))
        return str(self.folder)


@pytest.mark.parametrize("is_reached", [True, False])
def test_the_file_of_a_quantization_is_fetched_or_found_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_reached: bool
) -> None:
    """Of a split model all files; nothing else of the repository."""
    hub = Hub(tmp_path, monkeypatch)
    hub.is_reached = is_reached
    found = resolve_model(Config(model="some/model:q4_k_m", revision="v1"))
    assert found == tmp_path / hub.names[0]
    wanted = ("some/model", {"revision": "v1", "allow_patterns": hub.names})
    cached = ("some/model", {"revision": "v1", "local_files_only": True, "allow_patterns": []})
    assert hub.downloads == ([wanted] if is_reached else [cached, wanted])
    with pytest.raises(ConfigError, match="some/model has no Q5_0, but: "):
        resolve_model(Config(model="some/model:Q5_0"))


def test_all_files_of_a_split_model_are_asked_for_by_name_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As patterns that mean these names alone; what is not listed is missed before a download."""
    hub = Hub(tmp_path, monkeypatch)
    hub.names = [f"[x]*-Q4_K_M-0000{i}-of-00002.gguf" for i in (1, 2)]
    resolve_model(Config(model="some/model:Q4_K_M"))
    ((_, given),) = hub.downloads
    patterns = given["allow_patterns"]
    assert [[fnmatch(n, p) for n in hub.names] for p in patterns] == [[True, False], [False, True]]
    assert not any(fnmatch("x and more-Q4_K_M-00001-of-00002.gguf", p) for p in patterns)

    hub.names = ["x-Q4_K_M-00001-of-00003.gguf", "x-Q4_K_M-00003-of-00003.gguf"]
    with pytest.raises(ConfigError, match=r"lacks 1 of 3 files: x-Q4_K_M-00002-of-00003\.gguf"):
        resolve_model(Config(model="some/model:Q4_K_M"))
    hub.names = ["x-Q4_K_M-00001-of-99999.gguf"]
    with pytest.raises(ModelNotSupported, match="at most 1000"):
        resolve_model(Config(model="some/model:Q4_K_M"))
    assert len(hub.downloads) == 1


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_an_architecture_is_refused_before_its_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """By the file's first bytes, which end somewhere in its metadata."""
    file = tmp_path / "start"
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_token_list(["some token"] * 1000)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    hub = Hub(tmp_path, monkeypatch, file.read_bytes()[:2000])
    if architecture == "llama":
        resolve_model(Config(model="some/model:Q4_K_M"))
        assert len(hub.downloads) == 1
        return
    with pytest.raises(ModelNotSupported, match="'gemma3' is not one of llama, qwen2, qwen3"):
        resolve_model(Config(model="some/model:Q4_K_M"))
    assert not hub.downloads


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}


@pytest.mark.parametrize(
    ("config", "is_served"),
    [(LLAMA, True), ({"architectures": ["NoSuchModel"], "model_type": "no_such"}, False)],
)
def test_only_texts_and_the_weights_that_will_be_read_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], is_served: bool
) -> None:
    """No weights at all where config.json can't be served."""
    import huggingface_hub

    asked: list[tuple[str, str | None]] = []
    given: set[str] = set()
    on_the_hub = {
        *("config.json", "tokenizer.json", "model.safetensors.index.json"),
        *("a.safetensors", "b.safetensors", "consolidated.safetensors", "original/x.safetensors"),
        *("pytorch_model.bin", "modeling.py", "weights.pt"),
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "a.safetensors").touch()

    def download(model: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((model, revision))
        given.update(n for n in on_the_hub if any(fnmatch(n, p) for p in allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    config = Config(model="some/model", revision="v1")
    if not is_served:
        with pytest.raises(ModelNotSupported, match="NoSuchModel"):
            resolve_model(config)
    else:
        assert resolve_model(config) == tmp_path
    assert set(asked) == {("some/model", "v1")}
    texts = {"config.json", "tokenizer.json", "model.safetensors.index.json"}
    assert given == (texts | {"a.safetensors", "b.safetensors"} if is_served else texts)


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snapshot of one file that huggingface's cache has of org/gguf, which has three."""
    commit = "0123456789abcdef" * 2 + "01234567"
    model = tmp_path / "models--org--gguf"
    snapshot = model / "snapshots" / commit
    for folder in (snapshot, model / "refs", model / "trees"):
        folder.mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    names = ("x-Q4_0.gguf", "x-Q4_K_M.gguf", "README.md")
    files = {name: {"size": 1, "blob_id": "0" * 40} for name in names}
    tree = {"format_version": 1, "files": files}
    (model / "trees" / f"{commit}.json").write_text(json.dumps(tree))
    (snapshot / names[0]).write_bytes(b"x")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return snapshot


def test_one_file_of_a_repository_is_found_again_without_the_hub(fetched: Path) -> None:
    """huggingface's own cache, which knows that others were not fetched."""
    assert resolve_model(Config(model="org/gguf:Q4_0")) == fetched / "x-Q4_0.gguf"
    with pytest.raises(ConfigError, match=r"org/gguf has no Q4_K_M, but: x-Q4_0\.gguf"):
        resolve_model(Config(model="org/gguf:Q4_K_M"))


@pytest.mark.parametrize("has_config", [False, True])
def test_a_repository_of_gguf_files_says_that_one_has_to_be_named(
    fetched: Path, has_config: bool
) -> None:
    if has_config:
        (fetched / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ConfigError, match=r"such as org/gguf:x-Q4_0\.gguf: x-Q4_0\.gguf$"):
        resolve_model(Config(model="org/gguf"))


def test_the_fake_model_has_no_folder() -> None:
    with pytest.raises(ConfigError, match="no checkpoint"):
        resolve_model(Config(model="fake:depth=1"))


@pytest.mark.parametrize("model", ["fake:speed=1", "fake:depth=2", "fake:tokens_per_s=x"])
def test_a_wrong_fake_is_refused_before_anything_starts(model: str) -> None:
    with pytest.raises(ConfigError, match="fake"):
        AsyncEngine.from_config(Config(model=model))


async def test_the_fakes_chat_template_can_be_replaced(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0].content }}!")
    config = Config(model="fake", chat_template=str(file))
    async with asyncio.timeout(DEADLINE_S), AsyncEngine.from_config(config) as engine:
        assert await engine.encode_chat([{"content": "hi"}]) == list(b"hi!")


def test_building_the_fake_imports_no_large_library() -> None:
    script = (
        "import sys; from streamer import AsyncEngine; from streamer.config import Config;"
        "AsyncEngine.from_config(Config(model='fake'));"
        "sys.exit(bool({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
