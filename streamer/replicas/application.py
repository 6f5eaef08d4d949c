"""The application of Ray Serve for `serve run` and KubeRay: ingresses beside replicas.

An ingress is the server's own ASGI application over a Cluster; Ray Serve's proxies have the
sockets. Its arguments are settings of `streamer serve`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from streamer.config import Config, load_config, settings
from streamer.errors import ConfigError
from streamer.replicas.under_ray import (
    HEALTH_PERIOD_S,
    HEALTH_TIMEOUT_S,
    STOP_S,
    import_serve,
    members_of,
    open_directory,
    replicas_of,
    set_up_process,
)

# Serve's default of 5 requests at once is for functions; admission is ours (server/admission.py).
MAX_REQUESTS: Final = 1 << 14


class Ingress:
    """The server's application over all replicas, for Ray Serve's proxies.

    arguments  as `build` has them; secrets come from this process's environment as well
    replicas   the handle that makes them a part of this application
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, arguments: dict[str, Any], replicas: object
    ) -> None:
        from streamer.replicas.cluster import Cluster
        from streamer.server.app import build_service_app
        from streamer.server.service import Service
        from streamer.server.telemetry.tracing import make_tracer

        del replicas
        self._config = config = config_of(arguments)
        set_up_process(config)
        directory = open_directory(import_serve().get_replica_context().app_name)
        secret = await directory.secret.remote()
        self._engine = Cluster(config, members_of(directory), secret)
        self._service = Service(self._engine, config, make_tracer(config.otlp_endpoint))
        self.asgi = build_service_app(self._service)
        await self._engine.start()

    async def check_health(self) -> None:
        """Called by Ray Serve, which replaces an ingress where this raises."""
        if self._engine.is_dead:
            raise RuntimeError("the ingress died of an internal error")

    async def __del__(self) -> None:
        """Called by Ray Serve before it ends the process, when no request is open any more."""
        self._service.begin_drain(0.0)
        await self._engine.aclose()


async def asgi(scope: Any, receive: Any, send: Any) -> None:
    """The ASGI application of the ingress that this process is."""
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    await import_serve().get_replica_context().servable_object.asgi(scope, receive, send)


def _make_asgi() -> Any:
    return asgi


def build(arguments: dict[str, Any]) -> Any:
    """The application `serve run streamer.replicas.application:build`.

    arguments  settings by name, from the command line (`key=value`) or `args` of Serve's config
               file; STREAMER_... of the cluster's environment is beneath them

    Its deployments are Ingress and Replica: `deployments` of the config file sets their number,
    autoscaling and resources. Raises ConfigError for what no server could be started with.
    """
    serve = import_serve()
    config = config_of(arguments)
    if not (config.api_key or config.allow_public_bind):
        raise ConfigError(
            "Ray Serve's proxy decides where it listens, so set STREAMER_API_KEY for the "
            "ingresses, or allow_public_bind=true where every caller may use the engine",
            param="api_key",
        )
    ingress = serve.deployment(
        serve.ingress(_make_asgi)(Ingress),
        name="Ingress",
        num_replicas=1,
        max_ongoing_requests=MAX_REQUESTS,
        ray_actor_options={"num_cpus": 0.1},
        logging_config={"enable_access_log": False},  # streamer.request has a line for each
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=config.drain_timeout + STOP_S,
    )
    return ingress.bind(arguments, replicas_of(config))


def config_of(arguments: Mapping[str, Any]) -> Config:
    """The Config of an application's arguments over this process's environment."""
    known = [setting.name for setting in settings()]
    for name in arguments:
        if name not in known:
            raise ConfigError(f"{name} is not a setting", param=name)
    return load_config({name: _as_flag(value) for name, value in arguments.items()}, os.environ)


def _as_flag(value: Any) -> Any:
    if isinstance(value, dict):
        return msgspec.json.encode(value).decode()
    if isinstance(value, list):
        return [str(item) for item in value]
    return value
