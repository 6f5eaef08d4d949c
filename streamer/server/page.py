"""The page: the files that web/ builds, read once, served from memory under a strict policy.

Files are looked up by name, never by path: nothing outside the folder is served. app.py makes one
Page and routes `/` and `/assets/` to it; without a built page `/` says how to build it.
"""

from __future__ import annotations

import hashlib
import mimetypes
import re
from pathlib import Path
from typing import Final, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

FOLDER: Final = Path(__file__).parent.parent / "web"
INDEX: Final = "index.html"
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "font-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # markup is inserted through DOMPurify alone
        "trusted-types dompurify",
    )
)
HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "vary": "Accept-Encoding",
}
UNBUILT: Final = """The page is not built. In a checkout of Streamer, run

    make page

and start the server again. The API works without it: see /openapi.json.
"""
_SUFFIXES: Final = {"br": ".br", "gzip": ".gz"}  # the preferred first
_REFUSED: Final = r"\s*;\s*q=0(\.0*)?\s*(,|$)"


class _File(NamedTuple):
    bodies: dict[str, bytes]  # content coding -> bytes; "" as it is
    headers: dict[str, str]


class Page:
    """The built page below `folder`: its index.html and what is in assets/."""

    def __init__(self, folder: Path = FOLDER) -> None:
        assets = sorted((folder / "assets").glob("*")) if folder.is_dir() else []
        found = [p for p in (folder / INDEX, *assets) if p.is_file()]
        self._files = {p.name: _read(p) for p in found if p.suffix not in _SUFFIXES.values()}

    async def index(self, request: Request) -> Response:
        """GET /."""
        if INDEX not in self._files:
            return Response(UNBUILT, 503, {**HEADERS, "cache-control": "no-store"}, "text/plain")
        return self._answer(INDEX, request)

    async def asset(self, request: Request) -> Response:
        """GET /assets/{name}."""
        name = request.path_params["name"]
        if name not in self._files or name == INDEX:
            raise HTTPException(404)
        return self._answer(name, request)

    def _answer(self, name: str, request: Request) -> Response:
        file = self._files[name]
        if request.headers.get("if-none-match") == file.headers["etag"]:
            return Response(status_code=304, headers=file.headers)
        accepted = request.headers.get("accept-encoding", "")
        for coding in _SUFFIXES:
            if coding in file.bodies and re.search(rf"\b{coding}\b(?!{_REFUSED})", accepted):
                headers = {**file.headers, "content-encoding": coding}
                return Response(file.bodies[coding], headers=headers)
        return Response(file.bodies[""], headers=file.headers)


def _read(path: Path) -> _File:
    data = path.read_bytes()
    bodies = {"": data}
    for coding, suffix in _SUFFIXES.items():
        packed = path.with_name(path.name + suffix)
        if packed.is_file():
            bodies[coding] = packed.read_bytes()
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    if kind.startswith("text/"):
        kind += "; charset=utf-8"
    is_index = path.name == INDEX
    headers = {
        **HEADERS,
        "content-type": kind,
        "etag": f'"{hashlib.sha256(data).hexdigest()[:32]}"',
        # an asset has a hash of its content in its name; the index names the assets
        "cache-control": "no-cache" if is_index else "public, max-age=31536000, immutable",
    }
    return _File(bodies, headers)
