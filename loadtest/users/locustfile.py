"""The file for `locust -f`: every user, the flags, load shapes and objectives.

Choose users by name (`SseChat Flaky`) or tasks by tag (`--tags sse`); else SseChat runs.
Needs no server of ours: SseChat and MultiTurn run against any server with OpenAI's API.
"""

from __future__ import annotations

import locust.stats
from locust import events

from streamer.loadtest.users import judging, options, shapes
from streamer.loadtest.users.chats import MultiTurn, SseChat
from streamer.loadtest.users.flaky import Flaky
from streamer.loadtest.users.meter import bucket
from streamer.loadtest.users.sockets import Cancel, Fork, Lanes, SlowReader, SocketChat

__all__ = [
    "Cancel",
    "Flaky",
    "Fork",
    "Lanes",
    "MultiTurn",
    "SlowReader",
    "SocketChat",
    "SseChat",
]

setattr(locust.stats, "bucket_response_time", bucket)  # noqa: B010, Locust's own hook
events.init_command_line_parser.add_listener(options.add)
events.init.add_listener(judging.prepare)
events.init.add_listener(shapes.choose)
events.quitting.add_listener(judging.judge)
