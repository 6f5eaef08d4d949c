"""ChatTemplate: messages to text through the checkpoint's Jinja template, in a sandbox.

Templates come with a checkpoint or from the operator, never from a request. Owned by
streamer.tokenizer; called in the thread pool.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, NoReturn

from jinja2 import nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from streamer.errors import ConfigError, InvalidRequest
from streamer.tokenizer_special import Disguise, change_strings

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


class Said(NamedTuple):
    """A turn that was computed: its ids count for its text, whatever that text would encode to.

    messages  what its prompt said;  is_open  with the generation prompt
    answer    the text that followed;  ids  of prompt and answer
    """

    messages: Sequence[Mapping[str, Any]]
    is_open: bool
    answer: str
    ids: Sequence[int]


class ChatTemplate:
    """One compiled template; `tokens` are names such as bos_token that it may use."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as e:
            raise ConfigError(
                f"the chat template has an error in line {e.lineno}: {e.message}",
                param="chat_template",
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

        variables  more that the template may use, by names that are not its own
        disguise  changes what the caller wrote, before the template sees it
        """
        flat = [_flatten(message, i) for i, message in enumerate(messages)]
        if disguise is not None:
            # Roles stay: templates compare them.
            flat = [change_strings(m, disguise) | _role(m) for m in flat]
            tools = change_strings(tools, disguise)
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
        try:
            return self._template.render({**(variables or {}), **given})
        except TEMPLATE_ERRORS as e:
            why = str(e) if disguise is None else disguise.reveal(str(e))
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {why}", param="messages"
            ) from e


def _flatten(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A message whose content is one string: text parts joined, nothing for null."""
    flat = dict(message)
    content = flat.get("content")
    if content is None:
        flat["content"] = ""
    elif not isinstance(content, str):
        if not isinstance(content, Sequence):
            raise InvalidRequest("content is a string or parts", param=f"messages[{index}].content")
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
        raise InvalidRequest(f"{where}: this model reads text parts alone, got {kind}", param=where)
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text is no string", param=f"{where}.text")
    return text


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Without HTML escapes, which Jinja's own filter adds and no model was trained on."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what a model is trained on; here, nothing."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as a set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body as it stands."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
