"""The bundled demo model: its weights and their card (report.md); training/ made them.

Owns the paths of the checkpoints; importing it loads nothing. build.py loads CHECKPOINT when no
model is named.
"""

from __future__ import annotations

from pathlib import Path

CHECKPOINT: Path = Path(__file__).parent / "checkpoint"
"""The demo model: an ordinary Llama checkpoint folder with tokenizer and chat template."""

DRAFT: Path = Path(__file__).parent / "draft"
"""A model of a tenth of its size with the same tokenizer, to draft for it; not part of a wheel."""
