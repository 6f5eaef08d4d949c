"""Grammars: what requests ask of their answers' text, compiled for one model's vocabulary.

Owns the vocabulary as llguidance has it and a bounded cache of compiled grammars. `compile` may be
called from any thread; the engine calls it in its prompt pool, the runner when a row joins.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import msgspec

from streamer.constraints.bounds import TOO_LONG, lark_too_costly, share, too_costly
from streamer.constraints.lark import TooLong
from streamer.constraints.schemas import followable, without_one
from streamer.constraints.tags import BadTag, Tags
from streamer.core.plan import GAVE_UP
from streamer.core.sampling import Grammar
from streamer.errors import InvalidRequest

if TYPE_CHECKING:  # its 8 MB are loaded for the first grammar
    import llguidance

MAX_DEPTH = 64  # brackets within brackets, of any kind of grammar
MAX_KEPT = 128  # compiled grammars that no live request has
# Seconds that these took to compile: one of 0.8 s, (a{1000}){1000}, holds 80 MB, a schema of 80 KB
# and 0.27 s holds 3.4 MB (EPYC Zen 5, 2026-11-22).
MAX_KEPT_S = 5.0
MAX_REASON = 500  # characters
SLOW_S = 0.5e-3  # a mask that takes more is too much for a step to wait for
TRIAL = 16  # masks after which a grammar is known to be quick, at first
NO_VALUE = "Unsatisfiable schema"  # llguidance's words
MAX_NAMING_S = 0.1  # of looking for the keyword that is at fault
MAX_TEXTS, MAX_TEXT = 4096, 256  # forced texts whose tokens are remembered, and characters of one
# Of one grammar. A lexer's state takes 1 to 2 KB, and every row has a copy of them.
LIMITS: Mapping[str, Any] = {
    "initial_lexer_fuel": 500_000,  # 50,000 a millisecond
    "step_lexer_fuel": 100_000,  # 14,000 a millisecond
    "step_max_items": 25_000,  # 20,000 a millisecond
    "max_items_in_row": 25_000,  # one a text of a choice
    "max_lexer_states": 10_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
# Of a Lark text, which may be ambiguous (bounds.py). A mask of SQL's SELECT, which is, has up to
# 2,500 items over a vocabulary of 100,000, and a row fewer than 300.
LARK_LIMITS = {**LIMITS, "step_max_items": 5_000, "max_items_in_row": 2_000}
BEFORE = "\n"
JSON_OBJECT = '{"type":"object"}'
_NAMES = {
    "json": "the JSON schema",
    "grammar": "the Lark grammar",
    "structural_tag": "the structural tag",
}
_PLACE = re.compile(r"\Aat \d+\(\d+\): |\n *\d+ \| (?s:.*)")  # in a Lark text, and its lines
# Of llguidance's messages: advice on its own settings and loaders.
_ASIDE = re.compile(r"<non-verbose/>|\. Enable 'coerce_one_of'.*| and retrieving it failed.*")
_TARGET = re.compile("Resource '|Pointer '")
_BRACKET = re.compile(r"[\[({]|[\])}]")


class Vocabulary:
    """A model's tokens, in the form that llguidance.LLTokenizer reads.

    tokens   bytes of each token id; special ones have none
    special  special token id -> its bytes
    encode   a text's token ids
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self,
        tokens: Sequence[bytes],
        special: Mapping[int, bytes],
        end_ids: Sequence[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        size = 1 + max((len(tokens) - 1, *special, *end_ids))
        self.tokens = [*tokens, *[b""] * (size - len(tokens))]
        for token, name in special.items():
            self.tokens[token] = b"\xff" + name  # no text has this byte: only the token matches
        for token in set(end_ids).difference(special):
            self.tokens[token] = b"\xff<end %d>" % token
        self.end_ids = tuple(end_ids)
        self.eos_token_id = end_ids[0] if end_ids else None
        self.special_token_ids = sorted({*special, *end_ids})
        self.special = special
        self._encode = encode
        self._forced = lru_cache(MAX_TEXTS)(self._tokens_of)
        self._by_bytes: dict[bytes, int] = {}
        self._most = 0  # bytes of a token
        self._found: dict[bytes, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        """Tokens of exactly this text: llguidance allows no others where a text must come.

        A schema's keys come again and again: a tokenizer takes 10 us for each, the cache 0.2.
        """
        return self._forced(text) if len(text) <= MAX_TEXT else self._tokens_of(text)

    def _tokens_of(self, text: str) -> list[int]:
        """SentencePiece writes a space before it, except behind another text."""
        found, wanted = self._encode(text), text.encode()
        if self._joined(found) == wanted:
            return found
        before = self._encode(BEFORE)
        found = self._encode(BEFORE + text)
        if found[: len(before)] == before and self._joined(found[len(before) :]) == wanted:
            return found[len(before) :]
        return self._longest(wanted)

    def _joined(self, tokens: Sequence[int]) -> bytes:
        return b"".join(map(self.text, tokens))

    def _longest(self, text: bytes) -> list[int]:
        """The text as the longest tokens that it begins with, one after the other."""
        if not self._by_bytes:
            self._by_bytes = {token: i for i, token in enumerate(self.tokens) if token}
            self._most = max(map(len, self._by_bytes), default=0)
        found, at = list[int](), 0
        while at < len(text):
            ends = range(min(len(text), at + self._most), at, -1)
            end = next((e for e in ends if text[at:e] in self._by_bytes), None)
            if end is None:
                return found
            found.append(self._by_bytes[text[at:end]])
            at = end
        return found

    def text(self, token: int) -> bytes:
        """A token's bytes, special or not; models have tokens that no tokenizer has."""
        special = self.special.get(token)
        if special is not None:
            return special
        return self.tokens[token] if token < len(self.tokens) else b""

    def beginning(self, text: bytes) -> list[int]:
        """Tokens that this text begins with, or that begin with it."""
        return self._where(text, lambda token: text.startswith(token) or token.startswith(text))

    def going_on(self, mark: bytes) -> list[int]:
        """Tokens that may end this text and go on with more than white space."""

        def is_so(token: bytes) -> bool:
            at = -1
            while 0 <= (at := token.find(mark[-1:], at + 1)) < len(token) - 1:
                before = token[: at + 1]
                if token[at + 1 :].strip() and (mark.endswith(before) or before.endswith(mark)):
                    return True
            return False

        return self._where(b"\xff" + mark, is_so)

    def spaces(self, most: int) -> list[int]:
        """Tokens of white space alone, up to this many bytes."""
        found = self._where(b"", lambda token: not token.strip())
        return [token for token in found if len(self.text(token)) <= most]

    def _where(self, key: bytes, is_so: Callable[[bytes], bool]) -> list[int]:
        """Tokens of which this is so, found once: a pass takes 50 ms for 150,000."""
        found = self._found.get(key)
        if found is None:
            texts = ((token, self.text(token)) for token in range(len(self.tokens)))
            found = self._found[key] = [token for token, of in texts if of and is_so(of)]
        return found


class Compiled:
    """A grammar that a row may follow.

    is_slow  a mask, or a token to follow, took longer than SLOW_S, and too few did not since
    """

    __slots__ = ("__weakref__", "_grammar", "_matcher", "_num_quick", "_trial", "is_slow", "took_s")

    def __init__(self, matcher: llguidance.LLMatcher, took_s: float, grammar: Grammar) -> None:
        self._matcher = matcher
        self._grammar = grammar
        self.took_s = took_s  # to compile
        self.is_slow = False
        self._trial = TRIAL  # masks that must be quick, one after the other
        self._num_quick = 0  # that were

    @property
    def is_quick(self) -> bool:
        """Whether its masks are known to be."""
        return not self.is_slow and self._num_quick >= self._trial

    def took(self, took_s: float, count: int) -> None:
        """So many masks, or tokens to follow, took this much of a thread's time. Each time that
        they are slow again, twice as many must be quick afterwards."""
        if took_s <= SLOW_S * count:
            self._num_quick += count
            self.is_slow = self.is_slow and self._num_quick < self._trial
            return
        if not self.is_slow:
            self._trial *= 2
        self.is_slow, self._num_quick = True, 0

    def gave_up(self, error: str) -> str:
        """Why an answer can't go on, from a matcher's error, which names the limit."""
        reason = _ASIDE.sub("", error).partition("\n")[0].strip()
        return f"{GAVE_UP}{_name(self._grammar)} any further: {reason}"

    def held(self, _: object) -> None:
        """Does nothing: a reference to this method keeps the grammar compiled."""

    def matcher(self) -> llguidance.LLMatcher:
        """A matcher at the beginning of the text."""
        return self._matcher.deep_copy()


class Grammars:
    """Compiles for one vocabulary; those of live requests and MAX_KEPT more are remembered."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._lock = threading.Lock()
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._known: WeakValueDictionary[Grammar, Compiled] = WeakValueDictionary()
        self._kept: OrderedDict[Grammar, Compiled] = OrderedDict()

    def find(self, grammar: Grammar) -> Compiled | None:
        """The grammar, if it is compiled."""
        with self._lock:
            return self._known.get(grammar)

    def compile(self, grammar: Grammar) -> Compiled:
        """The grammar, compiled here if need be; InvalidRequest says what can't be honoured."""
        found = self.find(grammar)
        if found is None:
            found = self._compile(grammar)
        with self._lock:
            found = self._known.setdefault(grammar, found)
            self._kept[grammar] = found
            self._kept.move_to_end(grammar)
            kept_s = sum(each.took_s for each in self._kept.values())
            while len(self._kept) > MAX_KEPT or (kept_s > MAX_KEPT_S and len(self._kept) > 1):
                kept_s -= self._kept.popitem(last=False)[1].took_s
        return found

    def check(self, grammar: Grammar) -> None:
        """Raise what `compile` would, without remembering the grammar."""
        if self.find(grammar) is None:
            self._compile(grammar)

    def _compile(self, grammar: Grammar) -> Compiled:
        _check_depth(grammar)
        if not self.vocabulary.end_ids:
            raise refusal(grammar, "the model has no token that ends an answer")
        self._tokens()
        began_s = time.thread_time()
        matcher = self._matcher(grammar, source_of(grammar, self.vocabulary.special))
        if matcher.is_error():
            error = matcher.get_error()
            if grammar.kind == "json" and NO_VALUE in error:
                error = error.replace(NO_VALUE, f"{NO_VALUE}{self._by_keyword(grammar)}", 1)
            raise refusal(grammar, error)
        return Compiled(matcher, time.thread_time() - began_s, grammar)

    def _matcher(self, grammar: Grammar, source: str) -> llguidance.LLMatcher:
        import llguidance

        limits = llguidance.LLParserLimits(**(LARK_LIMITS if grammar.kind == "grammar" else LIMITS))
        matcher = llguidance.LLMatcher(self._tokens(), source, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # limits of the first step are found here, not in it
        return matcher

    def _by_keyword(self, grammar: Grammar) -> str:
        """The keyword without which a schema has values; empty where more than one is at fault."""
        end_s = time.thread_time() + MAX_NAMING_S
        for place, schema in without_one(_decoded(grammar.text, grammar)):
            if time.thread_time() > end_s:
                break
            other = msgspec.structs.replace(grammar, text=msgspec.json.encode(schema).decode())
            if not self._matcher(other, source_of(other, {})).is_error():
                return f", by {place}"
        return ""

    def _tokens(self) -> llguidance.LLTokenizer:
        """The vocabulary's prefix tree: made with the first grammar, 0.3 s for 150,000 tokens."""
        import llguidance

        with self._lock:
            if self._tokenizer is None:
                vocabulary: Any = self.vocabulary
                ends = list(self.vocabulary.end_ids)
                self._tokenizer = llguidance.LLTokenizer(vocabulary, eos_token=ends)
            return self._tokenizer


def source_of(grammar: Grammar, special: Mapping[int, bytes]) -> str:
    """The grammar as llguidance reads it; InvalidRequest for what is not even well formed.

    special  special token id -> its text
    """
    from llguidance import LLMatcher

    text = grammar.text
    source: Any
    if grammar.kind in ("json", "json_object"):
        schema = _schema(
            _decoded(JSON_OBJECT if grammar.kind == "json_object" else text, grammar), grammar
        )
        source = LLMatcher.grammar_from_json_schema(schema, overrides=_spaces(grammar))
    elif grammar.kind == "regex":
        if share([text]) > 1:
            raise refusal(grammar, TOO_LONG)
        source = LLMatcher.grammar_from_regex(text)
    elif grammar.kind == "choice":
        choices = msgspec.json.decode(text, type=list[str])
        quoted = (msgspec.json.encode(choice).decode() for choice in choices)
        source = LLMatcher.grammar_from_lark("start: " + " | ".join(quoted))
    elif grammar.kind == "structural_tag":
        tags = Tags(special, lambda schema: _schema(schema, grammar, _spaces(grammar)))
        try:
            source = LLMatcher.grammar_from_lark(tags.lark(_decoded(text, grammar)))
        except (BadTag, TooLong) as error:
            raise refusal(grammar, str(error)) from None
    else:
        if grammar.kind == "grammar" and (why := lark_too_costly(text)) is not None:
            raise refusal(grammar, why)
        source = LLMatcher.grammar_from_lark(text)
    return str(source)


def _spaces(grammar: Grammar) -> llguidance._lib.JsonCompileOptions:
    """llguidance's settings of the white space in JSON."""
    if not grammar.whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": grammar.whitespace}


def _decoded(text: str, grammar: Grammar) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise refusal(grammar, str(error)) from None


def _schema(schema: Any, grammar: Grammar, settings: object = None) -> str:
    """The schema as a JSON object: true and false, which are schemas too, in another form."""
    if schema is False:
        raise refusal(grammar, "the schema is false: nothing follows it")
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise refusal(grammar, f"a schema is an object, got {type(schema).__name__}")
    if (why := too_costly(schema)) is not None:
        raise refusal(grammar, why)
    # llguidance's own settings are not a caller's
    found = {key: value for key, value in followable(schema).items() if key != "x-guidance"}
    if settings is not None:
        found["x-guidance"] = settings
    return msgspec.json.encode(found).decode()


def refusal(grammar: Grammar, reason: str) -> InvalidRequest:
    """The error for a grammar that can't be honoured; `reason` has the keyword or the place."""
    reason = _ASIDE.sub("", _TARGET.sub("$ref: '", reason)).strip()
    if grammar.kind in ("calls", "structural_tag"):  # no lines of a text that the caller never saw
        reason = _PLACE.sub("", reason)
    reason = reason[:MAX_REASON]
    return InvalidRequest(
        f"{_name(grammar)} can't be honoured: {reason}",
        param=f"structured_outputs.{grammar.kind}",
        code="unsupported_grammar",
    )


def _name(grammar: Grammar) -> str:
    return _NAMES.get(grammar.kind, f"the {grammar.kind}")


def _check_depth(grammar: Grammar) -> None:
    """Refuse brackets nested too deeply, before parsers that recurse see them."""
    if grammar.kind == "calls":  # made of schemas that were checked
        return
    depth = 0
    for match in _BRACKET.finditer(grammar.text):
        depth = depth + 1 if match[0] in "[({" else max(0, depth - 1)
        if depth > MAX_DEPTH:
            raise refusal(grammar, f"it is nested more than {MAX_DEPTH} deep")
