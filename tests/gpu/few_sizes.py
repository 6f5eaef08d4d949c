"""Runners of tests that record steps of few sizes: a runner of the default ones has 94 graphs.

Changes the sizes that model/runner/recorded.py has, so that more steps are padded, and those of
more than 256 tokens run op by op.
"""

from __future__ import annotations

import pytest

from streamer.model.runner import recorded

MIXED_SIZES = (32, 64, 256)
ROWS = 64  # decodes of 256 rows: 1, 2, 4, 64, 128, 192 and 256


def record_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test's end."""
    monkeypatch.setattr(recorded, "MIXED_SIZES", MIXED_SIZES)
    monkeypatch.setattr(recorded, "ROWS", ROWS)
