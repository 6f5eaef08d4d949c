"""The chat page: one static file with inline script and style, allowed by their hashes alone.

Read once at start. Its Content-Security-Policy lets it load nothing else and speak only to us.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

PAGE = Path(__file__).parent.parent / "web" / "index.html"
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def policy_of(html: str) -> str:
    """The strictest policy under which this page works."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(html):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    return "; ".join(
        (
            "default-src 'none'",
            "script-src " + (" ".join(hashes["script"]) or "'none'"),
            "style-src " + (" ".join(hashes["style"]) or "'none'"),
            "img-src 'self' data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


class Page:
    """Serves the page, with an entity tag."""

    def __init__(self, path: Path = PAGE) -> None:
        html = path.read_bytes()
        self._html = html
        self._etag = f'"{hashlib.sha256(html).hexdigest()[:32]}"'
        self._headers = {
            "content-security-policy": policy_of(html.decode()),
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
            "cache-control": "no-cache",
            "etag": self._etag,
        }

    async def endpoint(self, request: Request) -> Response:
        """GET /."""
        if request.headers.get("if-none-match") == self._etag:
            return Response(status_code=304, headers=self._headers)
        return Response(self._html, media_type="text/html", headers=self._headers)
