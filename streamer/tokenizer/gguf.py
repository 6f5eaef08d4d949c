"""A tokenizer from the metadata of a GGUF file, which has no tokenizer.json.

Byte-level BPE (`gpt2`) with the split that `tokenizer.ggml.pre` names, and SentencePiece's BPE
(`llama`). Whatever is missing or unknown is refused by its key. Called by build.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from streamer.errors import ConfigError, InvalidRequest, ModelNotSupported
from streamer.tokenizer.tokenizer import Tokenizer, read_template

logger = logging.getLogger(__name__)

PREFIX = "tokenizer.ggml."
TOKENS, SCORES, TYPES, MERGES = (
    f"{PREFIX}{n}" for n in ("tokens", "scores", "token_type", "merges")
)
CHAT = "tokenizer.chat_template"
# Arrays of metadata that `from_metadata` reads.
ARRAYS = (TOKENS, SCORES, TYPES, MERGES)
# Kinds of tokens in `token_type`.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
MAX_TOKEN = 4096  # characters; the longest of known models have 512
# Characters of all tokens that are found whole, of which known models have 100,000: the library's
# automaton for 60 million took 38 s and 5 GB.
MAX_ADDED = 1 << 20
# Characters of all pairs that scores make, some of which nested tokens have millions; Gemma's
# 262,144 tokens have 4 million.
MAX_PAIRS = 64 << 20
ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


class Split(NamedTuple):
    """How text is split before byte-level BPE.

    patterns       one after the other, each splitting what the last one left
    is_nfc         whether text is brought to Unicode's NFC first
    ignores_merges a word that is a token is that token, however its merges go
    adds_bos       where the file does not say
    """

    patterns: tuple[str, ...]
    is_nfc: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False


# The models' own expressions, as their tokenizer.json files have them.
_SPACES = r"\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LINES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES
_LLAMA3 = rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1,3}}|{_LINES}|{_SPACES}"
_QWEN2 = rf"{_ENDINGS}|{_WORDS}|\p{{N}}|{_LINES}|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|"
    r"\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|" + _SPACES
)
_TEKKEN = _CASED % ("", "", "")
_GPT4O = _CASED % (f"{_ENDINGS}?", f"{_ENDINGS}?", "{1,3}")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|" + _SPACES,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
_STARCODER = (r"\p{N}", _GPT2)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_NAMED: dict[Split, str] = {
    Split(_DEFAULT): "default",
    Split((_GPT2,)): "gpt-2 phi-2 olmo mpt jais trillion gigachat exaone4 mellum a.x-4.0 "
    "granite-docling",
    Split((_LLAMA3,), ignores_merges=True, adds_bos=True): "llama-bpe llama3 llama-v3 falcon3 "
    "falcon-h1 pixtral midm-2.0 lfm2",
    Split((_LLAMA3,)): "dbrx smaug-bpe glm4 chatglm-bpe",
    Split((_QWEN2,), is_nfc=True): "qwen2 megrez",
    Split((_QWEN2,)): "deepseek-r1-qwen stablelm2 hunyuan kormo f2llmv2 solar-open grok-2",
    Split((_TEKKEN,), ignores_merges=True, adds_bos=True): "tekken",
    Split((_GPT4O,)): "gpt-4o llama4 kanana2 minimax-m2",
    Split(_STARCODER): "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    Split(_DEEPSEEK3): "deepseek-v3 hunyuan-dense joyai-llm",
    Split(_DEEPSEEK_CODER): "deepseek-coder",
}
SPLITS = {name: split for split, names in _NAMED.items() for name in names.split()}


def from_metadata(metadata: Mapping[str, Any], chat_template: str | None = None) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describes.

    metadata       with the arrays of ARRAYS
    chat_template  path of a Jinja file, instead of the file's template

    ModelNotSupported names the key that can't be; ConfigError: the template.
    """
    vocabulary = _Vocabulary(metadata)
    kind = metadata.get(f"{PREFIX}model")
    if not isinstance(kind, str) or kind not in BACKENDS:
        raise _wrong(f"{PREFIX}model", f"{str(kind)[:100]!r} is not one of {', '.join(BACKENDS)}")
    try:
        backend = BACKENDS[kind](vocabulary)
        backend.add_special_tokens(vocabulary.added((CONTROL, UNKNOWN), special=True))
        backend.add_tokens(vocabulary.added((USER_DEFINED,), special=False))
        _add_ends(backend, vocabulary)
        return Tokenizer(backend, vocabulary.roles() | _templates(metadata, chat_template))
    except (ConfigError, InvalidRequest):
        raise
    except Exception as e:  # the library raises plain Exception for what can't be
        raise _wrong(PREFIX + "*", f"no tokenizer can be made of it: {str(e)[:200]}") from e


class _Vocabulary:
    """The tokens with their types, and the ids that metadata names."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.tokens = [
            token or f"[EMPTY_{i}]" for i, token in enumerate(self.strings(TOKENS, None))
        ]
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            twice = next(t for i, t in enumerate(self.tokens) if self.ids[t] != i)
            raise _wrong(TOKENS, f"{twice[:100]!r} is there twice")
        if (longest := max(map(len, self.tokens), default=0)) > MAX_TOKEN:
            raise _wrong(TOKENS, f"a token of {longest} characters; {MAX_TOKEN} can be")
        types = metadata.get(TYPES)
        self.types = [NORMAL] * len(self.tokens) if types is None else self.numbers(TYPES)

    def strings(self, key: str, default: list[str] | None) -> list[str]:
        found = self.metadata.get(key, default)
        if not isinstance(found, list) or not all(isinstance(s, str) for s in found):
            raise _wrong(key, "it must be an array of strings")
        return found

    def numbers(self, key: str) -> list[Any]:
        """A finite number for each token."""
        found = self.metadata.get(key)
        if not isinstance(found, list) or len(found) != len(self.tokens):
            raise _wrong(key, f"it must be an array of {len(self.tokens)} numbers")
        if not all(isinstance(n, int | float) and math.isfinite(n) for n in found):
            raise _wrong(key, "it must be an array of finite numbers")
        return found

    def flag(self, name: str, default: bool) -> bool:
        found = self.metadata.get(PREFIX + name, default)
        if not isinstance(found, bool):
            raise _wrong(PREFIX + name, "it must be true or false")
        return found

    def token(self, role: str, default: int | None = None) -> str | None:
        """The token whose id metadata has for a role, such as bos."""
        key = f"{PREFIX}{role}_token_id"
        found = self.metadata.get(key, default)
        if found is None:
            return None
        is_id = isinstance(found, int) and not isinstance(found, bool)
        if not is_id or not 0 <= found < len(self.tokens):
            raise _wrong(key, f"there is no token {str(found)[:100]}")
        return self.tokens[int(found)]

    def roles(self) -> dict[str, Any]:
        """bos_token and its like, as tokenizer_config.json has them."""
        ids = {"bos": 1, "eos": 2, "unknown": 0} if self.is_sentencepiece else {}
        return {name: self.token(role, ids.get(role)) for name, role in ROLES.items()}

    @property
    def is_sentencepiece(self) -> bool:
        return self.metadata.get(f"{PREFIX}model") == "llama"

    def added(self, types: Sequence[int], *, special: bool) -> list[AddedToken]:
        """Tokens of these types, found whole in a text before it is split."""
        pairs = zip(self.tokens, self.types, strict=True)
        found = [token for token, kind in pairs if kind in types]
        if (length := sum(len(token) + 1 for token in found)) > MAX_ADDED:
            why = f"tokens of type {types[0]} have {length} characters; {MAX_ADDED} can be"
            raise _wrong(TYPES, why)
        return [AddedToken(token, special=special, normalized=False) for token in found]


def _byte_level(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """`gpt2`: merges over GPT-2's alphabet of bytes, within what `pre` splits."""
    pre = vocabulary.metadata.get(f"{PREFIX}pre")
    if pre is None:
        logger.warning("%spre is missing: text may be split otherwise than in training", PREFIX)
    pre = "default" if pre is None else pre
    if not isinstance(pre, str) or pre not in SPLITS:
        known = ", ".join(sorted(SPLITS))
        raise _wrong(f"{PREFIX}pre", f"{str(pre)[:100]!r} is not one of {known}")
    split = SPLITS[pre]
    merges = []
    for merge in vocabulary.strings(MERGES, None):
        cut = merge.find(" ", 1)  # a token may begin with a space, and have no other
        if cut < 0:
            raise _wrong(MERGES, f"{merge[:100]!r} is no pair of tokens")
        merges.append((merge[:cut], merge[cut + 1 :]))
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=split.ignores_merges)
    )
    if split.is_nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(p), behavior="isolated") for p in split.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """`llama`: pairs whose join is a token, the best score first; unknown characters as bytes."""
    unknown = vocabulary.token("unknown", 0)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=list(_merges_of_scores(vocabulary)),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=BYTE in vocabulary.types,
        )
    )
    has_prefix = vocabulary.flag("add_space_prefix", True)
    prefix = [normalizers.Prepend("▁")] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges_of_scores(vocabulary: _Vocabulary) -> Iterator[tuple[str, str]]:
    """Every pair of tokens that joins to a third, in the order in which SentencePiece would join
    them: by the third's score, the highest first."""
    scores = vocabulary.numbers(SCORES)
    ids = {
        token: i
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind == NORMAL
    }
    room = MAX_PAIRS
    for token in sorted(ids, key=lambda t: -scores[ids[t]]):
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [(a, b) for a, b in cuts if a in ids and b in ids]
        room -= len(pairs) * len(token)
        if room < 0:
            raise _wrong(TOKENS, f"its pairs have more than {MAX_PAIRS} characters")
        yield from sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))


BACKENDS = {"gpt2": _byte_level, "llama": _sentencepiece}


def _add_ends(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Begin and end tokens around an encoded text, where the file or its kind requires them."""
    if vocabulary.is_sentencepiece:
        default = True
    else:
        default = SPLITS[vocabulary.metadata.get(f"{PREFIX}pre", "default")].adds_bos
    roles = vocabulary.roles()
    template = ["$A"]
    used = []
    for flag, name, is_default in (
        ("add_bos_token", "bos_token", default),
        ("add_eos_token", "eos_token", False),
    ):
        token = roles[name]
        if not vocabulary.flag(flag, is_default):
            continue
        if token is None:
            if PREFIX + flag in vocabulary.metadata:
                raise _wrong(PREFIX + flag, f"there is no {name}")
            continue
        # By the role: a token's own text may be one that templates are written in.
        used.append({"id": name, "ids": [vocabulary.ids[token]], "tokens": [token]})
        template = [name, *template] if name == "bos_token" else [*template, name]
    if used:
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=used)


def _templates(metadata: Mapping[str, Any], given: str | None) -> dict[str, Any]:
    """The settings "chat_template" and, for chats with tools, "tool_template"."""
    if given is not None:
        return {"chat_template": read_template(given), "tool_template": None}
    found = {"chat_template": CHAT, "tool_template": f"{CHAT}.tool_use"}
    for key in found.values():
        if not isinstance(metadata.get(key, ""), str):
            raise _wrong(key, "it must be a string")
    return {name: metadata.get(key) or None for name, key in found.items()}


def _wrong(key: str, why: str) -> ModelNotSupported:
    return ModelNotSupported(f"{key}: {why}", param=key)
