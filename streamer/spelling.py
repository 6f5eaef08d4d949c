"""How values and names may be written: other engines' words for the same value, the nearest name
that exists, and plain words for what a value was to be.

Pure functions of text. config.py reads values through them; whoever refuses a name that does not
exist asks for the nearest.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

import msgspec

# --prot is to --port as 0.83; --alias is to --replicas, which it does not mean, as 0.71.
NEAR = 0.75
# Of a choice: vLLM's, torch's and llama.cpp's words for the same thing.
SAME = {
    "dtype": {
        **dict.fromkeys(("half", "fp16", "f16"), "float16"),
        **dict.fromkeys(("float", "fp32", "f32"), "float32"),
        "bf16": "bfloat16",
    },
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "log_level": {"warn": "warning"},
}
COUNTS = ("max_model_len", "max_num_batched_tokens")  # may be written as 4k
UNITS = {"k": 1000, "m": 1000**2, "K": 1024, "M": 1024**2}  # as in vLLM
EXAMPLES = {
    "speculative_config": '\'{"method": "suffix"}\'',
    "key_limits": '\'{"KEY": {"max_tokens_per_minute": 1000}}\'',
}
WORDS = {
    "`int`": "a whole number",
    "`float`": "a number",
    "`str`": "text",
    "`bool`": "true or false",
    "`array`": "a list",
    "`object`": "an object",
}


def as_choice(name: str, value: str) -> str:
    """A value of a choice in our words and in small letters: `half` of dtype is float16."""
    value = value.lower()
    return SAME.get(name, {}).get(value, value)


def as_count(name: str, text: str) -> str:
    """`4k` of a number of tokens as 4000, `4K` as 4096, `25.6k` as 25600; else the text itself."""
    match = re.fullmatch(r"([0-9]+)(?:\.([0-9]+)(?=[km]))?([kmKM])", text)
    if name not in COUNTS or match is None:
        return text
    whole, part, unit = match[1], match[2] or "", match[3]
    number, rest = divmod(int(whole + part) * UNITS[unit], 10 ** len(part))
    return text if rest else str(number)


def expected(error: msgspec.DecodeError, choices: Iterable[str] = (), name: str = "") -> str:
    """What the refused value was to be, in plain words: "expected a whole number >= 1"."""
    said, _, path = str(error).partition(" - at `$.")
    text = said.partition(", got ")[0].replace(" | null`", "`")
    if not isinstance(error, msgspec.ValidationError) and name in EXAMPLES:
        return f"it is JSON, such as {EXAMPLES[name]}; {text}"
    text = text[:1].lower() + text[1:]
    if "enum value" in text:
        text += "; expected one of " + ", ".join(choices)
    for theirs, ours in WORDS.items():
        text = text.replace(theirs, ours)
    return f"{path.removesuffix('`')}: {text}" if path else text


def hint(name: str, known: Iterable[str]) -> str:
    """What a misspelt name may mean, or nothing."""
    names = [*known]
    near = [each for each in names if len(name) > 5 and each.startswith(name)][:1]
    near = near or difflib.get_close_matches(name, names, n=1, cutoff=NEAR)
    return "".join(f"; did you mean {each}?" for each in near)
