"""The protocol between a runner and compare: lines of JSON on standard input and output.

The first line is the setup; its answer means that the engine is loaded. Then every line is a batch
of prompts, answered with the seconds it took and the number of tokens. Uses the stdlib alone,
because it runs in every engine's interpreter.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TextIO

Generate = Callable[[list[list[int]], list[int]], int]


class PeerSetup(NamedTuple):
    """What to load, and its limits.

    model           checkpoint folder
    kv_bytes        size of the KV pool; kv_token_bytes: of a token in it, in 16 bits
    threads         that the engine may compute with
    max_len         prompt and output of one sequence, in tokens
    max_seqs        sequences at once
    options         of this engine alone
    """

    model: str
    kv_bytes: int
    kv_token_bytes: int
    threads: int
    max_len: int
    max_seqs: int
    options: dict[str, str]


def serve(load: Callable[[PeerSetup], tuple[Generate, str]]) -> None:
    """Load the setup of the first line, then answer batches until standard input ends.

    `load` returns the engine's version and a function that answers a batch greedily, each prompt
    with exactly its number of tokens, and returns the number of tokens made.
    """
    wire = _take_output()
    generate, version = load(PeerSetup(**json.loads(sys.stdin.readline())))
    _tell(wire, {"version": version})
    for line in sys.stdin:
        batch = json.loads(line)
        begin = time.perf_counter()
        tokens = generate(batch["prompts"], batch["lengths"])
        _tell(wire, {"seconds": time.perf_counter() - begin, "tokens": tokens})
    os._exit(0)  # some engines leave threads behind that would keep the process


def _take_output() -> TextIO:
    """Standard output for the protocol alone: what the engine prints there goes to the log."""
    wire = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return wire


def _tell(wire: TextIO, value: dict[str, Any]) -> None:
    wire.write(json.dumps(value) + "\n")
    wire.flush()
