"""Gate: refuses a request for an answer at its head, while the engine has no room for it.

Plain ASGI between the guard and the routes: the body is not read, and nothing is made for the
request beyond its error. Under overload nearly every request ends here.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from starlette.types import ASGIApp, Receive, Scope, Send

from streamer.errors import StreamerError
from streamer.server.admission import tenant_of
from streamer.server.errors import id_headers
from streamer.server.security import deny

if TYPE_CHECKING:
    from streamer.server.service import Service

# POST to these asks for an answer; what else takes a body does not wait in the engine's queue.
ANSWERING: Final = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/messages",
        "/api/chat",
        "/api/generate",
    }
)


class Gate:
    """Passes a request on if it can wait, or answers with the reason why not."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._root = service.config.root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or refuse."""
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        if is_post and scope["path"].removeprefix(self._root) in ANSWERING:
            service = self._service
            try:
                service.require_ready()
                service.require_room(scope)
            except StreamerError as error:
                own = id_headers(service.metrics.refused(error))
                left = service.admission.headers(tenant_of(scope))
                await deny(scope, send, error, (*own, *left))
                return
        if asyncio.current_task() is None:  # transport/http.py makes a task of what follows
            await asyncio.sleep(0)
        await self._app(scope, receive, send)
