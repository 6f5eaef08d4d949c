"""/openapi.json: it describes the app's routes, and the answers schemathesis gets from them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route

from streamer.server import openapi
from streamer.server.app import build_service_app
from streamer.server.openapi import ROUTES
from streamer.server.page import FOLDER
from streamer.server.service import Service
from tests.server.support.running import Running

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
EXAMPLES = 30  # a route with a body; a third of them good, a third against its schema
GOOD = {
    "messages": [{"role": "user", "content": "hi"}],
    "prompt": "hi",
    "tokens": [104, 105],
    "input": "hi",
    "max_tokens": 5,
    "model": "fake",
}
ENOUGH = {
    "/tokenize": "prompt",
    "/v1/responses": "input",
    "/v1/responses/input_tokens": "input",
}  # these schemas require no field


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    """A context so small that no answer is long."""
    running = Running(max_model_len=64, num_gpu_blocks_override=64).start()
    yield running
    running.stop()


def tame(case: schemathesis.Case, answer_id: str, has_flags: bool) -> schemathesis.Case:
    """The case with valid values where random ones rarely are: bounded numbers, names, cursors.

    With its flags the case may be valid; without them it always is.
    """
    if "model" in case.path_parameters:
        case.path_parameters["model"] = "fake"
    if "name" in case.path_parameters:
        case.path_parameters["name"] = next((FOLDER / "assets").glob("*.js")).name
    if "id" in case.path_parameters:
        case.path_parameters["id"] = answer_id
        case.query = {"stream": "true"} if answer_id.startswith("chatcmpl") else {}
    if isinstance(case.body, dict):
        flags = {k: v for k, v in case.body.items() if isinstance(v, bool | None)}
        kept = flags if has_flags else {}
        named = set(GOOD) & set(case.body)
        if not has_flags and case.path in ENOUGH:
            named = {ENOUGH[case.path]}
        case.body = kept | {name: GOOD[name] for name in named} | {"stream_options": None}
    return case


def answer_for(small: Running, route: openapi.Route) -> str:
    """The id of an answer that a route by id finds."""
    kind = "chat/completions" if "chat" in route.path else "responses"
    body: dict[str, Any] = {"messages" if "chat" in route.path else "input": GOOD["messages"]}
    if route.path.endswith("/cancel"):
        body["background"] = True  # without it an answer that has ended can't be cancelled
    answer = httpx.post(f"{small.url}/v1/{kind}", json=body, timeout=20)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def test_every_route_of_the_app_is_described(server: Running) -> None:
    guard: Any = build_service_app(Service(server.engine, server.config))
    described = {(r.method, r.path) for r in ROUTES}
    routes = [r for r in guard._app._app.routes if isinstance(r, Route)]
    served = {
        (method, route.path.replace(":path", ""))
        for route in routes
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert served == described


def test_the_document_is_whole(server: Running) -> None:
    got = httpx.get(server.url + "/openapi.json")
    assert (got.status_code, got.headers["content-type"]) == (200, "application/json")
    document = got.json()
    assert document["openapi"].startswith("3.1")
    assert "security" not in document
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert "modalities" in chat["requestBody"]["description"]
    text = got.text
    for name in document["components"]["schemas"]:
        assert f"#/components/schemas/{name}" in text, f"{name} is not used"
    headers = [p for p in chat["parameters"] if p["in"] == "header"]
    assert [p["name"] for p in headers] == ["X-Request-Timeout"]
    resuming = document["paths"]["/v1/responses/{id}"]["get"]["parameters"]
    assert "Last-Event-ID" in [p["name"] for p in resuming]
    assert "owner_of" not in document["components"]["schemas"]["SchedulerView"]["properties"]
    keyed = openapi.document("/below", True)
    assert b'"servers":[{"url":"/below"}]' in keyed
    assert b'"securitySchemes"' in keyed


def test_descriptions_are_for_its_readers() -> None:
    """One line for each Struct; what it says of a field is the field's own description."""
    schemas = json.loads(openapi.document())["components"]["schemas"]
    assert all("\n" not in schema["description"] for schema in schemas.values())
    assert schemas["Snapshot"]["properties"]["retained_bytes"]["description"]
    assert schemas["PoolView"]["properties"]["cells"]["description"].startswith("a byte a cell")


def test_every_status_of_the_document_is_one_of_a_route() -> None:
    assert {s for route in openapi.ROUTES for s in route.statuses} == openapi.STATUSES.keys()


def test_it_requires_the_key(server_with: Any) -> None:
    server = server_with(api_key=("secret",))
    assert httpx.get(server.url + "/openapi.json").status_code == 401


@pytest.mark.parametrize("at", range(len(ROUTES)), ids=[f"{r.method} {r.path}" for r in ROUTES])
def test_schemathesis_finds_nothing(small: Running, at: int) -> None:
    """No 5xx, and no status, content type or body that the document does not have."""
    route = ROUTES[at]
    schema = schemathesis.openapi.from_dict(httpx.get(small.url + "/openapi.json").json())
    schema.config.update(base_url=small.url)
    operation = schema[route.path][route.method]
    statuses: Counter[int] = Counter()
    good = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    answer_id = answer_for(small, route) if "{id}" in route.path else ""
    cases = [good, *(good.map(lambda c, f=f: tame(c, answer_id, f)) for f in (True, False))]
    if route.body is not None:
        cases.append(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))

    @seed(7)
    @settings(
        max_examples=EXAMPLES if route.body is not None else 5,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=st.one_of(cases))
    def check(case: schemathesis.Case) -> None:
        if route.path == "/v1/engine":
            case.query = {}  # a stream of snapshots has no end
        case.headers.pop("X-Request-Timeout", None)  # one of a moment is answered with 503
        case.headers.pop("Last-Event-ID", None)
        response = case.call(timeout=20)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    check()
    assert set(statuses) <= {route.success, *route.statuses}
    assert statuses[route.success], "nothing it sent was good"


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": GOOD["messages"], "logprobs": True, "top_logprobs": 2},
    "/v1/completions": {"prompt": "hi", "logprobs": 2, "n": 2, "echo": True},
    "/v1/responses": {"input": "hi", "include": ["message.output_text.logprobs"]},
    "/tokenize": {"messages": GOOD["messages"], "return_token_strs": True},
}


def test_bundled_whole_answers_are_as_described(bundled: Running) -> None:
    """Answers of a model that samples, with log probabilities that are not round numbers."""
    schema = schemathesis.openapi.from_dict(httpx.get(bundled.url + "/openapi.json").json())
    schema.config.update(base_url=bundled.url)
    for path, body in BODIES.items():
        case = schema[path]["POST"].Case(body=body, media_type="application/json")
        response = case.call(timeout=60)
        assert response.status_code == 200, response.text
        case.validate_response(response, checks=CHECKS)
    for path in ("/v1/models", "/v1/engine", "/ready"):
        case = schema[path]["GET"].Case()
        case.validate_response(case.call(timeout=20), checks=CHECKS)
