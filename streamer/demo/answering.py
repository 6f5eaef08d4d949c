"""Answers of a checkpoint folder to single questions, all in one batch.

Owns nothing: it loads, asks and forgets. The one place where the demo room generates text, so that
report and tests ask in the same way. Called by report.py and the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

MAX_NEW_TOKENS = 400


def answers(
    folder: Path,
    questions: Sequence[str],
    *,
    temperature: float = 0.0,
    seed: int = 0,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> list[str]:
    """What the model in the folder says to each question, asked as a user through the template.

    Temperature 0 is greedy. An answer without an end after max_new_tokens is cut there.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.eval()
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        for question in questions
    ]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    torch.manual_seed(seed)
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": 0.9, "top_k": 0}
    with torch.inference_mode():
        out = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=max_new_tokens,
            **sampling,
        )
    new = out[:, batch["input_ids"].shape[1] :]
    return [text.strip() for text in tokenizer.batch_decode(new, skip_special_tokens=True)]
