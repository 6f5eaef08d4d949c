"""Every exception the project raises on purpose; each has an HTTP status and a machine code.

Rooms raise these, the server turns them into the wire's error object, the cli into an exit code.
A message says what is wrong, with the numbers; `param` names the field where there is one.
"""

from __future__ import annotations

from typing import Final

MAX_MESSAGE: Final = 2000  # characters


class StreamerError(Exception):
    """Base of the family. `status` is the HTTP status, `type` and `code` the wire's names."""

    status: int = 500
    type: str = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(StreamerError):
    """The caller's mistake; `param` is the field's path."""

    status = 400
    type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """Prompt, or prompt and output, beyond what the model or the block pool can hold."""

    code = "context_length_exceeded"

    @classmethod
    def of_prompt(cls, context: int, what: str, param: str = "prompt") -> ContextLengthExceeded:
        """A prompt that alone is too long, in words by which client libraries recognize it.

        LiteLLM looks for the first half, LangChain for the second; not all libraries read the code.
        """
        text = f"This model's maximum context length is {context} tokens, and the prompt is too "
        return cls(f"{text}long: {what}", param=param)


class NotAuthenticated(InvalidRequest):
    """No key, or an unknown one."""

    status = 401
    code = "invalid_api_key"


class Forbidden(InvalidRequest):
    """An Origin or Host that is not allowed here."""

    status = 403
    code = "forbidden"


class NotFound(InvalidRequest):
    """A model, response or route that is not here (or is another key's)."""

    status = 404
    code = "not_found"


class ReaderTooSlow(InvalidRequest):
    """A reader that lagged for too long; the answer goes on without it and can be resumed."""

    status = 408
    code = "reader_too_slow"


class TooLarge(InvalidRequest):
    """A body or message over the size limit."""

    status = 413
    code = "request_too_large"


class ClientLeft(StreamerError):
    """The client was gone before its request had come whole; only the log shows it."""

    status = 499
    code = "client_left"


class Overloaded(StreamerError):
    """No capacity now; the client should retry after `retry_after_s`."""

    status = 503
    type = "server_error"
    code = "server_overloaded"

    def __init__(
        self, message: str, *, retry_after_s: float = 1.0, code: str | None = None
    ) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """This key's share is used up."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class DeadlineExceeded(StreamerError):
    """The request's own deadline came before its answer."""

    status = 504
    code = "deadline_exceeded"


class EngineDead(StreamerError):
    """The engine stopped for good; `__cause__` is why, for the log and the program alone."""

    status = 503
    code = "engine_dead"


class StepHung(StreamerError):
    """A step did not end within `--watchdog-s`; the engine's thread can't be joined any more."""

    code = "step_hung"


class PoolHung(StreamerError):
    """Every thread that prepares prompts hangs in one, and can't be interrupted."""

    code = "pool_hung"


class RankFailed(StreamerError):
    """One of the processes that compute a model together ended, failed or hangs; names it."""

    code = "rank_failed"


class RequestFailed(StreamerError):
    """One request failed inside a step (a NaN row, say); the others go on."""

    code = "request_failed"


class ConfigError(StreamerError):
    """A flag, environment variable or TOML key that can't be used; `param` names it."""

    status = 400
    type = "invalid_request_error"
    code = "bad_config"


class JournalInUse(ConfigError):
    """A journal that another process has open."""


class ModelNotSupported(ConfigError):
    """A checkpoint that can't be served; says what is missing, before loading.

    The message is cut: what it quotes is not ours, and a field may have megabytes.
    """

    code = "model_not_supported"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        if len(message) > MAX_MESSAGE:
            message = f"{message[:MAX_MESSAGE]} ..."
        super().__init__(message, param=param, code=code)


class NotEnoughMemory(ConfigError):
    """The weights or the KV pool don't fit; carries the numbers and the flags that help."""

    code = "not_enough_memory"


class InvariantViolated(StreamerError):
    """A `check()` found a sum that doesn't hold, or an illegal state change: a Streamer bug."""

    code = "invariant_violated"
