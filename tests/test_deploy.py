"""The files of docs/deploy: settings, import paths and structure that others will rely on."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamer.config import load_config
from streamer.replicas.scaling import ByLoad

DEPLOY = Path(__file__).resolve().parent.parent / "docs" / "deploy"
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
    assert all((DEPLOY.parent.parent / source).exists() for source in sources)
    declared = {line.split()[1].partition("=")[0] for line in lines if line.startswith("ARG")}
    assert set(re.findall(r"\$\{(\w+)\}", text)) == declared
