"""Every GPU kernel compiles for an H200, without one: the interpreter accepts more than Triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]
SHARED_BYTES = 227 << 10  # of an H200's multiprocessor, for one program
KERNELS = {
    *("_attention_kernel", "_merge_kernel", "_rope_kernel", "_store_kernel", "_norm_kernel"),
    *("_gate_kernel", "_embedding_kernel", "_copy_kernel", "_best_chunk_kernel"),
    *("_best_of_chunks_kernel", "_draw_kernel", "_choose_kernel", "_cut_kernel"),
    *("_prepare_kernel", "_commit_kernel"),
}


def test_every_kernel_compiles_and_keeps_to_its_registers(tmp_path: Path) -> None:
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernels.gpu.compile"],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    assert {name for name, *_ in seen} == KERNELS
    for name, label, stack, shared, factors, is_apart in seen:
        assert shared <= SHARED_BYTES, (name, label)
        if label != "fp32":
            assert stack <= 0, (name, stack)
        if name == "_attention_kernel" and label != "fp32":
            assert {factor.split(".f32")[0] for factor in factors} == {"bf16.bf16"}
            assert is_apart == (label == "codes")  # tile.py: two levels
