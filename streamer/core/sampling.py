"""SamplingParams: how the next token of a request is chosen, and when it stops.

A frozen value, its types and ranges checked once where it is made; the runner and the scheduler
trust it afterwards. What a caller may write otherwise (a list, numpy's integers, one stop string by
itself) becomes what the fields say.
Names and meanings follow the OpenAI API and vLLM's extras.
"""

from __future__ import annotations

import msgspec

from streamer.core.checks import MAX_ID, entries, flag, integer, number, text, token_ids
from streamer.errors import InvalidRequest

MAX_N = 64
MAX_LOGPROBS = 20
MAX_STOP = 16
MAX_STOP_BYTES = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_TOKENS = 1 << 24

_NUMBERS = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 10.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
_INTEGERS = {
    "top_k": (-1, 1 << 31),
    "seed": (-(1 << 63), (1 << 64) - 1),
    "max_tokens": (1, MAX_TOKENS),
    "min_tokens": (0, MAX_TOKENS),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "n": (1, MAX_N),
}
_MAY_BE_ABSENT = frozenset(("seed", "max_tokens", "logprobs", "prompt_logprobs"))


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling settings of one request.

    temperature  0 is greedy; else logits are divided by it (0 to 2)
    top_k        keep the k best tokens; 0 or -1 keeps all
    top_p        keep the smallest set whose probability reaches p (0 exclusive to 1)
    min_p        drop tokens below min_p times the best one's probability (0 to 1)
    repetition_penalty  divides positive and multiplies negative logits of tokens seen in prompt or
                 output (Keskar et al. 2019); 1 is off
    presence_penalty, frequency_penalty  subtracted from the logits of output tokens, once or per
                 occurrence (-2 to 2)
    logit_bias   token id -> added to its logit (-100 to 100)
    seed         64-bit key of the noise; None lets the engine draw one and report it
    stop         strings that end the text (not part of it); stop_token_ids likewise, as tokens
    max_tokens   output tokens a choice; None means as many as the context and the pool allow
    min_tokens   no end before so many output tokens
    ignore_eos   the model's own end tokens are ordinary tokens
    logprobs     None: none; k: the drawn token's log probability and the k best ones' (0 to 20)
    prompt_logprobs  the same of every token of the prompt but the first: a prompt that is not
                 taken from the prefix cache
    n            independent choices from one prompt
    skip_special_tokens  leave special tokens out of the text (they stay in the token ids)
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, (low, high) in _NUMBERS.items():
            self._set(name, number(name, getattr(self, name), low, high))
        if self.top_p == 0.0:
            raise InvalidRequest("top_p must be above 0", param="top_p")
        for name, (least, most) in _INTEGERS.items():
            value = getattr(self, name)
            if value is not None or name not in _MAY_BE_ABSENT:
                self._set(name, integer(name, value, least, most))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) exceeds max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        flag("ignore_eos", self.ignore_eos)
        flag("skip_special_tokens", self.skip_special_tokens)
        self._check_lists()

    def _check_lists(self) -> None:
        given: object = self.stop
        stop = (given,) if isinstance(given, str) else entries("stop", given)
        _at_most("stop", len(stop), MAX_STOP)
        for i, each in enumerate(stop):
            if not 0 < len(text(f"stop[{i}]", each).encode()) <= MAX_STOP_BYTES:
                raise InvalidRequest(
                    f"a stop string has 1 to {MAX_STOP_BYTES} bytes", param=f"stop[{i}]"
                )
        self._set("stop", tuple(stop))
        _at_most(
            "stop_token_ids",
            len(entries("stop_token_ids", self.stop_token_ids)),
            MAX_STOP_TOKEN_IDS,
        )
        self._set("stop_token_ids", token_ids("stop_token_ids", self.stop_token_ids))
        if not isinstance(self.logit_bias, dict):
            raise InvalidRequest("logit_bias must map token ids to numbers", param="logit_bias")
        if not self.logit_bias:
            return
        _at_most("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        bias = {}
        for token, value in self.logit_bias.items():
            name = f"logit_bias.{token!s:.20}"
            token_id = integer(name, token, -MAX_ID, MAX_ID)
            bias[token_id] = number(name, value, -100.0, 100.0)
        self._set("logit_bias", bias)  # its own: the caller's may change

    def _set(self, name: str, value: object) -> None:
        if getattr(self, name) is not value:
            msgspec.structs.force_setattr(self, name, value)

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is taken without noise."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on the tokens so far."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def _at_most(name: str, length: int, limit: int) -> None:
    if length > limit:
        raise InvalidRequest(f"{name} has {length} entries, the limit is {limit}", param=name)
