"""Replicas as a deployment of Ray Serve, which starts, watches, scales and ends them.

launch.py has them below an ingress of its own, application.py beside ingresses. Tokens go over the
sockets of ReplicaServer and Cluster, never through Ray. Ray is imported when it is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from streamer.config import Config
from streamer.errors import ConfigError, JournalInUse
from streamer.replicas.directory import RENEW_S, Directory

if TYPE_CHECKING:
    from streamer.replicas.messages import Member
    from streamer.replicas.replica import ReplicaServer

NAMESPACE: Final = "streamer"
# Of no use to a replica, and Ray keeps what it is given.
SECRETS: Final = ("api_key", "key_limits", "metrics_key")
REPORT_S: Final = 2.0  # Ray exports metrics every few seconds
HEALTH_PERIOD_S: Final = 1.0
# Ray Serve ends a replica that was silent three times for so long; ingresses gave it up before the
# first was over (link.py: SILENT_S).
HEALTH_TIMEOUT_S: Final = 5.0
STOP_S: Final = 15.0  # beyond drain_timeout, for what ends after it
# Beyond both: until Ray Serve has killed a process that stands still, which holds its journal.
STOPPED_S: Final = 30.0

log = logging.getLogger(__name__)


def import_serve() -> Any:
    """ray.serve; ConfigError where Ray is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else it reports to its makers
    try:
        from ray import serve
    except ImportError as error:
        raise ConfigError(
            f"replicas: Ray Serve is not installed here ({error}); "
            "pip install 'streamer-llm[ray]' brings it",
            param="replicas",
        ) from None
    return serve


# ---------------------------------------------------------------- the directory


class DirectoryActor:
    """The Directory of one application, in an actor that Ray starts again with the same secret."""

    def __init__(self, secret: bytes) -> None:
        import ray

        self._secret = secret
        is_restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._directory = Directory(time.monotonic(), is_restarted=is_restarted)

    async def secret(self) -> bytes:
        """What ingresses and replicas prove to each other."""
        return self._secret

    async def claim(self, holder: str) -> str | None:
        """See Directory.claim."""
        return self._directory.claim(holder, time.monotonic())

    async def renew(self, name: str, holder: str, address: str) -> bool:
        """See Directory.renew."""
        return self._directory.renew(name, holder, address, time.monotonic())

    async def release(self, name: str, holder: str) -> None:
        """See Directory.release."""
        self._directory.release(name, holder)

    async def members(self) -> dict[str, str]:
        """See Directory.members."""
        return self._directory.members(time.monotonic())


def open_directory(application: str, secret: bytes | None = None) -> Any:
    """The directory's actor, made by the first to ask; `secret` is its own where it is made."""
    import ray

    return (
        ray.remote(DirectoryActor)
        .options(
            name=f"directory of {application}",
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
        )
        .remote(secret or secrets.token_bytes(32))
    )


def members_of(directory: Any) -> Callable[[], Any]:
    """What a Cluster asks for the replicas that there are."""

    async def members() -> Sequence[Member]:
        from streamer.replicas.messages import Member

        found: dict[str, str] = await directory.members.remote()
        return [Member(name, address) for name, address in found.items()]

    return members


# ---------------------------------------------------------------- deployments


class Replica:
    """A whole engine in a process of Ray's.

    values  a Config without its secrets, as plain values
    """

    async def __init__(self, values: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        import ray

        from streamer.replicas.replica import ReplicaServer

        config = msgspec.convert(values, Config)
        set_up_process(config)
        self._drain_s = config.drain_timeout
        self._holder = secrets.token_hex(8)
        self._directory = open_directory(import_serve().get_replica_context().app_name)
        self._name = await self._claim()
        secret = await self._directory.secret.remote()
        host = ray.util.get_node_ip_address()
        self._address = ""
        self._tasks = [asyncio.create_task(self._renew())]
        try:
            self._server = await start_when_free(
                lambda: ReplicaServer(config, name=self._name, secret=secret, host=host),
                config.drain_timeout + STOP_S + STOPPED_S,
            )
        except BaseException:
            await self._leave()
            raise
        self._address = self._server.address
        self._tasks.append(asyncio.create_task(self._report()))
        log.info("replica %s takes requests at %s", self._name, self._address)

    async def check_health(self) -> None:
        """Called by Ray Serve, which replaces a replica where this raises."""
        if self._server.is_dead:
            raise RuntimeError(f"the engine of replica {self._name} died")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What scaling.py decides by."""
        load = self._server.load
        return {
            "queued_tokens": load.queued_tokens,
            "row_use": load.rows / load.rows_total,
            "kv_use": load.kv_use,
        }

    async def __del__(self) -> None:
        """Called by Ray Serve before it ends the process: its requests go on elsewhere."""
        await self._server.drain(self._drain_s)
        await self._server.aclose()
        await self._leave()

    async def _leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._directory.release.remote(self._name, self._holder)

    async def _claim(self) -> str:
        while True:
            name: str | None = await self._directory.claim.remote(self._holder)
            if name is not None:
                return name
            await asyncio.sleep(RENEW_S)

    async def _renew(self) -> None:
        """Hold the name. A process that stood still so long that another has it ends at once."""
        import ray

        while True:
            with contextlib.suppress(ray.exceptions.RayError):
                is_ours = await self._directory.renew.remote(
                    self._name, self._holder, self._address
                )
                if not is_ours:
                    log.critical("replica %s is another process by now", self._name)
                    os._exit(1)
            await asyncio.sleep(RENEW_S)

    async def _report(self) -> None:
        from ray.serve import metrics

        from streamer.replicas.ray_metrics import RayMetrics

        ours = RayMetrics(self._server.engine, metrics)
        while True:
            ours.report()
            await asyncio.sleep(REPORT_S)


async def start_when_free(make: Callable[[], ReplicaServer], deadline_s: float) -> ReplicaServer:
    """A replica that has started, once the process that had its name lets go of the journal.

    One that stands still does so when Ray Serve kills it, which takes three failed health checks
    and the time for a graceful end. Raises what prevents the start.
    """
    end = time.monotonic() + deadline_s
    is_logged = False
    while True:
        server = make()
        try:
            await server.start()
            return server
        except JournalInUse as error:
            await server.aclose()
            if time.monotonic() > end:
                raise
            if not is_logged:
                log.warning("replica %s waits: %s", server.name, error.message)
            is_logged = True
        except BaseException:
            await server.aclose()
            raise
        await asyncio.sleep(RENEW_S)


def set_up_process(config: Config) -> None:
    from streamer.cli.loop import SWITCH_INTERVAL_S
    from streamer.server.telemetry.logs import setup

    setup(config.log_level, config.log_format)
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def replicas_of(config: Config) -> Any:
    """The application of config.replicas replicas without an ingress."""
    serve = import_serve()
    deployment = serve.deployment(
        Replica,
        name="Replica",
        num_replicas=config.replicas,
        ray_actor_options=resources(config),
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.1,  # no request comes through Ray
        graceful_shutdown_timeout_s=config.drain_timeout + STOP_S,
    )
    plain: dict[str, Any] = msgspec.to_builtins(config)
    return deployment.bind({name: v for name, v in plain.items() if name not in SECRETS})


def resources(config: Config) -> dict[str, float]:
    """What Ray sets aside for one replica: a GPU for each rank, or its share of a machine's cores.

    The shares are those of the smallest machine, if replicas are spread evenly.
    """
    import ray

    nodes = [n["Resources"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU")]
    has_gpus = any(node.get("GPU") for node in nodes)
    if config.device == "cuda" or (config.device == "auto" and has_gpus):
        return {"num_cpus": 1, "num_gpus": config.tensor_parallel_size}
    per_node = math.ceil(config.replicas / max(1, len(nodes)))
    cores = min((node["CPU"] for node in nodes), default=1.0) / per_node
    return {"num_cpus": math.floor(cores) if cores >= 1 else cores}
