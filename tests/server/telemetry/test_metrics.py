"""Every metric moves for its cause, seen by scraping a real server; the dashboard asks for them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from streamer.core.blocks import BlockHasher
from streamer.core.plan import Facts
from streamer.core.scheduler import Scheduler, SchedulerConfig
from streamer.engine.stats import PHASES
from streamer.server.telemetry.metrics import Metrics
from tests.server.responses.test_socket import FINAL, dial, receive, send, until
from tests.server.support.counting import CHAT, ENDLESS, sse
from tests.server.support.running import DEADLINE_S, Running
from tests.server.test_cancel_states import crowd
from tests.server.transport.test_sse import post_raw

DASHBOARD = Path(__file__).parents[3] / "streamer/server/telemetry/grafana.json"
CHAT_PATH = "/v1/chat/completions"


def scrape(server: Running) -> dict[str, float]:
    """Every sample, as name{label="value",...}; the whole exposition has to parse."""
    found = {}
    for family in text_string_to_metric_families(httpx.get(server.url + "/metrics").text):
        for s in family.samples:
            labels = ",".join(f'{k}="{v}"' for k, v in sorted(s.labels.items()))
            found[f"{s.name}{{{labels}}}" if labels else s.name] = s.value
    return found


def moved(server: Running, cause: Callable[[], object]) -> dict[str, float]:
    """What the cause added, sample by sample."""
    server.wait_idle()
    before = scrape(server)
    cause()
    server.wait_idle()
    after = scrape(server)
    return {name: d for name, value in after.items() if (d := value - before.get(name, 0.0))}


def ask(server: Running, **fields: Any) -> httpx.Response:
    return httpx.post(server.url + CHAT_PATH, json={**CHAT, "ignore_eos": True, **fields})


def over_sse(server: Running) -> None:
    body = {**CHAT, "max_tokens": 4, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + CHAT_PATH, json=body) as response:
        assert list(sse(response))[-1].is_done


def over_websocket(server: Running) -> None:
    with dial(server) as socket:
        send(socket, "response.create", input="count to 3")
        until(socket, *FINAL)


def who_leaves(server: Running) -> None:
    with httpx.stream(
        "POST", server.url + CHAT_PATH, json={**CHAT, **ENDLESS, "stream": True}
    ) as r:
        events = sse(r)
        next(events)  # the role
        next(events)  # text: it has run


def who_cancels(server: Running) -> None:
    with dial(server, "streamer.v1.json") as socket:
        send(socket, "response.create", input="x", max_output_tokens=30_000, ignore_eos=True)
        created = until(socket, "response.created")[-1]
        until(socket, "response.output_text.delta")
        send(socket, "response.cancel", response_id=created["response"]["id"])
        until(socket, *FINAL)


@pytest.mark.parametrize(
    ("cause", "reason", "transport"),
    [
        (lambda s: ask(s, max_tokens=4), "length", "http"),
        (over_sse, "length", "sse"),
        (over_websocket, "stop", "websocket"),
        (who_leaves, "left", "sse"),
        (who_cancels, "cancelled", "websocket"),
    ],
)
def test_requests_by_reason_and_transport(
    server: Running, cause: Callable[[Running], object], reason: str, transport: str
) -> None:
    news = moved(server, lambda: cause(server))
    finished = {k: v for k, v in news.items() if k.startswith("streamer_requests_finished_total")}
    assert finished == {
        f'streamer_requests_finished_total{{reason="{reason}",transport="{transport}"}}': 1
    }
    assert news["streamer_request_seconds_count"] == 1
    assert news["streamer_queue_seconds_count"] == 1


def test_an_answer_over_a_restart_has_no_time_without_a_process(
    server_with: Any, tmp_path: Path
) -> None:
    settings = {"model": "fake:tokens_per_s=50", "journal": str(tmp_path), "drain_timeout": 0.1}
    first: Running = server_with(**settings)
    body = {"input": "x", "max_output_tokens": 60, "ignore_eos": True, "background": True}
    assert httpx.post(first.url + "/v1/responses", json=body).status_code == 200
    first.wait_metric('streamer_requests{state="running"}', 1)
    first.stop()
    server: Running = server_with(**settings)
    server.wait_idle()
    found = scrape(server)
    assert found["streamer_request_seconds_count"] == 1
    assert "streamer_queue_seconds_count" not in {k for k, v in found.items() if v}
    assert not found["streamer_time_to_first_token_seconds_count"]


@pytest.mark.parametrize("model", ["server", "bundled"])
def test_one_answer_moves_each_count_once(request: pytest.FixtureRequest, model: str) -> None:
    server = request.getfixturevalue(model)
    usage: dict[str, Any] = {}
    news = moved(server, lambda: usage.update(ask(server, max_tokens=9).json()["usage"]))
    assert news["streamer_output_tokens_total"] == news["streamer_generated_tokens_total"] == 9
    assert news["streamer_prompt_tokens_total"] == usage["prompt_tokens"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert news["streamer_computed_tokens_total"] == usage["prompt_tokens"] - cached + 8
    assert news["streamer_time_to_first_token_seconds_count"] == 1
    assert 1 <= news["streamer_inter_token_latency_seconds_count"] <= 8
    assert news["streamer_time_to_first_token_seconds_sum"] > 0
    assert news["streamer_request_seconds_sum"] > news["streamer_time_to_first_token_seconds_sum"]


def test_output_tokens_count_once_however_often_they_are_read(server: Running) -> None:
    def read_by_three() -> None:
        body = {"input": "x", "max_output_tokens": 30, "ignore_eos": True}
        with dial(server, "streamer.v1.json") as socket:
            receive(socket)
            send(socket, "response.create", **body)
            response_id = until(socket, *FINAL)[-1]["response"]["id"]
            send(socket, "response.resume", response_id=response_id)
            until(socket, *FINAL)
        replay = httpx.get(f"{server.url}/v1/responses/{response_id}?stream=true")
        assert "response.output_text.delta" in replay.text

    news = moved(server, read_by_three)
    assert news["streamer_output_tokens_total"] == news["streamer_generated_tokens_total"] == 30


def test_unread_output_tokens_count_while_they_are_generated(server_with: Any) -> None:
    server = server_with(model="fake:tokens_per_s=200")
    body = {"input": "x", "max_output_tokens": 400, "ignore_eos": True, "background": True}
    response_id = httpx.post(server.url + "/v1/responses", json=body).json()["id"]
    stream = server.engine.get(response_id)
    server.wait_until(lambda: stream.num_output_tokens > 20)
    assert 20 < scrape(server)["streamer_output_tokens_total"] < 400
    httpx.post(f"{server.url}/v1/responses/{response_id}/cancel")
    server.wait_idle()
    assert scrape(server)["streamer_output_tokens_total"] == stream.num_output_tokens


def test_every_step_is_timed_in_each_phase(server: Running) -> None:
    news = moved(server, lambda: ask(server, max_tokens=50))
    for phase in PHASES:
        count = news[f'streamer_step_phase_seconds_count{{phase="{phase}"}}']
        assert count == news["streamer_steps_total"] >= 50
        assert news[f'streamer_step_phase_seconds_bucket{{le="+Inf",phase="{phase}"}}'] == count
        assert news[f'streamer_step_phase_seconds_sum{{phase="{phase}"}}'] > 0


def test_inter_token_latency_begins_at_half_a_millisecond(server: Running) -> None:
    assert 'streamer_inter_token_latency_seconds_bucket{le="0.0005"}' in scrape(server)


def test_collect_is_where_a_slow_model_shows(server_with: Any) -> None:
    server = server_with(model="fake:tokens_per_s=100")
    news = moved(server, lambda: ask(server, max_tokens=20))
    share = {p: news[f'streamer_step_phase_seconds_sum{{phase="{p}"}}'] for p in PHASES}
    assert share["collect"] > 0.1  # twenty steps a hundredth of a second apart
    assert max(share, key=lambda p: share[p]) == "collect"


def test_refusals_by_code(server_with: Any) -> None:
    server = server_with(api_key=("good",))
    key = {"Authorization": "Bearer good"}
    url = server.url + CHAT_PATH
    assert httpx.post(url, json=CHAT).status_code == 401
    assert httpx.post(url, json={**CHAT, "model": "other"}, headers=key).status_code == 404
    assert httpx.post(url, json={"messages": 1}, headers=key).status_code == 400
    lines = httpx.get(server.url + "/metrics", headers=key).text.splitlines()
    refused = [line for line in lines if line.startswith("streamer_requests_refused_total")]
    assert sorted(line.split()[1] for line in refused) == ["1.0"] * 3
    assert any('"invalid_api_key"' in line for line in refused)


def test_refused_events_of_a_socket_count_too(server: Running) -> None:
    def nonsense() -> None:
        with dial(server) as socket:
            send(socket, "response.nonsense")
            assert receive(socket)["type"] == "error"

    news = moved(server, nonsense)
    assert news['streamer_requests_refused_total{code="unknown_event"}'] == 1


def test_shared_prefixes_and_copies_on_write(server: Running) -> None:
    prompt = {"messages": [{"role": "user", "content": "x" * 200}], "max_tokens": 2}
    ask(server, **prompt)
    news = moved(server, lambda: ask(server, **prompt))
    assert news["streamer_prefix_hit_tokens_total"] >= 192
    assert news["streamer_cached_prompt_tokens_total"] >= 192
    news = moved(server, lambda: ask(server, max_tokens=2, n=3))
    assert news["streamer_copied_blocks_total"] == 2  # two of three choices copy the last block


@pytest.mark.parametrize(("swap_space", "kind"), [(0.25, "swap"), (0.0, "recompute")])
def test_preemptions_and_swaps(server_with: Any, swap_space: float, kind: str) -> None:
    """Two requests that share 18 blocks and grow by 7 each, where there are 28."""

    def crowded() -> None:
        streams = [crowd(server, 300), crowd(server, 300)]
        for stream in streams:
            server.on_loop(stream.wait())

    server = server_with(
        model="fake:tokens_per_s=300",
        num_gpu_blocks_override=28,
        max_num_seqs=2,
        max_num_batched_tokens=512,
        swap_space=swap_space,
    )
    news = moved(server, crowded)
    assert {k for k in news if k.startswith("streamer_preemptions_total")} == {
        f'streamer_preemptions_total{{kind="{kind}"}}'
    }
    swapped = {
        d: news.get(f'streamer_swap_bytes_total{{direction="{d}"}}', 0) for d in ("in", "out")
    }
    if kind == "swap":
        assert swapped["out"] > 0
        assert swapped["out"] % server.engine.info.block_bytes == 0
        assert news['streamer_blocks{pool="host",state="cached"}'] > 0  # clean copies stay
    else:
        assert swapped == {"in": 0, "out": 0}


def test_swap_seconds_are_the_runners(server: Running) -> None:
    sizes = SchedulerConfig(
        block_size=16, num_blocks=4, num_host_blocks=0, block_bytes=1, max_num_seqs=1,
        max_num_batched_tokens=16, max_model_len=64,
    )  # fmt: skip
    scheduler = Scheduler(sizes, BlockHasher(16, b"k" * 32))
    scheduler.schedule(Facts(swap_s=1.5))
    assert scheduler.stats().swap_s == 1.5
    assert scrape(server)["streamer_swap_seconds_total"] == 0  # the fake model copies nothing


def test_a_reader_that_lags_shows(server: Running) -> None:
    window = server.config.stream_window
    with post_raw(server, stream=True):
        end = time.monotonic() + DEADLINE_S  # until the kernel's buffers are full too
        while scrape(server)['streamer_stream_lag_tokens{quantile="1"}'] <= window:
            assert time.monotonic() < end, "no reader lags"
        server.wait_metric('streamer_requests{state="paused"}', 1)
    server.wait_idle()
    server.wait_metric('streamer_stream_lag_tokens{quantile="1"}', 0)


def test_a_loop_that_is_held_up_shows(server: Running) -> None:
    async def hold_up() -> None:
        time.sleep(0.7)  # noqa: ASYNC251 - that is the point

    news = moved(server, lambda: server.on_loop(hold_up()))
    assert news['streamer_event_loop_lag_seconds_bucket{le="+Inf"}'] > news.get(
        'streamer_event_loop_lag_seconds_bucket{le="0.25"}', 0
    )


def test_resumes_by_what_was_found(server: Running) -> None:
    answer = httpx.post(server.url + "/v1/responses", json={"input": "count to 3"}).json()
    body = {**CHAT, "stream": True, "detach_s": 30, "ignore_eos": True, "max_tokens": 2000}
    with httpx.stream("POST", server.url + CHAT_PATH, json=body) as response:
        chat = next(sse(response)).json["id"]

    def finished() -> None:
        httpx.get(f"{server.url}/v1/responses/{answer['id']}?stream=true")
        httpx.get(f"{server.url}/v1/responses/{answer['id']}")  # is no resume

    def gone_and_finished() -> None:
        with dial(server, "streamer.v1.json") as socket:
            receive(socket)
            for response_id in (answer["id"], "resp_nobody"):
                send(socket, "response.resume", response_id=response_id, stream_id=response_id)
            until(socket, *FINAL)

    name = 'streamer_resumes_total{{status="{}"}}'.format
    moves = moved(server, finished)
    assert (moves[name("finished")], name("gone") in moves) == (1, False)
    moves = moved(server, gone_and_finished)
    assert (moves[name("finished")], moves[name("gone")]) == (1, 1)
    moves = moved(server, lambda: httpx.get(f"{server.url}{CHAT_PATH}/{chat}?stream=true"))
    assert moves[name("finished")] == 1


def test_a_scrape_while_the_model_loads() -> None:
    from tests.engine.helpers import make_engine

    assert b"streamer_swap_bytes_total" in Metrics(make_engine()).expose()


# ---------------------------------------------------------------- the dashboard


def test_the_dashboard_asks_for_what_there_is(server_with: Any, tmp_path: Path) -> None:
    server = server_with(journal=str(tmp_path))
    board = json.loads(DASHBOARD.read_text())
    panels = [p for p in board["panels"] if p["type"] != "row"]
    queries = [t["expr"] for p in panels for t in p["targets"]]
    asked = {name for query in queries for name in re.findall(r"streamer_\w+", query)}
    ask(server, max_tokens=2)
    httpx.post(server.url + CHAT_PATH, json={"messages": 1})
    text = httpx.get(server.url + "/metrics").text
    parsed = text_string_to_metric_families(text)
    families = {f.name: f.type for f in parsed if not f.name.endswith("_created")}
    endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}
    exposed = {name + end for name, kind in families.items() for end in endings[kind]}
    assert asked <= exposed, asked - exposed
    shown = {n for n in families if any(a.startswith(n) for a in asked)}
    assert set(families) - shown == set(), "a metric that no panel shows"
    assert all(p["title"] and p["gridPos"]["w"] > 0 for p in panels)
    assert len({p["id"] for p in board["panels"]}) == len(board["panels"])


def test_labels_in_the_dashboard_exist(server: Running) -> None:
    queries = [
        t["expr"] for p in json.loads(DASHBOARD.read_text())["panels"] for t in p.get("targets", [])
    ]
    names = {"le", "phase", "state", "pool", "reason", "transport", "code", "kind", "direction"}
    names |= {"status", "quantile", "instance", "job", "position"}
    for query in queries:
        for group in re.findall(r"by \(([^)]*)\)", query):
            assert {g.strip() for g in group.split(",")} <= names, query
