"""Cases that need a GPU's memory: offsets beyond 2**31, and a graph whose steps follow each other.

They compute little, so that they take seconds; they need 10 GB.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.on_device import require_cuda

require_cuda()

BEYOND = 1 << 31
NO_OPTIONS = {"sliding_window": None, "softcap": None, "sinks": None}


def test_blocks_beyond_two_to_the_31(device: str) -> None:
    """The last block of a pool of more than 2**31 elements is stored to, read and copied."""
    from streamer.kernels import ops
    from streamer.kernels.gpu import backend

    blocks = BEYOND // (16 * 2 * 8 * 16 * 128) + 8
    pool = torch.empty(blocks, 16, 2, 8, 16, 128, dtype=torch.bfloat16, device=device)
    assert pool.numel() > BEYOND
    outs = []
    for last in (3, blocks - 1):
        batch = ops.AttentionBatch(
            query_lens=[16],
            context_lens=[16],
            block_tables=torch.tensor([[last]], device=device),
            slots=torch.arange(16, device=device) + last * 16,
            block_size=16,
        )
        rng = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(16, heads, 128, generator=rng).to(device, torch.bfloat16)
            for heads in (16, 8, 8)
        )
        layer = ops.layer_view(pool, 15)
        backend.store_kv(k, v, layer, batch)
        outs.append(backend.paged_attention(q, layer, batch, 0.1, **NO_OPTIONS))  # type: ignore[arg-type]
    assert torch.equal(outs[0], outs[1])
    backend.copy_blocks(pool, torch.tensor([blocks - 1]), torch.tensor([blocks - 2]))
    assert torch.equal(pool[-2, 15], pool[-1, 15])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("queries", [1, 64])
def test_sums_over_131072_keys(device: str, dtype: torch.dtype, queries: int) -> None:
    """Against float64 on what the pool holds: one decode, and the end of a prompt in one program.

    All values are positive and all keys alike, so that what a sum drops is dropped each time.
    """
    from streamer.kernels import ops, quantized
    from streamer.kernels.gpu import backend

    context, dim, block = 131_072, 128, 16
    count = context // block
    rng = torch.Generator().manual_seed(0)
    k = torch.randn(context, 1, dim, generator=rng).mul_(0.1).to(device, torch.bfloat16)
    v = torch.rand(context, 1, dim, generator=rng).add_(0.5).to(device, torch.bfloat16)
    q = torch.randn(queries, 4, dim, generator=rng).to(device, torch.bfloat16)
    layer = ops.layer_view(backend.new_pool(count, 1, block, 1, dim, dtype, device), 0)
    table = torch.randperm(count, generator=rng).to(device)
    slots = (table[:, None] * block + torch.arange(block, device=device)).view(-1)
    common = {"block_tables": table[None], "block_size": block}
    whole = ops.AttentionBatch(query_lens=[context], context_lens=[context], slots=slots, **common)
    backend.store_kv(k, v, layer, whole)
    step = ops.AttentionBatch(
        query_lens=[queries], context_lens=[context], slots=slots[-queries:], **common
    )
    out = backend.paged_attention(q, layer, step, dim**-0.5, **NO_OPTIONS).double()  # type: ignore[arg-type]
    read = []
    for x in (k, v):
        wide = x.double()
        if dtype in quantized.LIMITS:
            codes, scales = quantized.quantize(x, dtype)
            wide = codes.double() * scales.double().unsqueeze(-1)
        read.append(wide[:, 0])
    scores = torch.einsum("qhd,kd->hqk", q.double(), read[0]) * dim**-0.5
    hidden = torch.ones(queries, context, dtype=torch.bool, device=device).triu(
        context - queries + 1
    )
    weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,kd->qhd", weights, read[1])
    # Half a step of the bfloat16 that comes out is 2**-9; sums may add as much again.
    assert float(((out - expected) / expected).abs().max()) < 2**-8


def test_rows_beyond_two_to_the_31(device: str) -> None:
    """The last row of logits, of a table and of a norm with more than 2**31 elements."""
    from streamer.kernels.gpu import backend

    width = 1 << 17
    x = torch.zeros(BEYOND // width + 2, width, dtype=torch.bfloat16, device=device)
    x[-1, 77] = 5.0
    values, ids = backend.best(x)
    assert (values[-1].item(), ids[-1].item()) == (5.0, 77)
    last = torch.tensor([x.shape[0] - 1], device=device)
    assert torch.equal(backend.embedding(last, x)[0], x[-1])
    ones = torch.ones(width, dtype=torch.bfloat16, device=device)
    assert torch.equal(
        backend.rms_norm(x, ones, 1e-5, rows=last)[0], backend.rms_norm(x[-1:], ones, 1e-5)[0]
    )


def test_swaps_to_pinned_memory_and_back(device: str) -> None:
    from streamer.kernels.gpu import backend

    shape = (8, 2, 16, 2, 64, torch.bfloat16)
    pool, host = backend.new_pool(*shape, device), backend.new_pool(*shape, "cpu")
    assert host.is_pinned()
    pool.normal_()
    before = pool.clone()
    backend.swap_blocks(pool, host, [(2, 5), (3, 6), (7, 0)])
    pool[[2, 3, 7]] = 0
    backend.swap_blocks(host, pool, [(5, 2), (6, 3), (0, 7)])
    torch.cuda.synchronize()
    assert torch.equal(pool, before)


def test_a_captured_decode_equals_the_steps_it_was_captured_from(device: str) -> None:
    """prepare, attention, sampling and commit as one CUDA graph, replayed without host data."""
    from streamer.kernels.gpu import backend
    from streamer.kernels.gpu.decode_step import DecodeStep
    from streamer.kernels.gpu.fixed_step import RowState
    from streamer.kernels.gpu.sampling.sample import SamplingRows, sample
    from tests.kernels.gpu.test_decode_step import BLOCK, Model

    def start() -> tuple[Model, DecodeStep, SamplingRows]:
        state = RowState(4, 8, BLOCK, device)
        state.tables.copy_(torch.arange(32, device=device).view(4, 8))
        state.latest.copy_(torch.tensor([1, 2, 3, 4]))
        step, settings = DecodeStep(state, 4), SamplingRows(4, device)
        step.chosen.copy_(torch.tensor([2, 0, -1, 3]))
        settings.settings[:, 0] = 1.0
        settings.top_k.fill_(5)
        return Model(device, backend), step, settings

    def run(model: Model, step: DecodeStep, settings: SamplingRows) -> None:
        step.prepare()
        logits = model(step.tokens, step.positions, step.batch)
        step.commit(sample(logits, settings, step.chosen, step.drawn_at, has_filters=True))

    plain, captured = start(), start()
    for _ in range(6):
        run(*plain)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(*captured)  # compiles and warms up
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(*captured)
    for _ in range(5):
        graph.replay()
    chosen = [0, 2, 3]
    assert torch.equal(captured[1].state.latest[chosen], plain[1].state.latest[chosen])
    assert captured[1].state.computed.tolist() == plain[1].state.computed.tolist() == [6, 0, 6, 6]


def test_a_captured_step_with_chunks_computes_what_is_sent(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """prepare, stores and attention as one CUDA graph, replayed for steps of other rows: bit for
    bit what they are op by op."""
    from tests.kernels.gpu import test_mixed_step as steps

    steps.small_tiles(monkeypatch)
    cases = [steps.new_case(rows) for rows in steps.STEPS]
    most = max((case.pool for case in cases), key=len)
    pool = torch.full(most.shape, torch.nan, device=device)
    step, held = steps.new_step(device), steps.Inputs(cases[0], device)
    out = torch.zeros_like(held.q)

    def work() -> None:
        step.prepare()
        out.copy_(held.run(cases[0], pool, step.batch, steps.SIZE))

    graph = None
    for case in cases:
        inputs = steps.Inputs(case, device)
        for name in ("k", "v", "q"):
            getattr(held, name).copy_(getattr(inputs, name))
        steps.send(step, case)
        if graph is None:
            work()  # compiles
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                work()
        pool[: len(case.pool)].copy_(case.pool)
        graph.replay()
        alone, count = case.pool.to(device), len(case.slots)
        expected = inputs.run(case, alone, steps.batch_of(case, device), count)
        assert torch.equal(out[:count], expected)
        assert torch.equal(pool[: len(alone)].nan_to_num(7.0), alone.nan_to_num(7.0))
