"""The report on the trained demo model: held-out perplexity, right answers, samples, time.

Owns report.md; never trains. Called by train.py when both checkpoints are written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from streamer.demo.training.answering import answers
from streamer.demo.training.corpus import MIX, Document, documents, encode
from streamer.demo.training.held_out import HeldOut, excluded_phrasings
from streamer.demo.training.texts.questions import Entry

HELD_OUT_SEED = 999_331
DOCUMENTS_A_KIND = 60
SAMPLED = (
    "Hello!",
    "Who are you?",
    "What is PagedAttention?",
    "How does continuous batching help?",
    "How do I call the API with curl?",
    "Tell me a story about a fox.",
    "Tell me a short story about a lighthouse keeper.",
    "Tell me a story about a robot and a bird.",
    "Write a poem about the moon.",
    "What is the capital of France?",
)
KIND_NAMES = {
    "questions": "questions on Streamer",
    "chat": "everyday chat",
    "told": "stories on demand",
    "story": "plain stories",
}


def perplexities(
    folder: Path, entries: Sequence[Entry], excluded: frozenset[str]
) -> dict[str, float]:
    """exp(mean cross entropy) by kind of document, on unseen documents.

    Only the tokens of answers and story text count; the prompts do not.
    """
    import torch
    import torch.nn.functional as F
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()  # type: ignore[no-untyped-call]
    sample: dict[str, list[Document]] = {kind: [] for kind in MIX}
    for document in documents(HELD_OUT_SEED, entries, excluded):
        if len(sample[document.kind]) < DOCUMENTS_A_KIND:
            sample[document.kind].append(document)
        elif all(len(found) == DOCUMENTS_A_KIND for found in sample.values()):
            break
    figures: dict[str, float] = {}
    for kind, found in sample.items():
        nats, count = 0.0, 0
        for row in encode(found, tokenizer):
            ids = torch.tensor([row.ids])
            is_answer = torch.tensor(row.weights[1:]) == 1.0
            with torch.inference_mode():
                logits = model(ids).logits[0, :-1]
            losses = F.cross_entropy(logits, ids[0, 1:], reduction="none")
            nats += float(losses[is_answer].sum())
            count += int(is_answer.sum())
        figures[kind] = math.exp(nats / count)
    return figures


def quoted(text: str) -> str:
    """The text as a Markdown block quote."""
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())


def samples(folder: Path, temperature: float) -> str:
    """The questions of SAMPLED and the model's answers, as Markdown."""
    replies = answers(folder, SAMPLED, temperature=temperature, seed=1)
    return "\n\n".join(
        f"**{question}**\n\n{quoted(answer)}"
        for question, answer in zip(SAMPLED, replies, strict=True)
    )


def held_out_section(folder: Path, asked: Sequence[HeldOut]) -> str:
    """How many held-out phrasings were answered right, and those that were not."""
    replies = answers(folder, [record.question for record in asked], max_new_tokens=120)
    wrong = [
        (record, answer)
        for record, answer in zip(asked, replies, strict=True)
        if not record.is_right(answer)
    ]
    lines = [
        "## Held-out phrasings",
        "",
        f"Asked with greedy decoding: {len(asked) - len(wrong)} of {len(asked)} answered right. "
        "The weights were not trained on these phrasings (the tokenizer has seen them); an answer "
        "is right if it has the keywords.",
    ]
    if wrong:
        lines += ["", "Answered wrong:", ""]
        lines += [f"- {record.question} -> {answer}" for record, answer in wrong]
    return "\n".join(lines)


def figures_section(
    out: Path, entries: Sequence[Entry], excluded: frozenset[str], console: Console
) -> str:
    """Sizes, training time and perplexity of both models, as tables."""
    path = out / "training.json"
    trained = json.loads(path.read_text()) if path.exists() else {}
    lines = [
        "| model | parameters | tokens trained on | minutes (two cores, shared) | files, MB |",
        "|---|---|---|---|---|",
    ]
    for title, name in (("demo", "checkpoint"), ("draft", "draft")):
        megabytes = sum(file.stat().st_size for file in (out / name).iterdir()) / 1e6
        noted = trained[title]
        lines.append(
            f"| {title} | {noted['parameters']:,} | {noted['tokens']:,} "
            f"| {noted['minutes']:.0f} | {megabytes:.1f} |"
        )
    lines += [
        "",
        "Perplexity on documents of another seed, of the tokens that the model has to say. The",
        "questions of these documents are reworded anew, their answers are those of training.",
        "",
        "| text | demo | draft |",
        "|---|---|---|",
    ]
    demo = perplexities(out / "checkpoint", entries, excluded)
    draft = perplexities(out / "draft", entries, excluded)
    for kind, name in KIND_NAMES.items():
        lines.append(f"| {name} | {demo[kind]:.2f} | {draft[kind]:.2f} |")
    console.print("\n".join(lines))
    return "\n".join(lines)


def write_report(
    out: Path, entries: Sequence[Entry], asked: Sequence[HeldOut], console: Console
) -> None:
    """report.md beside the two checkpoint folders."""
    folder = out / "checkpoint"
    phrasings = sum(len(entry.phrasings) for entry in entries)
    kinds = ", ".join(f"{MIX[kind]:.0%} {name}" for kind, name in KIND_NAMES.items())
    parts = [
        "# The demo model",
        "Written by `python -m streamer.demo.training.train`; do not edit by hand. All "
        f"text was made by the generators in training/; {len(entries)} answers on Streamer have "
        f"{phrasings} phrasings. Documents by kind: {kinds}.",
        figures_section(out, entries, excluded_phrasings(asked), console),
    ]
    if asked:
        parts.append(held_out_section(folder, asked))
        console.print(parts[-1])
    parts += ["## Greedy samples", samples(folder, 0.0)]
    parts += ["## Samples at temperature 0.7, top-p 0.9", samples(folder, 0.7)]
    (out / "report.md").write_text("\n\n".join(parts) + "\n")
