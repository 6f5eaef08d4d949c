"""ChatTemplate: messages to text through the checkpoint's Jinja template, in a sandbox.

Templates come with a checkpoint or from the operator, never from a request. Owned by
streamer.tokenizer.tokenizer; called in the thread pool.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, NoReturn

from jinja2 import nodes, pass_context
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from streamer.errors import ConfigError, InvalidRequest
from streamer.tokenizer.special import Disguise, change_strings

TEXT_PARTS = ("text", "input_text", "output_text")
# What templates raise over messages they were not written for.
TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class EarlierTurn(NamedTuple):
    """A turn that was computed: its ids stand for its text, however that text would encode.

    messages  of its prompt;  is_open  with the generation prompt
    answer    the text that followed;  ids  of prompt and answer;  tools, variables  of its prompt
    """

    messages: Sequence[Mapping[str, Any]]
    is_open: bool
    answer: str
    ids: Sequence[int]
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] | None = None


MAX_TEMPLATE = 1 << 20  # characters; the longest of known models have 20,000
MAX_MADE = 64 << 20  # characters or items that one operation, or a whole rendering, may make
MAX_NUMBER = 1 << 16  # as a width, and bits of a power
MAX_RENDER_S = 30.0
# In a format: a width of five digits, or one that comes from an argument.
_WIDE = re.compile(r"%[^a-zA-Z%]*(\*|[0-9]{5})|\{[^}]*(\{|:[^}]*[0-9]{5})")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a bound on the size of one operation's result.

    Intercepted operators are not folded at compile time either: `'a' * 10**10` took the host's
    memory when the template was compiled.
    """

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """TemplateError for a result beyond the bounds; operands have any type and size."""
        sizes = [len(v) for v in (left, right) if isinstance(v, str | bytes | list | tuple)]
        if operator == "+" and sum(sizes) > MAX_MADE:
            raise TemplateError("a sum is too long")
        if operator == "*" and sizes:
            times = [v for v in (left, right) if isinstance(v, int)]
            if times and sizes[0] * times[0] > MAX_MADE:
                raise TemplateError("a repetition is too long")
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            factor = max(right, 0) if operator == "**" else 1
            if left.bit_length() * factor > MAX_NUMBER:
                raise TemplateError("a number is too large")
        if operator == "%" and isinstance(left, str):
            _require_narrow(left, (), {})
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Bounds the width in a string's own methods (ljust, zfill ...)."""
        if isinstance(getattr(obj, "__self__", None), str | bytes):
            _require_narrow(None, args, kwargs)
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        """Bounds the width in `'{:9}'.format`, which the sandbox replaces with its own."""
        wrapped: Any = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def narrow(*args: Any, **kwargs: Any) -> str:
            _require_narrow(value.__self__, args, kwargs)
            return str(wrapped(*args, **kwargs))

        return narrow


def _require_narrow(template: str | None, args: Any, kwargs: Any) -> None:
    """TemplateError for a format with a large width, or (None: no format) a large argument."""
    if template is None:
        numbers = [v for v in (*args, *kwargs.values()) if isinstance(v, int)]
        is_wide = max(numbers, default=0) > MAX_NUMBER
    else:
        is_wide = _WIDE.search(template) is not None
    if is_wide:
        raise TemplateError("a width is too large")


def _narrow(name: str, filter_: Any) -> Any:
    """A filter with its width bounded, never folded when the template is compiled."""

    @pass_context
    def checked(_: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        _require_narrow(str(value) if name == "format" else None, args, kwargs)
        return filter_(value, *args, **kwargs)

    return checked


class ChatTemplate:
    """One compiled template; `tokens` are names such as bos_token that it may use."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        if len(source) > MAX_TEMPLATE:
            raise ConfigError(
                f"the chat template has {len(source)} characters; the maximum is {MAX_TEMPLATE}",
                param="chat_template",
            )
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        for name in ("batch", "center", "format", "indent", "tojson"):
            environment.filters[name] = _narrow(name, environment.filters[name])
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as e:
            raise ConfigError(
                f"the chat template has an error in line {e.lineno}: {e.message}",
                param="chat_template",
            ) from None
        except SyntaxError as e:  # a break outside a loop: Python's own compiler sees it
            raise ConfigError(
                f"the chat template has an error: {e.msg}", param="chat_template"
            ) from None
        self._tokens = dict(tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None = None,
        disguise: Disguise | None = None,
    ) -> str:
        """The conversation as text; InvalidRequest if the messages don't suit the template.

        variables  further variables of the template, under names that are not its own
        disguise  changes what the caller wrote, before the template sees it
        """
        flat = [_flatten(message, i) for i, message in enumerate(messages)]
        if disguise is not None:
            # Roles stay: templates compare them.
            flat = [_hidden(m, disguise, "messages") | _role(m) for m in flat]
            tools = _hidden(tools, disguise, "tools")
            variables = change_strings(variables, disguise)
        given = {
            **self._tokens,
            "messages": flat,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        taken = next((name for name in variables or () if name in given), None)
        if taken is not None:
            raise InvalidRequest(
                f"{taken} is the chat template's own", param=f"chat_template_kwargs.{taken}"
            )
        values = {**(variables or {}), **given}
        try:
            try:
                return _joined(self._template.generate(values))
            except _Refused:
                if (strict := _in_turns(flat)) == flat:
                    raise
                return _joined(self._template.generate({**values, "messages": strict}))
        except TEMPLATE_ERRORS as e:
            why = str(e) if disguise is None else disguise.reveal(str(e))
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {why}", param="messages"
            ) from e


def _hidden(value: Any, disguise: Disguise, param: str) -> Any:
    """What a caller wrote, disguised: a schema, or arguments of a call, may be of any depth."""
    try:
        return change_strings(value, disguise)
    except RecursionError:
        raise InvalidRequest(f"{param} are nested too deeply", param=param) from None


def _joined(pieces: Iterator[str]) -> str:
    """A rendering's text; TemplateError beyond MAX_MADE characters or MAX_RENDER_S."""
    made, num_made, until = [], 0, time.monotonic() + MAX_RENDER_S
    for piece in pieces:
        made.append(piece)
        num_made += len(piece)
        if num_made > MAX_MADE:
            raise TemplateError(f"it makes more than {MAX_MADE} characters")
        if time.monotonic() > until:
            raise TemplateError(f"it takes more than {MAX_RENDER_S:g} s")
    return "".join(made)


def _flatten(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A message whose content is one string: text parts joined, nothing for null."""
    flat = dict(message)
    content = flat.get("content")
    if content is None:
        flat["content"] = ""
    elif not isinstance(content, str):
        if not isinstance(content, Sequence):
            raise InvalidRequest(
                "content must be a string or parts", param=f"messages[{index}].content"
            )
        texts = [
            _part_text(part, f"messages[{index}].content[{i}]") for i, part in enumerate(content)
        ]
        flat["content"] = "".join(texts)
    return flat


def _role(message: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": message["role"]} if "role" in message else {}


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in TEXT_PARTS:
        raise InvalidRequest(
            f"{where}: this model accepts only text parts, got {kind}", param=where
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text is not a string", param=f"{where}.text")
    return text


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """JSON without HTML escapes, which Jinja's filter adds and no model was trained on."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


class _Refused(TemplateError):
    """What a template itself raises."""


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _in_turns(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same, for a template whose turns alternate after one message of the system.

    Agents write several messages of the system, later ones too: those become the user's.
    """
    found: list[dict[str, Any]] = []
    for message in messages:
        is_late = message.get("role") == "system" and any(m["role"] != "system" for m in found)
        role = "user" if is_late else message.get("role")
        if found and found[-1]["role"] == role and role in ("system", "user"):
            text = f"{found[-1]['content']}\n\n{message['content']}"
            found[-1] = {**found[-1], "content": text}
        else:
            found.append({**message, "role": role})
    return found


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what a model is trained on; no effect here."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as a set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The block's body, unchanged."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
