"""Answers of a checkpoint folder to single questions, all in one batch of this engine.

The only place where demo/ generates text, so that report and tests ask in the same way. Keeps
nothing between calls. Called by report.py and the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

MAX_NEW_TOKENS = 400


def answers(
    folder: Path,
    questions: Sequence[str],
    *,
    temperature: float = 0.0,
    seed: int = 0,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> list[str]:
    """The model's answer to each question, asked as a user message through the chat template.

    Temperature 0 is greedy, others sample with top-p 0.9. An answer without an end after
    max_new_tokens is cut there.
    """
    from streamer.core.sampling import SamplingParams
    from streamer.llm import LLM

    params = SamplingParams(
        temperature=temperature, top_p=0.9, seed=seed, max_tokens=max_new_tokens
    )
    conversations = [[{"role": "user", "content": question}] for question in questions]
    with LLM(str(folder)) as llm:
        return [output.text.strip() for output in llm.chat(conversations, params, progress=False)]
