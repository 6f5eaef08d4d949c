"""Users of chat completions over SSE, which every OpenAI-compatible server has.

They send no field of Streamer's own, and take token counts from `usage`.
"""

from __future__ import annotations

from typing import Any

from locust import tag, task

from ..replies import Reply, read_reply
from .base import LoadUser
from .meter import Meter

Messages = list[dict[str, str]]


class ChatUser(LoadUser):
    """Requests chat completions over SSE."""

    abstract = True

    def ask(self, messages: Messages, meter: Meter) -> Reply:
        """One answer, timed and verified."""
        body: dict[str, Any] = {"model": self.model, "messages": messages, "stream": True}
        body |= {"max_tokens": self.options.max_tokens, "stream_options": {"include_usage": True}}
        request = self.target.request("POST", "/v1/chat/completions", body)
        reply = read_reply(self.target.read(request), meter.text)
        self.verify(reply.text, reply.num_tokens)
        meter.end(reply.num_tokens)
        return reply


class SseChat(ChatUser):
    """One question at a time, each without a history."""

    @tag("sse", "chat")
    @task
    def chat(self) -> None:
        with self.answer() as meter:
            self.ask([{"role": "user", "content": self.prompts.question()}], meter)


class MultiTurn(ChatUser):
    """Conversations under system prompts that users share.

    The first turn and later ones have separate statistics: a prefix cache saves their difference.
    """

    def prepare(self) -> None:
        self._messages: Messages = []

    def recover(self) -> None:
        self._messages = []

    @tag("sse", "chat", "prefix")
    @task
    def turn(self) -> None:
        if len(self._messages) >= 2 * self.options.turns:
            self._messages = []
        name = "MultiTurn later turns" if self._messages else "MultiTurn first turn"
        if not self._messages:
            self._messages = [{"role": "system", "content": self.prompts.system()}]
        question = {"role": "user", "content": self.prompts.question()}
        with self.answer(name) as meter:
            reply = self.ask([*self._messages, question], meter)
            self._messages += [question, {"role": "assistant", "content": reply.text}]
