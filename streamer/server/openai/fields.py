"""Known fields: which ones a body honours, which it refuses, and how a body is decoded.

Every body has one table over all fields that OpenAI's types and vLLM's extras know. A field is
honoured, a hint (accepted: it asks for nothing this server could do otherwise), or refused with a
400 that names it, unless its value is one that changes nothing. Unknown fields are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from streamer.errors import InvalidRequest

T = TypeVar("T")


class Rule(msgspec.Struct, frozen=True):
    """What happens to a known field.

    is_honoured  the body's Struct has it
    harmless     values (besides null) that ask for nothing; None: every value is harmless
    """

    is_honoured: bool = False
    harmless: tuple[Any, ...] | None = ()


Table = dict[str, Rule]

HONOURED: Final = Rule(is_honoured=True)
HINT: Final = Rule(harmless=None)


def refused(*harmless: Any) -> Rule:
    """A field that is refused unless null or one of these values."""
    return Rule(harmless=harmless)


# Sampling fields of every body, at top level: OpenAI's, vLLM's, and our own detach_s.
SAMPLING: Final[Table] = {
    "temperature": HONOURED,
    "top_p": HONOURED,
    "top_k": HONOURED,
    "min_p": HONOURED,
    "repetition_penalty": HONOURED,
    "presence_penalty": HONOURED,
    "frequency_penalty": HONOURED,
    "logit_bias": HONOURED,
    "seed": HONOURED,
    "stop": HONOURED,
    "stop_token_ids": HONOURED,
    "min_tokens": HONOURED,
    "ignore_eos": HONOURED,
    "skip_special_tokens": HONOURED,
    "return_token_ids": HONOURED,
    "priority": HONOURED,
    "cache_salt": HONOURED,
    "detach_s": HONOURED,
    # vLLM's, not (yet) ours
    "use_beam_search": refused(False),
    "length_penalty": refused(1.0),
    "include_stop_str_in_output": refused(False),
    "spaces_between_special_tokens": refused(True),
    "truncate_prompt_tokens": refused(),
    "prompt_logprobs": refused(),
    "allowed_token_ids": refused([]),
    "bad_words": refused([]),
    "logits_processors": refused([]),
    "structured_outputs": refused(),
    "guided_json": refused(),
    "guided_regex": refused(),
    "guided_choice": refused(),
    "guided_grammar": refused(),
    "guided_decoding_backend": refused(),
    "guided_whitespace_pattern": refused(),
    "structural_tag": refused(),
    "return_tokens_as_token_ids": refused(False),
    "kv_transfer_params": refused(),
    "vllm_xargs": refused(),
    "repetition_detection": refused(),
    "request_id": refused(),
}

# Who is asking, and where a cache might be warm: labels, nothing to act on.
LABELS: Final[Table] = {
    "user": HINT,
    "safety_identifier": HINT,
    "prompt_cache_key": HINT,
}

_RAW = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ANY = msgspec.json.Decoder()
_PATH = re.compile(r"^(?P<what>.*) - at (?:`key` in )?`\$\.?(?P<path>.*)`$", re.DOTALL)


def decode_body(data: bytes | str, decoder: msgspec.json.Decoder[T], table: Table) -> T:
    """The typed body, or InvalidRequest whose `param` is the path of the first field at fault."""
    try:
        _refuse(
            {
                name: rule.harmless
                for name, raw in _RAW.decode(data).items()
                if (rule := table.get(name)) is not None
                and not rule.is_honoured
                and rule.harmless is not None
                and not _is_harmless(_ANY.decode(raw), rule.harmless)
            }
        )
        return decoder.decode(data)
    except msgspec.ValidationError as e:
        raise located(str(e)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise InvalidRequest(f"the body is not valid JSON: {e}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None


def _is_harmless(value: Any, harmless: tuple[Any, ...]) -> bool:
    return value is None or any(
        value == h and isinstance(value, bool) == isinstance(h, bool) for h in harmless
    )


def _refuse(faults: Mapping[str, tuple[Any, ...]]) -> None:
    """InvalidRequest that names every field at fault, `param` the first, if there are any."""
    if not faults:
        return
    first, *others = faults
    if others:
        text = f"{', '.join(faults)} are not supported by this server; leave them out or send null"
    else:
        allowed = [msgspec.json.encode(h).decode() for h in faults[first]]
        hint = f"leave it out, or send null or {', '.join(allowed)}"
        text = f"{first} is not supported by this server; "
        text += hint if allowed else "leave it out or send null"
    raise InvalidRequest(text, param=first, code="unsupported_parameter")


def located(text: str, code: str = "invalid_type") -> InvalidRequest:
    """msgspec's complaint as an error whose `param` is the path of the field."""
    match = _PATH.match(text)
    if match is None:
        return InvalidRequest(text, param=missing_field(text), code=code)
    path, what = match["path"], match["what"]
    missing = missing_field(what)
    if missing is not None:
        path = f"{path}.{missing}" if path else missing
    return InvalidRequest(f"{path or 'the body'}: {what}", param=path or None, code=code)


def missing_field(text: str) -> str | None:
    """The name in msgspec's "Object missing required field `name`"."""
    match = re.match(r"Object missing required field `([^`]*)`", text)
    return match[1] if match else None
