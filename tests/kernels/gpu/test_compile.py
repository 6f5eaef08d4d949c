"""Every GPU kernel compiles for an H200, without one: the interpreter accepts more than Triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]
# For one program: of an H200's multiprocessor, and of those of GPUs of capability 8.6 and 8.9.
SHARED_BYTES, SMALL_BYTES = 227 << 10, 99 << 10
KERNELS = {
    *(
        "_wide_kernel",
        "_narrow_kernel",
        "_list_kernel",
        "_merge_kernel",
        "_rope_kernel",
        "_store_kernel",
        "_norm_kernel",
    ),
    *("_gate_kernel", "_embedding_kernel", "_copy_kernel", "_best_chunk_kernel"),
    *("_best_of_chunks_kernel", "_draw_kernel", "_choose_kernel", "_cut_kernel"),
    *("_prepare_kernel", "_commit_kernel", "_multiply_kernel", "_sum_kernel", "_rows_kernel"),
    *("_few_kernel", "_few_dense_kernel", "_quantize_kernel"),
}
ATTENTION = {"_wide_kernel", "_narrow_kernel"}
PRODUCTS = {*ATTENTION, "_multiply_kernel"}
NUM_PARTS = 2  # compiled side by side
# Whose loads go on while they compute; but for decodes over 16-bit pools: see paged.NARROW_STAGES.
LOOPS = {*PRODUCTS, "_cut_kernel"}
ONE_WARP = "_narrow_kernel", {"bf16", "fp16"}
# Bytes a thread may spill, by label: a float32 model over a quantized pool, which is not made for
# speed, and a prefill where shared memory is small.
SPILLED_BYTES = {"small": 8, "small codes": 64, "fp32 codes": 264}
CAPPED, CAPPED_BYTES = "_multiply_kernel", 24  # with 64 rows, for a second program beside it


def test_every_kernel_compiles_and_keeps_to_its_registers(tmp_path: Path) -> None:
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.gpu.compile"]
    seen = []
    with ExitStack() as stack:
        parts = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, str(i), str(NUM_PARTS)],
                    env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for i in range(NUM_PARTS)
        ]
        for part in parts:
            stack.callback(part.kill)
        for part in parts:
            output, _ = part.communicate(timeout=900)  # 100 s on two free cores
            assert part.returncode == 0
            seen += [json.loads(line) for line in output.splitlines()]
    assert {made["kernel"] for made in seen} == KERNELS
    assert {made["label"] for made in seen} >= set(SPILLED_BYTES)
    for made in seen:
        is_small = made["label"].startswith("small")
        assert made["shared"] <= (SMALL_BYTES if is_small else SHARED_BYTES), made
        most = SPILLED_BYTES.get(made["label"], 0) if made["kernel"] in ATTENTION else 0
        most = CAPPED_BYTES if made["kernel"] == CAPPED else most
        assert made["stack"] <= most, made
        is_one_warp = made["kernel"] == ONE_WARP[0] and made["label"] in ONE_WARP[1]
        if made["kernel"] in LOOPS and not is_one_warp and not is_small:
            assert made["overlap"] > 0, made
        dtype = made["label"].split()[0]
        if made["kernel"] in PRODUCTS:
            expected = {"fp32": [], "fp16": ["f16.f16"]}.get(dtype, ["bf16.bf16"])
            assert made["factors"] == expected, made
        if made["kernel"] in ATTENTION and dtype != "fp32":
            assert made["is_apart"] == made["label"].endswith("codes"), made  # tile.py: two levels
