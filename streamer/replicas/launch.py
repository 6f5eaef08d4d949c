"""RayCluster: a Cluster whose replicas Ray starts, for `streamer serve --replicas` and programs.

On this machine, or on the Ray cluster that RAY_ADDRESS names. Owns what it starts: the application
of replicas (under_ray.py), and Ray itself where none ran. This process is the ingress.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from streamer.config import Config
from streamer.engine.refusals import CLOSE_S
from streamer.errors import ConfigError, EngineDead, StreamerError
from streamer.replicas import under_ray
from streamer.replicas.cluster import Cluster

if TYPE_CHECKING:
    from streamer.replicas.messages import Member

log = logging.getLogger(__name__)


class RayCluster(Cluster):
    """config.replicas replicas and this process's ingress; used as an AsyncEngine is."""

    def __init__(self, config: Config) -> None:
        if config.nnodes > 1:
            raise ConfigError("replicas: each has all its ranks on one host", param="replicas")
        under_ray.import_serve()
        self._application = f"streamer-{secrets.token_hex(4)}"
        self._directory_actor: Any = None
        self._is_open = asyncio.Event()
        self._began_ray = False
        self._launching: asyncio.Task[None] | None = None
        self._failure: StreamerError | None = None
        secret = secrets.token_bytes(32)
        super().__init__(config, self._members, secret)

    async def start(self) -> None:
        """Return when the first replica takes requests; the others follow.

        Raises ConfigError and EngineDead where Ray or the replicas can't start.
        """
        try:
            await super().start()
        except EngineDead:
            if self._failure is not None:
                raise self._failure from None
            raise

    async def aclose(self, deadline_s: float = CLOSE_S) -> None:
        """See Cluster; then end the replicas, and Ray if it was started here."""
        await super().aclose(deadline_s)
        if self._launching is not None:
            await asyncio.wait([self._launching])
            self._launching = None
            await asyncio.to_thread(self._stop)

    async def _members(self) -> Sequence[Member]:
        """Starts Ray when first called: the tokenizer is loaded then, and the model's name good."""
        if self._launching is None:
            self._launching = asyncio.create_task(self._launch())
        await self._is_open.wait()
        found: Sequence[Member] = await under_ray.members_of(self._directory_actor)()
        return found

    async def _launch(self) -> None:
        try:
            await asyncio.to_thread(self._start_ray)
            _keep_signals()
            self._is_open.set()
            await asyncio.to_thread(self._run)
        except (StreamerError, RuntimeError) as error:
            if not isinstance(error, StreamerError):  # Ray Serve has one error for all
                why = await asyncio.to_thread(self._reason)
                error = EngineDead(f"the replicas did not start: {why or error}")
            if self._state == "loading":
                self._failure = error
                self._die(error)
            else:
                log.error("%s", error.message)

    def _start_ray(self) -> None:
        import ray
        from ray import serve

        if not ray.is_initialized():
            try:
                # Without an address it would join, and then keep, any Ray that runs here.
                ray.init(
                    address=os.environ.get("RAY_ADDRESS") or "local",
                    namespace=under_ray.NAMESPACE,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
            except (ConnectionError, ValueError, RuntimeError) as error:
                where = os.environ.get("RAY_ADDRESS")
                what = "Ray did not start" if where is None else f"no Ray at RAY_ADDRESS={where}"
                raise ConfigError(f"replicas: {what}: {error}", param="replicas") from error
            self._began_ray = True
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(proxy_location="Disabled")
        self._directory_actor = under_ray.open_directory(self._application, self._secret)

    def _run(self) -> None:
        """Returns when every replica is loaded."""
        from ray import serve

        application = under_ray.replicas_of(self.config)
        serve.run(application, name=self._application, route_prefix=None)

    def _reason(self) -> str:
        """The last line of what Ray Serve knows of a replica that does not start."""
        from ray import serve

        with contextlib.suppress(Exception):
            deployments = serve.status().applications[self._application].deployments
            message: str = deployments["Replica"].message
            return message.strip().splitlines()[-1]
        return ""

    def _stop(self) -> None:
        import ray
        from ray import serve

        if self._began_ray and not os.environ.get("RAY_ADDRESS"):
            ray.shutdown()
            return
        with contextlib.suppress(Exception):  # the cluster may be gone
            serve.delete(self._application)
            ray.kill(self._directory_actor)
        if self._began_ray:
            ray.shutdown()


def _keep_signals() -> None:
    """Take SIGTERM and SIGINT back from Ray, whose handlers end the process 3 s after a SIGTERM."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.getsignal(number))
