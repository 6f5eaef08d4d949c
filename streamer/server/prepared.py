"""Prepared: a request for an answer, admitted, read, decoded and checked, before it has a prompt.

Service makes one of every body that asks for an answer; handlers pass it to Service.submit.
Values alone.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec
from msgspec.structs import replace
from starlette.types import Scope

from streamer.core.sampling import SamplingParams
from streamer.server.admission import tenant_of
from streamer.server.openai.common import Body
from streamer.server.openai.fields import Reader
from streamer.server.parsing.tools import Parsing
from streamer.server.telemetry.records import Operation, Transport

B = TypeVar("B", bound=Body)


class Form(msgspec.Struct, Generic[B], frozen=True):
    """A kind of body: what it asks for, and its decoder."""

    operation: Operation
    reader: Reader[B]


class Reading(msgspec.Struct, frozen=True):
    """How an answer is read.

    detach_s     seconds it runs on after its last reader left, where its body names none
    window       output tokens that a reader may lag; 0: any number; None: the server's setting
    sends_position  its reader is sent its place in the queue
    session      the socket's name
    """

    transport: Transport
    detach_s: float = 0.0
    window: int | None = None
    sends_position: bool = False
    session: str = ""


class Prepared(msgspec.Struct, Generic[B], frozen=True):
    """A checked body of an admitted caller.

    num_bytes  of the body as it came
    model      the name it is served by
    parsing    how the answer is read, where no Context says so; None: all of it is prose
    """

    operation: Operation
    scope: Scope
    body: B
    num_bytes: int
    model: str
    params: SamplingParams
    reading: Reading
    parsing: Parsing | None = None

    def within(self, context: int, num_prompt: int) -> Prepared[B]:
        """The same, for an answer that fits: max_tokens beyond the context is as much as fits.

        For bodies whose max_tokens is a bound that clients set without regard to the prompt.

        context  tokens of the model's context;  num_prompt  tokens of the prompt
        """
        given = self.params.max_tokens
        if given is None or num_prompt + given <= context:
            return self
        return replace(self, params=replace(self.params, max_tokens=None))

    @property
    def tenant(self) -> str:
        """The digest of the caller's key."""
        return tenant_of(self.scope)

    @property
    def salt(self) -> str:
        """The salt of the caller's blocks: the body's own, within those of its key.

        Blocks of one key are never found by another: how long a prompt took and how much of it was
        cached would reveal the prompts of others.
        """
        salt = self.body.cache_salt or ""
        return f"{self.tenant}:{salt}" if self.tenant else salt
