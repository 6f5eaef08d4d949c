"""What can be seen of the Ray part without Ray; tests/ray has the rest."""

from __future__ import annotations

import sys

import pytest

from streamer.config import Config
from streamer.errors import ConfigError
from streamer.replicas.application import config_of
from streamer.replicas.launch import RayCluster


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
