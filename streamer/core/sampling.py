"""SamplingParams: how the next token of a request is chosen, and when it stops.

A frozen value, its types and ranges checked once where it is made; the runner and the scheduler
trust it afterwards. Other forms that a caller may write (a list, numpy's integers, a single stop
string) are converted to the fields' types.
Each parameter is written here once: its checks, the fields of bodies, the flags, their help and
what generation_config.json may say derive from it through PARAMETERS.
Names and meanings follow the OpenAI API and vLLM's extras.

The checks themselves are of any value that comes from outside, and name its field in their error.
Each returns the value as Python's own type, so that later code sees no other: numpy's and other
libraries' numbers are taken where they are whole (or real) numbers, True and False are not.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec

from streamer.errors import InvalidRequest

MAX_N = 64
MAX_LOGPROBS = 20
MAX_STOP_BYTES = 1024
MAX_LOGIT_BIAS = 1024
MAX_TOKENS = 1 << 24
# what shapes a draw: the values that a beam search allows
BESIDE_BEAMS: Mapping[str, tuple[object, ...]] = {
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "hidden_states": (False,),
    "structured_outputs": (None,),
    "thinking_token_budget": (None,),
}
MAX_GRAMMAR_BYTES = 1 << 17
# Of JSON that a model writes: a space, or a new line and its indentation. Not any number of them:
# small models go on with spaces until their answer is cut.
WHITESPACE = r"[ \t]?|\r?\n[ \t]{0,24}"
SHOWN_BITS = 128  # a message spells out integers up to this length
SHOWN_CHARS = 60
MAX_ID = 1 << 62  # the vocabulary's own size is checked where it is known


class Field(msgspec.Struct, frozen=True):
    """A parameter's help, limits and uses, beside its name, type and default.

    help           for `--help` and /openapi.json
    bounds         minimum and maximum of a number, of each number in a list or mapping
    is_above       the minimum itself is out of bounds
    max_entries    of a list or mapping
    is_in_bodies   every body has it, by this name; each endpoint has its own form of the others
    is_flag        terminal commands take it
    is_of_model    generation_config.json may set its default
    """

    help: str
    bounds: tuple[float, float] = (-MAX_ID, MAX_ID)
    is_above: bool = False
    max_entries: int = 0
    is_in_bodies: bool = True
    is_flag: bool = True
    is_of_model: bool = False


class Grammar(msgspec.Struct, frozen=True):
    """What an answer's text must match, as text: equal ones are compiled once.

    kind        json (a schema), json_object (any), regex, choice (a JSON list of texts), grammar
                (Lark), structural_tag (JSON: vLLM's), calls (Lark that the server makes of tools)
    whitespace  regular expression of what may stand between the tokens of JSON; empty: nothing
    """

    kind: str
    text: str = ""
    whitespace: str = WHITESPACE


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling settings of one request."""

    # logits are divided by it
    temperature: Annotated[
        float, Field("0 always takes the best token", (0.0, 2.0), is_of_model=True)
    ] = 1.0
    top_p: Annotated[
        float,
        Field(
            "keep the smallest set of tokens with this probability",
            (0.0, 1.0),
            is_above=True,
            is_of_model=True,
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        Field("keep this many of the best tokens; 0 keeps all", (-1, 1 << 31), is_of_model=True),
    ] = 0  # -1 keeps all, too
    min_p: Annotated[
        float,
        Field(
            "drop tokens below this share of the best one's probability",
            (0.0, 1.0),
            is_of_model=True,
        ),
    ] = 0.0
    # divides positive and multiplies negative logits of tokens in prompt or output (Keskar 2019)
    repetition_penalty: Annotated[
        float,
        Field(
            "above 1: tokens already in prompt or answer are less likely",
            (0.01, 10.0),
            is_of_model=True,
        ),
    ] = 1.0
    # these two are subtracted from the logits of output tokens
    presence_penalty: Annotated[
        float, Field("subtracted from the logits of tokens already in the answer", (-2.0, 2.0))
    ] = 0.0
    frequency_penalty: Annotated[
        float, Field("the same, once for each time a token occurs", (-2.0, 2.0))
    ] = 0.0
    logit_bias: Annotated[
        dict[int, float],
        Field(
            "token id: a number that is added to its logit",
            (-100.0, 100.0),
            max_entries=MAX_LOGIT_BIAS,
            is_flag=False,
        ),
    ] = {}
    # 64-bit key of the noise; None lets the engine draw one and report it
    seed: Annotated[
        int | None, Field("the same seed gives the same answer", (-(1 << 63), (1 << 64) - 1))
    ] = None
    # not part of the text itself
    stop: Annotated[tuple[str, ...], Field("text that ends the answer", max_entries=16)] = ()
    stop_token_ids: Annotated[
        tuple[int, ...], Field("tokens that end the answer", max_entries=128, is_flag=False)
    ] = ()
    # of a choice; None means as many as the context and the pool allow
    max_tokens: Annotated[
        int | None, Field("the longest answer, in tokens", (1, MAX_TOKENS), is_in_bodies=False)
    ] = None
    min_tokens: Annotated[
        int, Field("the answer does not end before this many tokens", (0, MAX_TOKENS))
    ] = 0
    ignore_eos: Annotated[bool, Field("go on after the model's own end")] = False
    # None: none; k: the drawn token's log probability and the k best ones'
    logprobs: Annotated[
        int | None,
        Field(
            "log probabilities of this many of the best tokens",
            (0, MAX_LOGPROBS),
            is_in_bodies=False,
            is_flag=False,
        ),
    ] = None
    # with each token's log probability
    hidden_states: Annotated[
        bool,
        Field("the hidden state that a token is drawn from", is_in_bodies=False, is_flag=False),
    ] = False
    # of every token of the prompt but the first: a prompt that is not taken from the prefix cache
    prompt_logprobs: Annotated[
        int | None,
        Field(
            "likewise for the prompt's tokens", (0, MAX_LOGPROBS), is_in_bodies=False, is_flag=False
        ),
    ] = None
    n: Annotated[
        int,
        Field("independent choices from one prompt", (1, MAX_N), is_in_bodies=False, is_flag=False),
    ] = 1
    # the n best of beam_width hypotheses, instead of n drawn answers
    use_beam_search: Annotated[
        bool, Field("search for the most probable answers, instead of drawing one")
    ] = False
    # None means n
    beam_width: Annotated[
        int | None, Field("hypotheses that a beam search follows at a time", (1, MAX_N))
    ] = None
    # of a beam search: an answer's score is its log probability / its tokens ** length_penalty
    length_penalty: Annotated[
        float, Field("above 0, a beam search prefers longer answers, below 0 shorter ones", (-5, 5))
    ] = 1.0
    early_stopping: Annotated[
        bool | Literal["never"],
        Field(
            'end a beam search as soon as beam_width answers have ended; "never": not before none '
            "can be better",
            is_flag=False,
        ),
    ] = False
    # a mapping is converted: see `grammar`
    structured_outputs: Annotated[
        Grammar | None,
        Field(
            "what the text must match, one of: json (a schema), json_object, regex, choice, "
            "grammar (Lark), structural_tag",
            is_flag=False,
        ),
    ] = None
    # None: any number
    thinking_token_budget: Annotated[
        int | None,
        Field("the longest reasoning, in tokens: it is ended there", (0, MAX_TOKENS)),
    ] = None
    # they stay in the token ids
    skip_special_tokens: Annotated[
        bool, Field("leave special tokens out of the text", is_flag=False)
    ] = True
    # it changes no token, only how many steps they take
    speculation: Annotated[
        bool, Field("propose tokens before they are drawn, where that is faster", is_flag=False)
    ] = True

    def __post_init__(self) -> None:
        for parameter, check in _CHECKS:
            given = getattr(self, parameter.name)
            if given is parameter.default:
                continue
            checked = check(parameter, given)
            if checked is not given:
                msgspec.structs.force_setattr(self, parameter.name, checked)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) exceeds max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        if self.use_beam_search:
            self._check_beams()
        else:
            for name in ("beam_width", "length_penalty", "early_stopping"):
                if getattr(self, name) != PARAMETERS[name].default:
                    raise InvalidRequest(f"{name} requires use_beam_search", param=name)

    def _check_beams(self) -> None:
        """A beam search draws nothing, and ranks by the model's own probabilities."""
        if self.num_beams < self.n:
            raise InvalidRequest(
                f"beam_width ({self.beam_width}) must be at least n ({self.n})", param="beam_width"
            )
        for name, allowed in BESIDE_BEAMS.items():
            if getattr(self, name) not in allowed:
                raise InvalidRequest(f"{name} can't be set beside use_beam_search", param=name)

    @property
    def num_beams(self) -> int:
        """Hypotheses of a beam search."""
        return self.n if self.beam_width is None else self.beam_width

    @property
    def num_sequences(self) -> int:
        """Rows that run at once: its choices, or the hypotheses of its beam search."""
        return self.num_beams if self.use_beam_search else self.n

    @property
    def is_wide_by(self) -> str:
        """The parameter that num_sequences comes from."""
        return "beam_width" if self.use_beam_search and self.beam_width is not None else "n"

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


class Parameter(msgspec.Struct, frozen=True):
    """One of SamplingParams' fields.

    kind  its type without None, which `default` is where the parameter may be absent
    """

    name: str
    kind: Any
    default: Any
    field: Field


def _parameters() -> dict[str, Parameter]:
    hints = get_type_hints(SamplingParams, include_extras=True)
    found = {}
    for each in msgspec.structs.fields(SamplingParams):
        written, field = get_args(hints[each.name])
        # int of `int | None`; `dict[int, float]` has arguments as well, and no None among them
        kinds = [k for k in get_args(written) if k is not NoneType]
        kind = kinds[0] if NoneType in get_args(written) else written
        found[each.name] = Parameter(each.name, kind, each.default, field)
    return found


# ---------------------------------------------------------------- checks of a value from outside


def integer(name: str, value: object, low: int, high: int) -> int:
    """A whole number from `low` to `high`; 2.0 is refused."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise _wrong(name, "an integer", value)
    try:
        whole = operator.index(value)
    except TypeError:  # an array of several
        raise _wrong(name, "an integer", value) from None
    _within(name, whole, low, high)
    return whole


def number(name: str, value: Any, low: float, high: float) -> float:
    """A real number from `low` to `high`, which NaN never is."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number:
        raise _wrong(name, "a number", value)
    _within(name, value, low, high)
    return value if type(value) in (int, float) else float(value)


def flag(name: str, value: object) -> bool:
    """True or False; 0 and 1 are refused."""
    if not isinstance(value, bool):
        raise _wrong(name, "true or false", value)
    return value


def text(name: str, value: object) -> str:
    """A string that can be written as UTF-8: no lone surrogates."""
    if not isinstance(value, str):
        raise _wrong(name, "a string", value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        at = error.start
        raise InvalidRequest(
            f"{name} is not valid Unicode: a lone surrogate at {at}", param=name
        ) from None
    return value


def entries(name: str, value: object) -> Sequence[object]:
    """A list or a tuple."""
    if not isinstance(value, list | tuple):
        raise _wrong(name, "a list", value)
    return value


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """Whole numbers; one pass in C where they are Python's own."""
    ids = entries(name, value)
    if set(map(type, ids)) <= {int}:
        return tuple(ids)  # type: ignore[arg-type]  # as the line above has it
    return tuple(integer(f"{name}[{i}]", each, -MAX_ID, MAX_ID) for i, each in enumerate(ids))


def grammar(name: str, value: object) -> Grammar:
    """A Grammar, or vLLM's mapping with one of `json`, `regex`, `choice`, `grammar`, `json_object`
    and `structural_tag`, and for JSON `disable_any_whitespace` or `whitespace_pattern`."""
    if isinstance(value, Grammar):
        return value
    if not isinstance(value, Mapping):
        raise _wrong(name, "an object", value)
    given = {key: each for key, each in value.items() if each is not None and each is not False}
    options = {key: given.pop(key) for key in _GRAMMAR_OPTIONS & given.keys()}
    if unknown := given.keys() - _GRAMMAR_KINDS.keys():
        field = f"{name}.{min(map(str, unknown)):.40}"
        raise InvalidRequest(f"{field} is not supported by this server", param=field)
    if len(given) != 1:
        kinds = ", ".join(_GRAMMAR_KINDS)
        raise InvalidRequest(f"{name} has exactly one of {kinds}", param=name)
    ((kind, each),) = given.items()
    field = f"{name}.{kind}"
    source = _GRAMMAR_KINDS[kind](field, each)
    if len(source.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"{field} has {len(source.encode())} bytes, the limit is {MAX_GRAMMAR_BYTES}",
            param=field,
        )
    return Grammar(kind, source, _whitespace(name, options))


_GRAMMAR_OPTIONS = frozenset(("disable_any_whitespace", "whitespace_pattern"))


def _whitespace(name: str, options: Mapping[str, object]) -> str:
    if flag(f"{name}.disable_any_whitespace", options.get("disable_any_whitespace", False)):
        return ""
    field = f"{name}.whitespace_pattern"
    given = text(field, options.get("whitespace_pattern", WHITESPACE))
    if len(given) > MAX_STOP_BYTES:
        raise InvalidRequest(f"{field} has more than {MAX_STOP_BYTES} characters", param=field)
    return given


def _json_of(field: str, value: object) -> str:
    """JSON: as text, or as the value that the text means."""
    if isinstance(value, str):
        return text(field, value)
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequest(f"{field}: {reason}", param=field) from None


def _choices_of(field: str, value: object) -> str:
    choices = [text(f"{field}[{i}]", each) for i, each in enumerate(entries(field, value))]
    if not choices or not all(choices):
        raise InvalidRequest(f"{field} has one text or more, none empty", param=field)
    return msgspec.json.encode(choices).decode()


def _text_of(field: str, value: object) -> str:
    found = text(field, value)
    if not found:
        raise InvalidRequest(f"{field} is empty", param=field)
    return found


def _any_object(field: str, value: object) -> str:
    flag(field, value)
    return ""


_GRAMMAR_KINDS: Mapping[str, Callable[[str, object], str]] = {
    "json": _json_of,
    "json_object": _any_object,
    "regex": _text_of,
    "choice": _choices_of,
    "grammar": _text_of,
    "structural_tag": _json_of,
}


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # NaN is not; an integer of any length compares exactly
        if isinstance(value, int) and value.bit_length() > SHOWN_BITS:
            got = f"an integer of {value.bit_length()} bits"
        else:
            got = str(value)
        raise InvalidRequest(f"{name} must be from {low} to {high}, got {got}", param=name)


def _wrong(name: str, expected: str, value: object) -> InvalidRequest:
    is_short = isinstance(value, int) and value.bit_length() <= SHOWN_BITS
    is_shown = is_short or isinstance(value, float | str | bytes)
    shown = f" {repr(value)[:SHOWN_CHARS]}" if is_shown else ""
    return InvalidRequest(
        f"{name} must be {expected}, got {type(value).__name__}{shown}", param=name
    )


# ---------------------------------------------------------------- checks of a parameter, by type


def _number(parameter: Parameter, value: object) -> float:
    name, (low, high) = parameter.name, parameter.field.bounds
    checked = number(name, value, low, high)
    if parameter.field.is_above and checked == low:
        raise InvalidRequest(f"{name} must be above {low:g}", param=name)
    return checked


def _integer(parameter: Parameter, value: object) -> int:
    low, high = parameter.field.bounds
    return integer(parameter.name, value, int(low), int(high))


def _flag(parameter: Parameter, value: object) -> bool:
    return flag(parameter.name, value)


def _flag_or_never(parameter: Parameter, value: object) -> bool | str:
    if isinstance(value, bool) or (isinstance(value, str) and value == "never"):
        return value
    raise _wrong(parameter.name, 'true, false or "never"', value)


def _strings(parameter: Parameter, value: object) -> tuple[str, ...]:
    name = parameter.name
    given = (value,) if isinstance(value, str) else entries(name, value)
    _check_length(parameter, len(given))
    found = tuple(text(f"{name}[{i}]", each) for i, each in enumerate(given))
    for i, each in enumerate(found):
        if not 0 < len(each.encode()) <= MAX_STOP_BYTES:
            raise InvalidRequest(
                f"a {name} string has 1 to {MAX_STOP_BYTES} bytes", param=f"{name}[{i}]"
            )
    return found


def _token_ids(parameter: Parameter, value: object) -> tuple[int, ...]:
    _check_length(parameter, len(entries(parameter.name, value)))
    return token_ids(parameter.name, value)


def _numbers_of_ids(parameter: Parameter, value: object) -> dict[int, float]:
    name, (low, high) = parameter.name, parameter.field.bounds
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must map token ids to numbers", param=name)
    _check_length(parameter, len(value))
    found = {}  # a copy: the caller's may change
    for token, each in value.items():
        entry = f"{name}.{token!s:.20}"
        found[integer(entry, token, -MAX_ID, MAX_ID)] = number(entry, each, low, high)
    return found


def _grammar(parameter: Parameter, value: object) -> Grammar:
    return grammar(parameter.name, value)


def _check_length(parameter: Parameter, length: int) -> None:
    name, limit = parameter.name, parameter.field.max_entries
    if length > limit:
        raise InvalidRequest(f"{name} has {length} entries, the limit is {limit}", param=name)


_CHECK_OF: Mapping[Any, Callable[[Parameter, object], object]] = {
    float: _number,
    int: _integer,
    bool: _flag,
    bool | Literal["never"]: _flag_or_never,
    tuple[str, ...]: _strings,
    tuple[int, ...]: _token_ids,
    dict[int, float]: _numbers_of_ids,
    Grammar: _grammar,
}

PARAMETERS: Mapping[str, Parameter] = _parameters()
_CHECKS = tuple((parameter, _CHECK_OF[parameter.kind]) for parameter in PARAMETERS.values())


def params_over(defaults: Mapping[str, float], given: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams of a model's own defaults, overridden by the `given` fields.

    A beam search has no defaults of drawing, since it draws nothing.
    """
    absent = BESIDE_BEAMS if given.get("use_beam_search") else ()
    values = {
        name: msgspec.convert(value, PARAMETERS[name].kind, strict=False)
        for name, value in defaults.items()
        if name in PARAMETERS and name not in given and name not in absent
    }
    return SamplingParams(**values, **given)


def model_defaults(found: Mapping[str, float]) -> dict[str, float]:
    """What a request without them has of the settings that a model may decide.

    `found` are those that its generation_config.json decides.
    """
    params = params_over(found, {})
    return {
        name: getattr(params, name)
        for name, parameter in PARAMETERS.items()
        if parameter.field.is_of_model
    }
