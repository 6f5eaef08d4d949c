"""docs/clients.md and the table of clients agree; those that are installed here run.

`make clients` runs all of them, each in an environment of its own; here run the light ones: those
whose packages the other tests need as well.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.clients.unchanged.running import Served, run
from tests.clients.unchanged.table import CLIENTS, HERE, PAGE, Client, configuration, configured
from tests.server.support.running import BUNDLED, Running


def is_here(client: Client) -> bool:
    """Whether this environment has all of its packages."""
    try:
        for package in client.packages:
            importlib.metadata.version(package.partition("==")[0].partition("[")[0])
    except importlib.metadata.PackageNotFoundError:
        return False
    return not client.is_js


LIGHT = [client for client in CLIENTS if is_here(client)]


@pytest.fixture(scope="module")
def calling() -> Iterator[Running]:
    """The bundled model, which calls where it must."""
    running = Running(**BUNDLED, tool_call_parser="hermes").start()
    yield running
    running.stop()


def test_the_pages_rows_are_the_tables() -> None:
    rows = re.findall(r"^\| \[(.*?)\]\(#(.*?)\) \| (\S+) \| (.*?) \|$", PAGE.read_text(), re.M)
    assert [(name, version) for name, _, version, _ in rows] == [
        (client.heading, client.version) for client in CLIENTS
    ]
    for name, anchor, *_ in rows:
        assert anchor == name.lower().replace("'", "").replace(" ", "-")


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_client_has_a_script_and_a_configuration(client: Client) -> None:
    assert (HERE / "scripts" / client.script).exists()
    assert (HERE / "scripts" / client.answers).exists()
    _, text = configured(client, "http://127.0.0.1:9", "served")
    assert "http://127.0.0.1:9" in text
    assert "served" in text or "Ollama" in text or client.name in ("anthropic-js", "instructor")
    assert "8000" not in text
    assert configuration(client)[1] != text


def test_every_script_is_a_clients() -> None:
    used = {name for client in CLIENTS for name in (client.script, client.answers)}
    assert {file.name for file in (HERE / "scripts").iterdir() if file.is_file()} == used


@pytest.mark.parametrize("client", LIGHT, ids=lambda client: client.name)
def test_a_light_client_runs(
    client: Client, calling: Running, server_with: Callable[..., Running]
) -> None:
    answers = str(HERE / "scripts" / client.answers)
    fake = server_with(model="fake:length=40", served_model_name="fake", script=answers)
    served = [Served(fake.url, "fake"), Served(calling.url, "streamer-demo")]
    ran = run(client, *served)
    assert ran.code == 0, ran.printed


def test_the_light_clients_are_these() -> None:
    assert [client.name for client in LIGHT] == ["openai", "anthropic", "litellm", "ollama"]


def test_what_a_script_can_not_do_is_its_failure(tmp_path: Any) -> None:
    """A server that is not there: the script's own error is what it printed."""
    served = Served("http://127.0.0.1:9", "fake")
    ran = run(next(client for client in LIGHT if client.name == "ollama"), served, served)
    assert ran.code == 1
    assert "Error" in ran.printed
