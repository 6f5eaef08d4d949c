"""The files of docs/deploy: settings, import paths and structure that others will rely on."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamer.cli import COMMANDS
from streamer.cli.commands import load
from streamer.config import load_config
from streamer.replicas.scaling import ByLoad
from streamer.server.app import PROBES

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "docs" / "deploy"
SERVE, SERVICE = "serve.yaml", "rayservice.yaml"


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def application(name: str) -> Any:
    found = read(name)
    found = yaml.safe_load(found["spec"]["serveConfigV2"]) if name == SERVICE else found
    (only,) = found["applications"]
    return only


@pytest.mark.parametrize("name", [SERVE, SERVICE])
def test_an_application_has_settings_deployments_and_a_policy_that_exist(name: str) -> None:
    app = application(name)
    module, _, attribute = app["import_path"].partition(":")
    assert callable(getattr(importlib.import_module(module), attribute))
    given = {k: v if isinstance(v, bool | list) else str(v) for k, v in app["args"].items()}
    load_config(given, {})
    assert [each["name"] for each in app["deployments"]] == ["Ingress", "Replica"]
    policy = app["deployments"][1]["autoscaling_config"]["policy"]
    module, _, attribute = policy["policy_function"].partition(":")
    assert getattr(importlib.import_module(module), attribute) is ByLoad
    ByLoad(**policy.get("policy_kwargs", {}))


def test_the_service_has_one_kind_of_pod_with_the_resources_of_a_replica() -> None:
    cluster = read(SERVICE)["spec"]["rayClusterConfig"]
    (group,) = cluster["workerGroupSpecs"]
    groups = [cluster["headGroupSpec"], group]
    pods = [each["template"]["spec"]["containers"] for each in groups]
    assert all(len(pod) == 1 for pod in pods)
    for (container,) in pods:
        limits = container["resources"]["limits"]
        assert limits == container["resources"]["requests"]
        assert "STREAMER_API_KEY" in [each["name"] for each in container["env"]]
    replica = application(SERVICE)["deployments"][1]
    scaling = replica["autoscaling_config"]
    assert (
        int(pods[1][0]["resources"]["limits"]["nvidia.com/gpu"])
        >= (replica["ray_actor_options"]["num_gpus"])
    )
    assert group["maxReplicas"] >= scaling["max_replicas"]


def test_every_line_of_the_dockerfile_is_an_instruction_whose_files_exist() -> None:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    known = r"(ARG|FROM|RUN|COPY|USER|ENV|EXPOSE|STOPSIGNAL|HEALTHCHECK|CMD) "
    assert all(re.match(known, line) for line in lines)
    sources = [line.split()[1] for line in lines if line.startswith("COPY")]
    assert all((ROOT / source).exists() for source in sources)
    declared = {line.split()[1].partition("=")[0] for line in lines if line.startswith("ARG")}
    assert set(re.findall(r"\$\{(\w+)\}", text)) == declared


def test_what_the_dockerfile_names_exists() -> None:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extra,) = re.findall(r"'\.\[(\w+)\]'", text)
    assert extra in project["optional-dependencies"]
    (torch,) = re.findall(r"^ARG TORCH=(\S+)$", text, re.MULTILINE)
    assert f"TORCH := {torch}\n" in (ROOT / "Makefile").read_text()
    assert (ROOT / re.findall(r"python (web/\w+\.py)", text)[0]).is_file()
    program, name, *flags = json.loads(re.findall(r"^CMD (.*)$", text, re.MULTILINE)[0])
    assert program in project["scripts"]
    parser = argparse.ArgumentParser()
    load(COMMANDS[name]).add_arguments(parser)
    assert parser.parse_args(flags).config_host == "0.0.0.0"
    ((port, path),) = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", text)
    assert f"EXPOSE {port}\n" in text
    assert load_config({}, {}).port == int(port)
    assert path in PROBES
