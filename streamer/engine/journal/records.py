"""Records: what the journal has of a request, and the bytes of it.

Accepted is written once, when a request is taken; a Step holds what was drawn since the last one,
of all requests; a Part what one request drew in several of them, which are dropped then. A Tail
puts them together again. Every record is checksummed: what was altered on disk counts as not there,
and a token that is not there is drawn again, the same. Values alone: store.py has the file.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeVar
from zlib import crc32

import msgspec

from streamer.core.plan import Finish, Notice, NoticeKind, TokenLogprob
from streamer.engine.requests import GenerateRequest, Progress, Timing

CHECK_BYTES: Final = 4
_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T", bound=msgspec.Struct)


class Accepted(msgspec.Struct, frozen=True, array_like=True):
    """A request that was taken: with its id, seed and max_tokens, without its context.

    context  its encoded context;  created  unix seconds
    """

    request: GenerateRequest
    context: bytes | None
    created: float


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """The end of a request, at `at` (unix seconds); `error` where it has no finishes."""

    at: float
    timing: Timing
    error: str | None = None


class Step(msgspec.Struct, array_like=True):
    """What was drawn in one transaction, as parallel arrays: run i is of choices[i], from its token
    number starts[i] on.

    logprobs  index into the arrays -> those of the run, by the token's number
    began     the first RUNNING notice of requests
    """

    request_ids: list[str]
    choices: list[int]
    starts: list[int]
    tokens: list[list[int]]
    logprobs: dict[int, dict[int, TokenLogprob]]
    prompt_logprobs: dict[str, tuple[TokenLogprob, ...]]
    finishes: list[Finish]
    began: list[Notice]


class Part(msgspec.Struct, frozen=True, array_like=True):
    """What one request drew: of each choice, the tokens from number `starts` on.

    logprobs  of each choice, by the token's number
    """

    starts: list[int]
    tokens: list[list[int]]
    logprobs: list[dict[int, TokenLogprob]]
    prompt_logprobs: list[TokenLogprob] = []
    finishes: list[Finish] = []
    began: Notice | None = None
    ended: Ended | None = None


class Tail:
    """What one request drew since its last Part; all of it, while a journal is read.

    num_written  of the tokens of each choice here, those that a Step has
    finishes  by choice
    covered   the number of its last Part: earlier steps are in it
    is_broken  something between is missing: what comes after it is left out
    """

    __slots__ = (
        "began",
        "covered",
        "ended",
        "finishes",
        "is_broken",
        "logprobs",
        "num_written",
        "prompt_logprobs",
        "starts",
        "tokens",
    )

    def __init__(self, num_choices: int) -> None:
        self.covered = 0
        self.restart([0] * num_choices)

    def restart(self, starts: list[int]) -> None:
        """Forget everything; the next token of each choice is number `starts`."""
        self.starts = starts
        self.tokens: list[list[int]] = [[] for _ in starts]
        self.num_written = [0] * len(starts)
        self.logprobs: list[dict[int, TokenLogprob]] = [{} for _ in starts]
        self.prompt_logprobs: list[TokenLogprob] = []
        self.finishes: dict[int, Finish] = {}
        self.began: Notice | None = None
        self.ended: Ended | None = None
        self.is_broken = False

    @property
    def is_empty(self) -> bool:
        """Whether a Part of it would say nothing."""
        return not (any(self.tokens) or self.finishes or self.began or self.prompt_logprobs)

    @property
    def num_tokens(self) -> int:
        """Of all choices, those of earlier parts included."""
        return sum(self.starts) + sum(map(len, self.tokens))

    def push(self, choice: int, token: int, logprob: TokenLogprob | None) -> None:
        """One more token."""
        tokens = self.tokens[choice]
        if logprob is not None:
            self.logprobs[choice][self.starts[choice] + len(tokens)] = logprob
        tokens.append(token)

    def take(self, request_id: str, progress: Progress) -> None:
        """All that was drawn elsewhere."""
        for choice, drawn in enumerate(progress.outputs):
            for index, token in enumerate(drawn.tokens):
                logprobs = drawn.logprobs
                self.push(choice, token, logprobs[index] if index < len(logprobs) else None)
            if drawn.finish is not None:
                self.finishes[choice] = drawn.finish
        self.prompt_logprobs += progress.prompt_logprobs
        self.began = Notice(
            request_id,
            NoticeKind.RUNNING,
            cached_tokens=progress.cached_tokens,
            shared_tokens=progress.shared_tokens,
        )

    def add_to(self, step: Step, request_id: str) -> None:
        """Add what no Step has yet."""
        for choice, tokens in enumerate(self.tokens):
            begin = self.num_written[choice]
            if begin == len(tokens):
                continue
            start, found = self.starts[choice] + begin, self.logprobs[choice]
            run = tokens[begin:]
            if found:
                numbers = range(start, start + len(run))
                step.logprobs[len(step.tokens)] = {i: found[i] for i in numbers if i in found}
            step.request_ids.append(request_id)
            step.choices.append(choice)
            step.starts.append(start)
            step.tokens.append(run)
            self.num_written[choice] = len(tokens)

    def part(self, ended: Ended | None = None) -> Part:
        """All of it as a Part."""
        return Part(
            self.starts,
            self.tokens,
            self.logprobs,
            self.prompt_logprobs,
            list(self.finishes.values()),
            self.began,
            ended or self.ended,
        )

    def go_on(self) -> None:
        """It is in a Part: from here on it has what follows."""
        self.restart([s + len(t) for s, t in zip(self.starts, self.tokens, strict=True)])

    # ------------------------------------------------------------ reading back

    def put(self, choice: int, index: int, token: int, logprob: TokenLogprob | None) -> None:
        """A token that was read: the next one, or again one that is there already."""
        here = len(self.tokens[choice]) if 0 <= choice < len(self.tokens) else -1
        if index > here:
            self.is_broken = True
        elif index == here:
            self.push(choice, token, logprob)

    def add_part(self, part: Part, number: int) -> None:
        """Part `number`, read in order."""
        self.covered = number
        for choice, start in enumerate(part.starts):
            logprobs = part.logprobs[choice]
            for index, token in enumerate(part.tokens[choice], start):
                self.put(choice, index, token, logprobs.get(index))
            self.is_broken |= start > len(self.tokens[choice])
        if not self.is_broken:
            self.prompt_logprobs += part.prompt_logprobs
            self.finishes |= {finish.choice: finish for finish in part.finishes}
            self.began = self.began or part.began
            self.ended = self.ended or part.ended


def add_step(tails: dict[str, Tail], step: Step, number: int) -> None:
    """Give every request in `tails` what Step `number`, read in order, has of it."""

    def find(request_id: str) -> Tail | None:
        each = tails.get(request_id)
        return None if each is None or each.is_broken or number < each.covered else each

    for i, request_id in enumerate(step.request_ids):
        if (each := find(request_id)) is not None:
            logprobs = step.logprobs.get(i, {})
            for index, token in enumerate(step.tokens[i], step.starts[i]):
                each.put(step.choices[i], index, token, logprobs.get(index))
    for request_id, found in step.prompt_logprobs.items():
        if (each := find(request_id)) is not None:
            each.prompt_logprobs += found
    for finish in step.finishes:
        if (each := find(finish.request_id)) is not None:
            each.finishes[finish.choice] = finish
    for notice in step.began:
        if (each := find(notice.request_id)) is not None:
            each.began = each.began or notice


class Saved(NamedTuple):
    """A request as it was read back, and all that is known to be drawn.

    tries  how often it was restored when it had `tried_at` tokens
    """

    accepted: Accepted
    tail: Tail
    tries: int = 0
    tried_at: int = 0

    @property
    def request_id(self) -> str:
        return self.accepted.request.request_id

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will be drawn."""
        ended = self.tail.ended
        has_error = ended is not None and ended.error is not None
        return has_error or len(self.tail.finishes) == len(self.tail.starts)


def pack(record: msgspec.Struct, name: str = "") -> bytes:
    """A record's bytes, after the checksum of them and of the name that they are stored under."""
    data = _encoder.encode(record)
    return crc32(data, crc32(name.encode())).to_bytes(CHECK_BYTES) + data


def unpack(data: object, decoder: msgspec.msgpack.Decoder[T], name: str = "") -> T | None:
    """The record, or None: the bytes are not those that were written."""
    if not isinstance(data, bytes) or len(data) < CHECK_BYTES:
        return None
    body = data[CHECK_BYTES:]
    if crc32(body, crc32(name.encode())).to_bytes(CHECK_BYTES) != data[:CHECK_BYTES]:
        return None
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError):  # of another version's fields
        return None
