"""Plans that a scheduler with a bug would make: the fake runner refuses each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from streamer.core.plan import Chunk, Plan, RowJoin, TableUpdate
from streamer.core.sampling import SamplingParams
from streamer.errors import InvariantViolated
from streamer.fake.model import FakeRunner, expected_tokens


def join(row: int, **changes: Any) -> RowJoin:
    """A prompt of 6 tokens in two blocks of 4."""
    made = RowJoin(
        row=row, request_id=f"r{row}", choice=0, tokens=(1,) * 6, num_prompt=6, num_computed=0,
        blocks=(2 * row, 2 * row + 1), params=SamplingParams(),
    )  # fmt: skip
    return replace(made, **changes)


PREFILL = Plan(
    number=1,
    joins=(join(0), join(1)),
    chunks=(Chunk(0, 0, 6, 1), Chunk(1, 0, 4, 0)),
    num_rows=2,
    num_tokens=10,
    num_samples=1,
)
DECODE = Plan(number=2, chunks=(Chunk(1, 4, 2, 1),), num_rows=2, num_tokens=3, num_samples=2)
STEADY = Plan(number=3, num_rows=2, num_tokens=2, num_samples=2)


def runner() -> FakeRunner:
    return FakeRunner(block_size=4, num_blocks=8, num_host_blocks=3)


def run(*plans: Plan) -> list[dict[int, int]]:
    """Launch these plans; the tokens of each row."""
    r = runner()
    results = [r.launch(plan).collect() for plan in plans]
    assert [x.number for x in results] == [p.number for p in plans]
    return [dict(zip(x.rows, x.tokens, strict=True)) for x in results]


def test_good_plans_pass() -> None:
    first, second, third, fourth = expected_tokens(0, 4)
    leave = Plan(number=4, leaves=(0,), num_rows=1, num_tokens=1, num_samples=1,
                 tables=(TableUpdate(1, 1, (5,)),))  # fmt: skip
    drawn = run(PREFILL, DECODE, replace(STEADY, tables=(TableUpdate(0, 2, (6,)),)), leave)
    assert drawn == [{0: first}, {0: second, 1: first}, {0: third, 1: second}, {1: third}]
    assert fourth


def test_a_fork_draws_with_its_parent() -> None:
    fork = join(3, num_computed=6, blocks=(0, 1), choice=1, logits_of=0)
    (drawn,) = run(replace(PREFILL, joins=(*PREFILL.joins, fork), num_rows=3, num_samples=2))
    assert drawn == dict.fromkeys((0, 3), expected_tokens(0, 1)[0])


def test_a_sequence_that_comes_back_counts_on() -> None:
    back = join(0, tokens=(1,) * 3 + tuple(expected_tokens(0, 3)), num_prompt=3)
    (drawn,) = run(replace(PREFILL, joins=(back, join(1))))
    assert drawn == {0: expected_tokens(3, 1)[0]}


def test_rows_are_reported_ascending() -> None:
    rows = (5, 0, 3)
    plan = Plan(
        number=1,
        joins=tuple(join(row, blocks=(0, 1)) for row in rows),
        chunks=tuple(Chunk(row, 0, 6, 1) for row in rows),
        num_rows=3,
        num_tokens=18,
        num_samples=3,
    )
    assert list(run(plan)[0]) == [0, 3, 5]


def verification(*provisional: int, **changes: Any) -> Plan:
    """Row 1 verifies these tokens beside row 0, which decodes; both know one output token."""
    count = 1 + len(provisional)
    chunk = Chunk(1, 6, count, count, tokens=(expected_tokens(0, 1)[0], *provisional))
    tables = (TableUpdate(0, 2, (6,)), TableUpdate(1, 2, (7,)))
    plan = replace(STEADY, chunks=(chunk,), tables=tables, num_tokens=1 + count)
    return replace(plan, num_samples=1 + count, **changes)


def test_a_run_ends_with_the_first_token_that_was_not_proposed() -> None:
    first, second, third, fourth = expected_tokens(0, 4)
    for provisional, run in (
        ((second, third), (second, third, fourth)),
        ((second, 1), (second, third)),
        ((1, third), (second,)),
    ):
        r = runner()
        for plan in (PREFILL, DECODE):
            r.launch(plan).collect()
        result = r.launch(verification(*provisional)).collect()
        assert result.rows == (0, *[1] * len(run))
        assert result.tokens == (third, *run)
        after = replace(STEADY, number=4, idle=(0,), num_tokens=1, num_samples=1)
        assert r.launch(after).collect().tokens == tuple(expected_tokens(1 + len(run), 1))
    assert first


def changed(plan: Plan, **changes: Any) -> Callable[[], list[Plan]]:
    """The good plans up to this one, which is changed for the worse."""
    good = [PREFILL, DECODE, STEADY]
    return lambda: [*good[: plan.number - 1], replace(plan, **changes)]


BAD = {
    "number again": changed(DECODE, number=1),
    "number left out": changed(DECODE, number=3),
    "row joins twice": changed(DECODE, joins=(join(1),)),
    "row leaves twice": changed(DECODE, leaves=(1, 1)),
    "row that is not here leaves": changed(DECODE, leaves=(2,)),
    "rows": changed(PREFILL, num_rows=3),
    "tokens": changed(PREFILL, num_tokens=9),
    "samples": changed(PREFILL, num_samples=2),
    "tokens of a steady step": changed(PREFILL, number=1, chunks=()),
    "chunk starts late": changed(DECODE, chunks=(Chunk(1, 5, 1, 1),)),
    "chunk starts early": changed(DECODE, chunks=(Chunk(1, 3, 3, 1),), num_tokens=4),
    "chunk beyond the tokens": changed(DECODE, chunks=(Chunk(1, 4, 3, 1),), num_tokens=4),
    "chunk of fewer than none": changed(DECODE, chunks=(Chunk(1, 4, -1, 0),), num_tokens=0),
    "draws before its last token": changed(DECODE, chunks=(Chunk(1, 4, 1, 1),), num_tokens=2),
    "draws without computing": changed(STEADY, chunks=(Chunk(1, 6, 0, 1),), num_tokens=1),
    "chunk twice": changed(DECODE, chunks=DECODE.chunks * 2),
    "chunk of an unknown row": changed(DECODE, chunks=(*DECODE.chunks, Chunk(7, 0, 1, 0))),
    "verifies after another token": lambda: [
        PREFILL,
        DECODE,
        verification(1, chunks=(Chunk(1, 6, 2, 2, tokens=(5, 1)),)),
    ],
    "draws fewer than it verifies": lambda: [
        PREFILL,
        DECODE,
        verification(1, chunks=(Chunk(1, 6, 2, 1, tokens=(258, 1)),)),
    ],
    "verifies beyond its blocks": lambda: [PREFILL, DECODE, verification(*range(9))],
    "chunk of an idle row": changed(DECODE, idle=(1,)),
    "idle twice": changed(STEADY, idle=(1, 1), num_tokens=1, num_samples=1),
    "unknown row is idle": changed(STEADY, idle=(7,)),
    "decodes before its prompt is computed": changed(DECODE, chunks=(), num_tokens=2),
    "table too short for a chunk": changed(PREFILL, joins=(join(0, blocks=(0,)), join(1))),
    "table too short for what is computed": changed(
        DECODE, tables=(TableUpdate(0, 1, ()),), number=2
    ),
    "hole in a table": changed(DECODE, tables=(TableUpdate(0, 3, (5,)),)),
    "table of an unknown row": changed(DECODE, tables=(TableUpdate(4, 0, (5,)),)),
    "block beyond the pool": changed(DECODE, tables=(TableUpdate(0, 2, (8,)),)),
    "negative block": changed(PREFILL, joins=(join(0, blocks=(-1, 1)), join(1))),
    "block twice in a table": changed(PREFILL, joins=(join(0, blocks=(1, 1)), join(1))),
    "join with more computed than known": changed(
        PREFILL, joins=(join(0, num_computed=7), join(1))
    ),
    "join without a prompt": changed(PREFILL, joins=(join(0, num_prompt=0), join(1))),
    "join with other output": changed(PREFILL, joins=(join(0, num_prompt=5), join(1))),
    "copy beyond the pool": changed(DECODE, copies=((0, 8),)),
    "copies to one block": changed(DECODE, copies=((0, 6), (1, 6))),
    "swap out beyond the host pool": changed(DECODE, swap_out=((0, 3),)),
    "swap in from beyond it": changed(DECODE, swap_in=((3, 0),)),
    "swap in to one block": changed(DECODE, swap_in=((0, 6), (1, 6))),
    "fork of a row that does not draw": changed(
        PREFILL,
        joins=(*PREFILL.joins, join(3, num_computed=6, logits_of=1)),
        num_rows=3,
        num_samples=2,
    ),
    "fork that is not computed": changed(
        PREFILL,
        joins=(*PREFILL.joins, join(3, num_computed=5, logits_of=0)),
        num_rows=3,
        num_samples=2,
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_plan_is_refused(name: str) -> None:
    *good, bad = BAD[name]()
    r = runner()
    for plan in good:
        r.launch(plan).collect()
    with pytest.raises(InvariantViolated, match=f"plan {bad.number}"):
        r.launch(bad)


def test_a_decode_past_the_table_is_refused() -> None:
    """Rows of 6 tokens have two blocks of 4: the ninth token needs a third."""
    r = runner()
    for plan in (PREFILL, DECODE, STEADY):
        r.launch(plan).collect()
    with pytest.raises(InvariantViolated, match="room for 8"):
        r.launch(replace(STEADY, number=4))
