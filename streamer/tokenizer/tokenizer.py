"""Tokenizer: text to token ids and back, conversations to text, and the token-to-bytes table.

Reads tokenizer.json and its neighbours in a checkpoint folder. Never imports torch. Encoding
releases the GIL and may run in any thread; the engine calls it in its pool.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from streamer.errors import (
    ConfigError,
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotSupported,
    RequestFailed,
)
from streamer.tokenizer.chat import ChatTemplate, EarlierTurn
from streamer.tokenizer.growth import require_bounded
from streamer.tokenizer.response_template import load_template
from streamer.tokenizer.special import Disguise, SpecialText
from streamer.tokenizer.text import TextStream
from streamer.tokenizer.token_bytes import decoder_of_pre_tokenizer, token_bytes

__all__ = ["EarlierTurn", "TextStream", "Tokenizer", "read_template"]

# The largest of known models: 35 MB for 262,144 tokens, and 11 MB.
MAX_TOKENIZER_BYTES, MAX_SETTINGS_BYTES = 256 << 20, 64 << 20
NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")
# Files from which transformers can build a tokenizer that has no tokenizer.json.
CONVERTIBLE = ("tokenizer.model", "vocab.json", "spiece.model", "tokenizer.tiktoken", "tekken.json")


class Tokenizer:
    """A vocabulary with its chat template.

    backend   the tokenizers library's object
    settings  what tokenizer_config.json says: special tokens by role, the chat template
    """

    def __init__(self, backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
        parts = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
        require_bounded({part: _described(getattr(backend, part)) for part in parts})
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._settings = settings
        self._mark_named()
        added = backend.get_added_tokens_decoder()
        self._added = {i: token.content.encode() for i, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_bytes = {i: self._added[i] for i in self.special_ids}
        self.vocab_size = max(backend.get_vocab().values(), default=-1) + 1
        self.eos_token_id = self._id_of("eos_token")
        self.bos_token_id = self._id_of("bos_token")
        source, tokens = settings.get("chat_template"), self._named_tokens()
        self._chat = ChatTemplate(source, tokens) if source else None
        self.templates = "".join(
            filter(None, map(settings.get, ("chat_template", "tool_template")))
        )
        self.response_template = load_template(settings.get("response_template"))
        source = settings.get("tool_template")
        self._tool_chat = ChatTemplate(source, tokens) if source else self._chat
        # Made here: copying a vocabulary holds the GIL for long.
        self._special_text = SpecialText(backend) if self._chat is not None else None

    @classmethod
    def from_folder(cls, path: Path, chat_template: str | None = None) -> Tokenizer:
        """The tokenizer of a checkpoint folder.

        chat_template  path of a Jinja file, instead of the checkpoint's template

        Raises ModelNotSupported if the folder has no tokenizer, ConfigError for a bad file.
        """
        settings = _read_json(path / "special_tokens_map.json")
        settings |= _read_json(path / "tokenizer_config.json")
        settings |= _find_templates(path, settings, chat_template)
        file = path / "tokenizer.json"
        if not file.is_file():
            return cls(_convert(path), settings)
        try:
            _require_size(file, MAX_TOKENIZER_BYTES)
            with _library():
                return cls(tokenizers.Tokenizer.from_file(str(file)), settings)
        except (ConfigError, InvalidRequest):
            raise
        except Exception as e:  # the library raises plain Exception for a bad file
            raise ConfigError(f"{file}: {e}", param="model") from e

    # ------------------------------------------------------------ text and tokens

    def encode(
        self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Token ids of a text; InvalidRequest if it is no Unicode text (a lone surrogate).

        max_tokens  of a prompt, one less than the context: ContextLengthExceeded, without encoding
                    it, for a text that must have more tokens
        """
        self._require_short(text, max_tokens, "prompt")
        with _library():
            # encode_batch releases the GIL, encode holds it (136 ms for 400 KB).
            found = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        return found[0].ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        with _library():
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """A conversation as text, as the model was trained to see it."""
        return self._render(messages, add_generation_prompt, tools, None)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        earlier_turn: EarlierTurn | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation as the model was trained to see it; `max_tokens`: see encode.

        variables  further variables of the template
        earlier_turn  if the text extends its text, its ids come first, then the rest's

        Only the template writes special tokens: one spelt in messages or tools is text.
        """
        special = self._special_text
        disguise = special.disguise() if special is not None else None
        text = self._render(messages, add_generation_prompt, tools, disguise, variables)
        self._require_short(text, max_tokens, "messages")
        known: list[int] = []
        if earlier_turn is not None:
            given = earlier_turn.tools, disguise, earlier_turn.variables
            before = self._render(earlier_turn.messages, earlier_turn.is_open, *given)
            before += earlier_turn.answer if disguise is None else disguise(earlier_turn.answer)
            if text.startswith(before) and self._can_begin(text[len(before) :]):
                text, known = text[len(before) :], list(earlier_turn.ids)
        if special is None or disguise is None or not disguise.hidden:
            return known + self.encode(text, add_special_tokens=False)
        with _library():
            return known + special.encode(text, disguise)

    def encode_plain(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Token ids of a text, special tokens as plain text; `max_tokens`: see encode."""
        self._require_short(text, max_tokens, "prompt")
        special = self._special_text
        disguise = special.disguise() if special is not None else None
        hidden = text if disguise is None else disguise(text)
        if special is None or disguise is None or not disguise.hidden:
            return self.encode(text, add_special_tokens=False)
        with _library():
            return special.encode(hidden, disguise)

    def _can_begin(self, text: str) -> bool:
        """Whether a text has the same tokens alone as after another text, apart from merges."""
        return (
            not text
            or self._is_byte_level
            or (self._special_text is not None and self._special_text.begins(text))
        )

    @property
    def _is_byte_level(self) -> bool:
        part = self._backend.pre_tokenizer
        return part is not None and "ByteLevel" in str(part)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        disguise: Disguise | None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        chat = self._tool_chat if tools else self._chat
        if chat is None:
            raise InvalidRequest(
                "this model has no chat template: use completions with a plain prompt, or start "
                "the server with --chat-template FILE",
                param="messages",
                code="no_chat_template",
            )
        return chat.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools or None,
            variables=variables,
            disguise=disguise,
        )

    def _require_short(self, text: str, max_tokens: int | None, param: str) -> None:
        if max_tokens is None or self._max_token_bytes is None:
            return
        if len(text) * 4 <= max_tokens * self._max_token_bytes:
            return  # no need to count: a character has four bytes at most
        num_bytes = len(text.encode(errors="replace"))
        min_tokens = -(-num_bytes // self._max_token_bytes)
        if min_tokens > max_tokens:
            raise ContextLengthExceeded.of_prompt(
                max_tokens + 1,
                f"a text of {num_bytes} bytes has at least {min_tokens} tokens",
                param,
            )

    @cached_property
    def _max_token_bytes(self) -> int | None:
        """Maximum bytes of text that a token stands for; None if there is no bound."""
        if not self._is_byte_level and not getattr(self._backend.model, "byte_fallback", False):
            return None  # the unknown token takes any number
        longest = max(map(len, (*self.token_bytes(), *self._added.values())), default=1)
        # NFKC makes one byte of four where it replaces letters of mathematics.
        return max(1, longest) * (1 if self._backend.normalizer is None else 4)

    def token_bytes(self) -> tuple[bytes, ...]:
        """Bytes of every token; none for special ones. Computed once."""
        return self._token_bytes

    @cached_property
    def _token_bytes(self) -> tuple[bytes, ...]:
        decoder = _described(self._backend.decoder)
        if decoder is None:
            decoder = decoder_of_pre_tokenizer(_described(self._backend.pre_tokenizer))
        added = self._added | dict.fromkeys(self.special_ids, b"")
        return token_bytes(self._backend.get_vocab(), added, decoder)

    # ------------------------------------------------------------ special tokens

    def _named_tokens(self) -> dict[str, str]:
        """bos_token and its like, as written; absent ones are empty, as templates expect."""
        return {name: _content(self._settings.get(name)) for name in NAMED}

    def _mark_named(self) -> None:
        """Make tokens with a role special, as transformers does, if tokenizer.json does not.

        A name that is no token is skipped: it would grow the vocabulary beyond the model's.
        """
        added = self._backend.get_added_tokens_decoder().values()
        # Added again, a token would lose its other settings (lstrip ...).
        missing = set(self._named_tokens().values()) - {t.content for t in added if t.special}
        known = sorted(c for c in missing if c and self._backend.token_to_id(c) is not None)
        self._backend.add_special_tokens(
            [tokenizers.AddedToken(c, special=True, normalized=False) for c in known]
        )

    def _id_of(self, name: str) -> int | None:
        content = _content(self._settings.get(name))
        return self._backend.token_to_id(content) if content else None


@contextmanager
def _library() -> Iterator[None]:
    """Turn the library's refusal of a text into InvalidRequest, its panic into RequestFailed.

    A panic is no Exception: uncaught it would pass every handler.
    """
    try:
        yield
    except (UnicodeError, TypeError) as e:
        raise InvalidRequest(f"the prompt is not valid Unicode text: {e}", param="prompt") from e
    except BaseException as e:
        if type(e).__name__ != "PanicException":
            raise
        raise RequestFailed(f"the tokenizer failed: {e}") from e


def _content(token: Any) -> str:
    """A special token as written: a string, or a table with its content."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _described(part: Any) -> Mapping[str, Any] | None:
    """A part of the library's tokenizer, as tokenizer.json has it."""
    described: Mapping[str, Any] | None = None if part is None else json.loads(part.__getstate__())
    return described


def _require_size(file: Path, max_bytes: int) -> None:
    """ConfigError above `max_bytes`: reading the file could take the machine's memory."""
    size = file.stat().st_size
    if size > max_bytes:
        raise ConfigError(f"{file} has {size} bytes; the maximum is {max_bytes}", param="model")


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    _require_size(file, MAX_SETTINGS_BYTES)
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise ConfigError(f"{file}: {e}", param="model") from e
    if not isinstance(table, dict):
        raise ConfigError(f"{file} is not a JSON object", param="model")
    return table


def read_template(file: str) -> str:
    """The operator's own chat template; ConfigError if it can't be read."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as e:
        why = e.strerror if isinstance(e, OSError) else e
        raise ConfigError(
            f"chat_template: {file}: {why}; it is the path of a Jinja file", param="chat_template"
        ) from e


def _find_templates(path: Path, settings: Mapping[str, Any], given: str | None) -> dict[str, Any]:
    """The settings "chat_template" and, for chats with tools, "tool_template".

    The operator's template, else chat_template.jinja, else tokenizer_config.json's, which may be a
    list of named ones.
    """
    if given is not None:
        return {"chat_template": read_template(given), "tool_template": None}
    template = settings.get("chat_template")
    named = {"default": template if isinstance(template, str) else None}
    if isinstance(template, list):
        named |= {str(t.get("name")): t.get("template") for t in template if isinstance(t, Mapping)}
    file = path / "chat_template.jinja"
    if file.is_file():
        named["default"] = read_template(str(file))
    return {"chat_template": named["default"], "tool_template": named.get("tool_use")}


def _convert(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of older formats than tokenizer.json, by transformers' tokenizer code.

    The one place that imports this code; it imports torch, which nothing else here does.
    """
    if not any((path / name).is_file() for name in CONVERTIBLE):
        raise ModelNotSupported(
            f"{path} has no tokenizer.json, nor any of {', '.join(CONVERTIBLE)}", param="model"
        )
    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
        backend = slow.backend_tokenizer
    except Exception as e:  # whatever that code finds wrong with the files
        raise ModelNotSupported(f"{path}: no tokenizer could be made: {e}", param="model") from e
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelNotSupported(f"{path}: its tokenizer has no fast form", param="model")
    return backend
