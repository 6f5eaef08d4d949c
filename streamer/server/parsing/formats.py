"""Formats: how each family of models writes tool calls and reasoning, and which one a template has.

Declarations under vLLM's names of its parsers; parser.py reads a text by them. A family that writes
its calls in one of the three shapes is a new entry here and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, TypeVar

import msgspec

from streamer.errors import ConfigError
from streamer.tokenizer.response_template import ResponseTemplate

V = TypeVar("V")

NONE: Final = "none"
TEMPLATE_CALLS: Final = "tool_calls"  # the field of a response_template


class Think(msgspec.Struct, frozen=True):
    """Reasoning stands between two markers, before the answer."""

    open: str
    close: str


class Parameters(msgspec.Struct, frozen=True):
    """Arguments of a call one by one, as tagged text whose type the tool's schema says.

    key    what stands around a parameter's name
    value  around its value; the beginnings of one that is text, and of one that is JSON
    is_on_own_line  a line break after the beginning and before the end is not part of the value
    """

    key: tuple[str, str]
    value: tuple[tuple[str, ...], str]
    is_on_own_line: bool = False


class Calls(msgspec.Struct, frozen=True, tag=True):
    """How a call is written, between `open` and `close`.

    body       object: JSON with name and arguments, or a list of such; arguments: the name, then
               JSON; parameters: the name, then Parameters
    section    what stands around several calls, or around each where is_alone
    name_ends  what ends the name, where that is not a brace or a bracket
    arguments  the name of the arguments in an object
    is_list    calls are written as a list of objects, whatever else is read
    is_bare    a call may also be the whole answer, without `open`
    id_length  of the ids of calls; the template of some models asserts it
    names_id   the name is an id such as functions.NAME:0
    fence      may stand between arguments and `close`
    """

    open: str
    close: str
    body: Literal["object", "arguments", "parameters"]
    section: tuple[str, str] | None = None
    name_ends: tuple[str, ...] = ()
    parameters: Parameters | None = None
    is_alone: bool = False
    arguments: str = "arguments"
    is_list: bool = False
    is_bare: bool = False
    id_length: int = 24
    names_id: bool = False
    fence: str = ""

    @property
    def openings(self) -> tuple[str, ...]:
        """What a call, or a section of calls, begins with."""
        return (self.open,) if self.section is None else (self.section[0], self.open)


class Channels(msgspec.Struct, frozen=True, tag=True):
    """The whole answer is messages with a header each, which says what they are (Harmony)."""

    start: str = "<|start|>"
    channel: str = "<|channel|>"
    message: str = "<|message|>"
    ends: tuple[str, ...] = ("<|end|>", "<|call|>", "<|return|>")

    @property
    def marks(self) -> Marks:
        """Its reasoning is all messages before the one of the final channel."""
        final, json = f"{self.channel}final", " <|constrain|>json"
        ends = f"{final}{self.message}", f"{final}{json}{self.message}"
        return Marks(self.channel, ends, f"{self.ends[0]}{self.start}assistant{ends[0]}")


class Marks(NamedTuple):
    """Texts around the reasoning, and the one that closes it at a budget's end."""

    opens: str
    ends: tuple[str, ...]
    closing: str


def has_calls(template: ResponseTemplate | None) -> bool:
    """Whether a template declares calls of tools."""
    return template is not None and TEMPLATE_CALLS in template.fields


class ModelFormat(msgspec.Struct, frozen=True):
    """What may be in a text besides prose; `channels` excludes the marks of `think`.

    template  the checkpoint's own declaration, in place of the others
    """

    think: Think | None = None
    calls: Calls | Channels | None = None
    channels: Channels | None = None
    template: ResponseTemplate | None = None

    @property
    def has_calls(self) -> bool:
        """Whether calls are written in a known form."""
        return self.calls is not None or has_calls(self.template)

    @property
    def marks(self) -> Marks | None:
        """What stands around the reasoning; None: there is none."""
        if self.channels is not None:
            return self.channels.marks
        think = self.think
        return None if think is None else Marks(think.open, (think.close,), think.close)

    def stage(self, prompt: str) -> Literal["before", "inside", "after"]:
        """Where the end of a prompt's text stands in the reasoning, if there is any."""
        marks, end = self.marks, prompt.rstrip()
        if marks is None or end.endswith(marks.ends):
            return "after"
        is_inside = self.channels is not None or end.endswith(marks.opens)
        return "inside" if is_inside else "before"

    @property
    def markers(self) -> tuple[str, ...]:
        """Every text by which the format is recognized: shown even if it is a special token."""
        found: list[str] = []
        if self.think is not None:
            found += [self.think.open, self.think.close]
        for each in (self.calls, self.channels):
            if isinstance(each, Channels):
                found += [each.start, each.channel, each.message, *each.ends]
                found += ["<|constrain|>"]
        calls = self.calls
        if isinstance(calls, Calls):
            found += [*calls.openings, calls.close, *calls.name_ends, *(calls.section or ())]
            if calls.parameters is not None:
                keys, (begins, end) = calls.parameters.key, calls.parameters.value
                found += [*keys, *begins, end]
        return tuple(filter(None, found))


HARMONY: Final = Channels()
_QWEN = Calls(
    "<function=",
    "</function>",
    "parameters",
    section=("<tool_call>", "</tool_call>"),
    is_alone=True,
    name_ends=(">",),
    parameters=Parameters(("<parameter=", ">"), (("",), "</parameter>"), is_on_own_line=True),
)
_LLAMA = Calls("<|python_tag|>", "<|eom_id|>", "object", arguments="parameters", is_bare=True)
_GLM = Calls(
    "<tool_call>",
    "</tool_call>",
    "parameters",
    parameters=Parameters(("<arg_key>", "</arg_key>"), (("<arg_value>",), "</arg_value>")),
)
_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_V31 = Calls(
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "arguments",
    section=_DEEPSEEK_SECTION,
    name_ends=("<｜tool▁sep｜>",),
)

TOOL_FORMATS: Final[Mapping[str, Calls | Channels]] = {
    "hermes": Calls("<tool_call>", "</tool_call>", "object"),
    "qwen3_coder": _QWEN,
    "qwen3_xml": _QWEN,
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "mistral": Calls(
        "[TOOL_CALLS]", "", "arguments", name_ends=("[ARGS]", "[CALL_ID]"), id_length=9
    ),
    "deepseek_v3": Calls(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "arguments",
        section=_DEEPSEEK_SECTION,
        name_ends=("\n```json",),
        fence="```",
    ),
    "deepseek_v31": _DEEPSEEK_V31,
    "deepseek_v32": Calls(
        '<｜DSML｜invoke name="',
        "</｜DSML｜invoke>",
        "parameters",
        section=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        name_ends=('">',),
        parameters=Parameters(
            ('<｜DSML｜parameter name="', '"'),
            ((' string="true">', ' string="false">'), "</｜DSML｜parameter>"),
        ),
    ),
    "openai": HARMONY,
    "glm45": _GLM,
    "glm47": _GLM,
    "kimi_k2": Calls(
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        "arguments",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        name_ends=("<|tool_call_argument_begin|>",),
        names_id=True,
    ),
    "minimax_m2": Calls(
        '<invoke name="',
        "</invoke>",
        "parameters",
        section=("<minimax:tool_call>", "</minimax:tool_call>"),
        name_ends=('">',),
        parameters=Parameters(('<parameter name="', '">'), (("",), "</parameter>")),
    ),
}

_THINK = Think("<think>", "</think>")
REASONING_FORMATS: Final[Mapping[str, Think | Channels]] = {
    **dict.fromkeys(
        ("deepseek_r1", "qwen3", "deepseek_v3", "glm45", "kimi_k2", "minimax_m2"), _THINK
    ),
    "mistral": Think("[THINK]", "[/THINK]"),
    "seed_oss": Think("<seed:think>", "</seed:think>"),
    "openai_gptoss": HARMONY,
}

# What a chat template must contain, all of it, to be of a format: the first that suits is taken.
_TOOL_SIGNS: Final[Mapping[str, tuple[str, ...]]] = {
    "openai": ("<|channel|>", "<|message|>"),
    "deepseek_v32": ("｜DSML｜",),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "```json"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>",),
    "kimi_k2": ("<|tool_calls_section_begin|>",),
    "minimax_m2": ("<minimax:tool_call>",),
    "glm45": ("<arg_key>",),
    "qwen3_coder": ("<function=", "<parameter="),
    "hermes": ("<tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "llama3_json": ("<|python_tag|>",),
}
_REASONING_SIGNS: Final[Mapping[str, tuple[str, ...]]] = {
    "openai_gptoss": ("<|channel|>", "<|message|>"),
    "mistral": ("[THINK]",),
    "seed_oss": ("<seed:think>",),
    "qwen3": ("</think>",),
}
_LLAMA_SIGNS: Final = ('{"name": function name, "parameters":',)


def find_format(
    template: str, tool_parser: str | None, reasoning_parser: str | None
) -> ModelFormat:
    """The format of a model's answers, from its chat template where no parser is named.

    Raises ConfigError for a name that is none of vLLM's known here.
    """
    if tool_parser is None and all(sign in template for sign in _LLAMA_SIGNS):
        tool_parser = "llama3_json"
    calls = _chosen("tool_call_parser", tool_parser, TOOL_FORMATS, _detect(template, _TOOL_SIGNS))
    if isinstance(calls, Calls) and calls == TOOL_FORMATS["mistral"]:
        calls = msgspec.structs.replace(calls, is_list=calls.name_ends[0] not in template)
    think = _chosen(
        "reasoning_parser",
        reasoning_parser,
        REASONING_FORMATS,
        _detect(template, _REASONING_SIGNS),
    )
    if isinstance(think, Channels):
        return ModelFormat(None, calls, think)
    return ModelFormat(think, calls, calls if isinstance(calls, Channels) else None)


def _detect(template: str, signs: Mapping[str, tuple[str, ...]]) -> str:
    return next((n for n, all_of in signs.items() if all(s in template for s in all_of)), NONE)


def _chosen(
    param: str,
    given: str | None,
    known: Mapping[str, V],
    detected: str,
) -> V | None:
    name = detected if given is None else given
    if name == NONE:
        return None
    if name not in known:
        raise ConfigError(
            f"{param}: expected one of {', '.join(sorted(known))}, none, got {name!r}", param=param
        )
    return known[name]
