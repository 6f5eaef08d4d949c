"""The page's files: how they are served, and what `/` says where none were built."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from streamer.server.page import Page
from tests.server.support.running import Running

SCRIPT = b"console.log(1)"
GZIPPED = gzip.compress(SCRIPT)  # once: its header holds the second it was made in


def serving(folder: Path) -> TestClient:
    page = Page(folder)
    routes = [Route("/", page.index), Route("/assets/{name}", page.asset)]
    # Where a brotli package is installed httpx asks for br too, and unpacks what is not br.
    return TestClient(Starlette(routes=routes), headers={"accept-encoding": "gzip"})


@pytest.fixture
def built(tmp_path: Path) -> Path:
    (tmp_path / "assets").mkdir()
    (tmp_path / "index.html").write_bytes(b"<!doctype html>")
    (tmp_path / "secret.txt").write_bytes(b"not for you")
    for suffix, data in {"": SCRIPT, ".gz": GZIPPED, ".br": b"packed"}.items():
        (tmp_path / "assets" / f"index-1a2b3c4d.js{suffix}").write_bytes(data)
    return tmp_path


def test_the_index_is_revalidated_and_the_assets_are_cached(built: Path) -> None:
    client = serving(built)
    index, asset = client.get("/"), client.get("/assets/index-1a2b3c4d.js")
    assert (index.content, asset.content) == (b"<!doctype html>", SCRIPT)
    assert index.headers["cache-control"] == "no-cache"
    assert asset.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert index.headers["content-type"] == "text/html; charset=utf-8"
    assert asset.headers["content-type"].startswith("text/javascript")
    for path, answer in (("/", index), ("/assets/index-1a2b3c4d.js", asset)):
        again = client.get(path, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        ("gzip, deflate, br, zstd", "br"),
        ("gzip", "gzip"),
        ("br;q=0, gzip", "gzip"),
        ("br;q=0.5", "br"),
        ("identity", None),
        ("", None),
    ],
)
def test_the_smallest_that_the_client_takes(built: Path, accepted: str, coding: str | None) -> None:
    with serving(built).stream(
        "GET", "/assets/index-1a2b3c4d.js", headers={"accept-encoding": accepted}
    ) as answer:
        assert answer.headers.get("content-encoding") == coding
        assert answer.headers["vary"] == "Accept-Encoding"
        sent = b"".join(answer.iter_raw())
    assert sent == {"br": b"packed", "gzip": GZIPPED, None: SCRIPT}[coding]


@pytest.mark.parametrize(
    "path",
    [
        *("/assets/../secret.txt", "/assets/%2e%2e/secret.txt", "/assets/..%2fsecret.txt"),
        *("/assets/", "/assets/index.html", "/assets/secret.txt", "/assets/index-1a2b3c4d.js.gz"),
        *("/assets/%2Fetc%2Fpasswd", "/secret.txt"),
    ],
)
def test_nothing_else_can_be_asked_for(built: Path, path: str) -> None:
    answer = serving(built).get(path)
    assert answer.status_code == 404
    assert b"not for you" not in answer.content


def test_without_a_page_it_says_what_to_run(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "gone"):
        answer = serving(folder).get("/")
        assert answer.status_code == 503
        assert "make page" in answer.text
        assert answer.headers["cache-control"] == "no-store"


def test_the_page_needs_no_key(server_with: Any) -> None:
    keyed: Running = server_with(api_key=("a-key",), root_path="/behind")
    index = httpx.get(keyed.url + "/")
    assert index.status_code == 200
    script = index.text.split('src="./')[1].split('"')[0]
    assert httpx.get(f"{keyed.url}/{script}").status_code == 200
    assert httpx.get(f"{keyed.url}/assets/nothing.js").status_code == 404
    assert httpx.get(f"{keyed.url}/assets/../v1/models").status_code == 401
    assert httpx.get(f"{keyed.url}/assets/%2e%2e/v1/models").status_code in (401, 404)
