"""What can be seen of the Ray part without Ray; tests/ray has the rest."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from streamer.config import Config
from streamer.engine.journal.store import Store
from streamer.errors import ConfigError, JournalInUse
from streamer.replicas import under_ray
from streamer.replicas.application import config_of
from streamer.replicas.launch import RayCluster
from streamer.replicas.replica import ReplicaServer


def test_without_ray_replicas_are_refused_with_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"streamer-llm\[ray\]") as refused:
        RayCluster(Config(model="fake", replicas=2))
    assert refused.value.param == "replicas"


def test_arguments_of_an_application_are_settings_over_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STREAMER_API_KEY", "one,two")
    monkeypatch.setenv("STREAMER_MAX_NUM_SEQS", "3")
    given = {"model": "fake", "max_num_seqs": 8, "log_prompts": True, "allowed_hosts": ["a", "b"]}
    config = config_of({**given, "speculative_config": {"method": "none"}, "replicas": "2"})
    assert (config.model, config.max_num_seqs, config.replicas) == ("fake", 8, 2)
    assert config.api_key == ("one", "two")
    assert config.allowed_hosts == ("a", "b")
    assert config.log_prompts
    with pytest.raises(ConfigError, match="max_num_sequences is not a setting"):
        config_of({"max_num_sequences": 8})


async def test_a_replica_waits_for_the_journal_of_a_process_that_is_being_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(under_ray, "RENEW_S", 0.01)
    config = Config(model="fake", journal=str(tmp_path), load_progress=False)
    tried = asyncio.Event()

    def make() -> ReplicaServer:
        tried.set()
        return ReplicaServer(config, name="r0", secret=b"0123456789abcdef")

    held = Store(tmp_path / "r0")
    with pytest.raises(JournalInUse):
        await under_ray.start_when_free(make, 0.0)
    tried.clear()
    starting = asyncio.create_task(under_ray.start_when_free(make, 60.0))
    await tried.wait()
    held.close()
    async with asyncio.timeout(20.0):
        server = await starting
    assert server.address
    await server.aclose()
