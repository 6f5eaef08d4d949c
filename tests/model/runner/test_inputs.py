"""Rows: plans become packed tensors; errors in a plan are refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from streamer.core.plan import Chunk, Plan, RowJoin, TableUpdate
from streamer.core.sampling import SamplingParams
from streamer.errors import InvariantViolated
from streamer.model.runner.inputs import Rows, StepInputs
from streamer.model.sampling.runs import CUT, FAILED, Run

PARAMS = SamplingParams(temperature=0.0, seed=0)


def join(row: int, tokens: tuple[int, ...], blocks: tuple[int, ...], **fields: Any) -> RowJoin:
    """A join with everything uncomputed, all of it prompt."""
    defaults: dict[str, Any] = {"num_prompt": len(tokens), "num_computed": 0, "params": PARAMS}
    return RowJoin(
        row=row, request_id=f"r{row}", choice=0, tokens=tokens, blocks=blocks,
        **{**defaults, **fields},
    )  # fmt: skip


def make(*joins: RowJoin) -> Rows:
    """4 row slots, tables of 3 out of 10 blocks of 4 tokens."""
    rows = Rows(4, 3, 10, 4)
    for one in joins:
        rows.join(one)
    return rows


def step(rows: Rows, *chunks: Chunk, num: tuple[int, int, int], **fields: Any) -> StepInputs:
    """Inputs of a plan with these sums: rows, tokens, samples."""
    return rows.inputs(
        Plan(
            number=1, chunks=chunks, num_rows=num[0], num_tokens=num[1], num_samples=num[2],
            **fields,
        )
    )  # fmt: skip


def test_chunks_and_decodes_are_packed() -> None:
    """Decoding rows first, then chunks; slots follow the tables."""
    rows = make(
        join(2, (7, 8, 9, 10, 11, 12), (5, 1)),
        join(0, (20, 21, 22), (9,), num_prompt=2, num_computed=2),
    )
    got = step(rows, Chunk(2, 0, 5, 0), num=(2, 6, 1))
    assert got.tokens is not None
    assert got.positions is not None
    assert got.batch is not None
    assert got.tokens.tolist() == [22, 7, 8, 9, 10, 11]
    assert got.positions.tolist() == [2, 0, 1, 2, 3, 4]
    assert got.batch.slots.tolist() == [9 * 4 + 2, 20, 21, 22, 23, 4]
    assert got.batch.query_lens.tolist() == [1, 5]
    assert got.batch.context_lens.tolist() == [3, 5]
    assert got.batch.block_tables.tolist()[1] == [5, 1]
    assert got.last is not None
    assert got.last.tolist() == [0]
    assert (got.rows, got.draw_at.tolist(), got.num_chunk_tokens) == ((0,), [3], 5)


def test_position_37_with_block_size_16_is_logical_block_2_offset_5() -> None:
    """The cell that K and V of the token at position 37 are written to: block 9 comes third."""
    rows = Rows(4, 3, 10, 16)
    rows.join(join(0, tuple(range(38)), (7, 4, 9), num_computed=37))
    got = step(rows, num=(1, 1, 1))
    assert got.positions is not None
    assert got.batch is not None
    assert got.positions.tolist() == [37]
    assert divmod(got.batch.slots.item(), 16) == (9, 5)


def test_a_steady_step_takes_all_rows() -> None:
    """No chunk: every row draws, `last` is None; positions advance without a plan that says so."""
    rows = make(join(1, (3,), (4,)), join(3, (5, 6), (0, 2), num_computed=1, num_prompt=1))
    for position in (0, 1):
        got = step(rows, num=(2, 2, 2))
        assert got.last is None
        assert got.positions is not None
        assert got.positions.tolist() == [position, 1 + position]
        assert (got.rows, got.draw_at.tolist()) == ((1, 3), [position + 1, position + 2])
        rows.drew(got, [40, 41])
    assert got.tokens is not None
    assert got.tokens.tolist() == [40, 41]


def test_rows_without_holes_lend_their_tables() -> None:
    """Tables are not copied where row r of the batch is row slot r; else the batch has its own."""
    rows = make(join(0, (3,), (4,)), join(1, (5,), (2,)))
    first = step(rows, num=(2, 2, 2))
    rows.leave(0)
    rows.drew(first, [5, 6])
    second = step(rows, num=(1, 1, 1))
    assert first.batch is not None
    assert second.batch is not None
    assert second.batch.block_tables.tolist() == [[2]]
    rows.update_table(TableUpdate(1, 0, (7,)))
    assert first.batch.block_tables.tolist() == [[4], [7]]
    assert second.batch.block_tables.tolist() == [[2]]


def test_a_resumed_row_prefills_its_own_output() -> None:
    """Drawn tokens are known tokens: a chunk after a failed sampling step may contain them."""
    rows = make(join(0, (1, 2), (3,)))
    rows.drew(step(rows, Chunk(0, 0, 2, 1), num=(1, 2, 1)), [9])
    got = step(rows, Chunk(0, 2, 1, 1), num=(1, 1, 1))
    assert got.tokens is not None
    assert got.tokens.tolist() == [9]


@pytest.mark.parametrize(
    ("drawn", "computed"),
    [([7, 8, 9], 7), ([7, 8, CUT], 6), ([5, CUT, CUT], 5), ([7, FAILED, CUT], 5)],
)
def test_a_run_moves_its_row_as_far_as_it_was_right(drawn: list[int], computed: int) -> None:
    """Beside a row that decodes; the next token goes where the first wrong one was computed."""
    rows = make(
        join(2, (1, 2, 3, 4, 6), (4, 5), num_prompt=2, num_computed=4),
        join(0, (9,), (1,)),
    )
    verify = Chunk(2, 4, 3, 3, tokens=(6, 7, 8))
    got = step(rows, verify, num=(2, 4, 4))
    assert got.tokens is not None
    assert got.last is not None
    assert (got.tokens.tolist(), got.last.tolist()) == ([9, 6, 7, 8], [0, 1, 2, 3])
    assert (got.rows, got.draw_at.tolist()) == ((0, 2, 2, 2), [1, 5, 6, 7])
    assert (got.runs, got.num_chunk_tokens) == ((Run(1, (7, 8)),), 0)
    settled = rows.drew(got, [3, *drawn])
    newest = [token for token in drawn if token >= 0][-1]
    assert settled == {2: newest}
    after = step(rows, num=(2, 2, 2))
    assert after.tokens is not None
    assert after.positions is not None
    assert (after.tokens.tolist(), after.positions.tolist()) == ([3, newest], [1, computed])


def test_a_row_waits_for_its_run() -> None:
    """It may be idle or leave; what its run drew then has no effect on a row that took its slot."""
    rows = make(join(0, (1, 2), (3,), num_computed=1))
    got = step(rows, Chunk(0, 1, 2, 2, tokens=(2, 5)), num=(1, 2, 2))
    step(rows, num=(1, 0, 0), idle=(0,))
    for chunks in ([], [Chunk(0, 3, 1, 1)], [Chunk(0, 2, 1, 1, tokens=(6,))]):
        with pytest.raises(InvariantViolated, match="row 0"):
            step(rows, *chunks, num=(1, 1, 1))
    rows.leave(0)
    rows.join(join(0, (1, 2), (3,), num_computed=1))
    again = step(rows, Chunk(0, 1, 2, 2, tokens=(2, 5)), num=(1, 2, 2))
    assert rows.drew(got, [5, 6]) == {}
    assert rows.drew(again, [5, 7]) == {0: 7}


def test_idle_rows_leave_the_others_steady() -> None:
    """The rows are the same object while the same ones are idle; those come back as they were."""
    rows = make(join(0, (1,), (0,)), join(1, (2,), (1,)), join(2, (3,), (2,)))
    first = step(rows, num=(3, 2, 2), idle=(1,))
    rows.drew(first, [8, 9])
    second = step(rows, num=(3, 2, 2), idle=(1,))
    rows.drew(second, [6, 7])
    assert first.is_steady
    assert first.rows == (0, 2)
    assert second.rows is first.rows
    third = step(rows, num=(3, 3, 3))
    assert third.tokens is not None
    assert third.positions is not None
    assert (third.rows, third.tokens.tolist()) == ((0, 1, 2), [6, 2, 7])
    assert third.positions.tolist() == [2, 0, 2]


def test_a_table_may_become_shorter() -> None:
    """Blocks given back are not the row's any more: a plan that would write there is refused."""
    rows = make(join(0, (1, 2, 3, 4), (3, 5)))
    rows.update_table(TableUpdate(0, 1, ()))
    assert rows.table(0, 0).tolist() == [3]
    step(rows, Chunk(0, 0, 4, 1), num=(1, 4, 1))
    with pytest.raises(InvariantViolated, match="its 1 blocks of 4 do not cover"):
        step(rows, num=(1, 1, 1))


@pytest.mark.parametrize("idle", [(1, 1), (3,)])
def test_idle_rows_are_resident_and_named_once(idle: tuple[int, ...]) -> None:
    rows = make(join(0, (1,), (0,)), join(1, (2,), (1,)))
    with pytest.raises(InvariantViolated, match="idle rows"):
        step(rows, num=(2, 1, 1), idle=idle)


def test_forks_draw_last() -> None:
    """Forks compute nothing and come after the rows that do."""
    forked = SamplingParams(temperature=0.0, seed=0, n=2)
    rows = make(join(1, (1, 2, 3), (3,), params=forked))
    child = join(0, (1, 2, 3), (3,), num_computed=3, logits_of=1)
    rows.join(child)
    got = step(rows, Chunk(1, 0, 3, 1), num=(2, 3, 2), joins=(child,))
    assert (got.rows, got.parents) == ((1, 0), [0])
    assert got.draw_at.tolist() == [3, 3]


def test_a_row_slot_is_used_again() -> None:
    """Nothing of the old row is left."""
    rows = make(join(0, (1, 2, 3, 4, 5), (3, 4), num_computed=4))
    rows.leave(0)
    rows.join(join(0, (6,), (1,)))
    got = step(rows, num=(1, 1, 1))
    assert got.batch is not None
    assert (got.batch.slots.tolist(), got.draw_at.tolist()) == ([4], [1])


def test_tables_grow_and_change() -> None:
    """A table grows at its end, or changes from a block in the middle on (copy-on-write)."""
    rows = make(join(0, (1, 2, 3, 4, 5), (3,)))
    rows.update_table(TableUpdate(0, 1, (7,)))
    rows.update_table(TableUpdate(0, 0, (8, 7)))
    got = step(rows, Chunk(0, 0, 5, 1), num=(1, 5, 1))
    assert got.batch is not None
    assert got.batch.slots.tolist() == [32, 33, 34, 35, 28]


@pytest.mark.parametrize(
    ("joins", "says"),
    [
        ([join(4, (1,), ())], "beyond the 4 row slots"),
        ([join(-1, (1,), ())], "beyond the 4 row slots"),
        ([join(0, (1,), ()), join(0, (1,), ())], "row 0 is taken, r0"),
        ([join(0, (), ())], "0 tokens"),
        ([join(0, (1, 2), (1,), num_prompt=3)], "3 of them prompt"),
        ([join(0, (1, 2), (1,), num_computed=3)], "3 computed"),
        ([join(0, (1,) * 9, (1, 2), num_computed=9)], "9 computed tokens in 2 blocks"),
        ([join(0, (1,), (1, 2, 3, 4))], "blocks 0 to 4"),
        ([join(0, (1,), (10,))], "not below 10"),
    ],
)
def test_wrong_joins(joins: list[RowJoin], says: str) -> None:
    """Errors name the row and the numbers."""
    with pytest.raises(InvariantViolated, match=says):
        make(*joins)


@pytest.mark.parametrize(
    ("update", "says"),
    [
        (TableUpdate(1, 0, (1,)), "the row is empty"),
        (TableUpdate(0, 2, (1,)), "blocks 2 to 3, it has 1"),
        (TableUpdate(0, 1, (1, 2, 3)), "at most 3"),
        (TableUpdate(0, 1, (-1,)), "not below 10"),
    ],
)
def test_wrong_tables(update: TableUpdate, says: str) -> None:
    """A table has no gaps, no unknown blocks, and no row that is not there."""
    with pytest.raises(InvariantViolated, match=says):
        make(join(0, (1,), (2,))).update_table(update)


@pytest.mark.parametrize(
    ("chunks", "num", "says"),
    [
        ([Chunk(1, 0, 1, 1)], (1, 1, 1), "chunk of row 1"),
        ([Chunk(0, 0, 2, 0), Chunk(0, 2, 1, 0)], (1, 3, 0), "named twice"),
        ([Chunk(0, 1, 2, 0)], (1, 2, 0), "2 tokens from 1"),
        ([Chunk(0, 0, 7, 0)], (1, 7, 0), "7 tokens from 0"),
        ([Chunk(0, 0, 5, 1)], (1, 5, 1), "1 draws, 0 tokens given; 0 of 6"),
        ([Chunk(0, 0, 6, 2)], (1, 6, 2), "2 draws, 0 tokens given; 0 of 6"),
        ([Chunk(0, 0, 2, 2, tokens=(1, 2, 3))], (1, 2, 2), "2 draws, 3 tokens given"),
        ([Chunk(0, 0, 2, 3, tokens=(1, 2))], (1, 2, 3), "3 draws, 2 tokens given"),
        ([Chunk(0, 1, 2, 2, tokens=(1, 2))], (1, 2, 2), "2 tokens from 1"),
        ([Chunk(0, 0, 0, 1)], (1, 0, 1), "0 tokens from 0"),
        ([Chunk(0, 0, -1, 0)], (1, -1, 0), "-1 tokens"),
        ([Chunk(0, 0, 5, 0)], (1, 5, 0), "its 1 blocks of 4 do not cover"),
        ([], (1, 1, 1), "row 0 is to decode, but 0 of its 6"),
        ([Chunk(0, 0, 4, 0)], (2, 4, 0), "num_rows is 2, the rows say 1"),
        ([Chunk(0, 0, 4, 0)], (1, 5, 0), "num_tokens is 5, the rows say 4"),
        ([Chunk(0, 0, 4, 0)], (1, 4, 1), "num_samples is 1, the rows say 0"),
    ],
)
def test_wrong_steps(chunks: list[Chunk], num: tuple[int, int, int], says: str) -> None:
    """A chunk continues its row, samples only at its end, and is covered by blocks."""
    rows = make(join(0, (1, 2, 3, 4, 5, 6), (2,)))
    with pytest.raises(InvariantViolated, match=says):
        step(rows, *chunks, num=num)


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk(0, 0, 5, 1, 5),  # the last token is for drawing
        Chunk(0, 0, 4, 0, 4),  # the token after it is not of the prompt
        Chunk(0, 0, 2, 0, 3),
        Chunk(0, 0, 2, 0, -1),
        Chunk(1, 0, 2, 0, 1),  # this request asked for no scores
    ],
)
def test_scores_that_a_plan_can_not_have(chunk: Chunk) -> None:
    asked = msgspec.structs.replace(PARAMS, prompt_logprobs=0)
    rows = make(
        msgspec.structs.replace(join(0, (1, 2, 3, 4, 5), (3, 5), num_prompt=4), params=asked),
        join(1, (1, 2, 3), (4,), num_prompt=3),
    )
    idle = (1 - chunk.row,)
    with pytest.raises(InvariantViolated, match="are scored"):
        step(rows, chunk, num=(2, chunk.count, chunk.num_draws), idle=idle)


def test_scored_tokens_come_after_those_that_draw() -> None:
    asked = msgspec.structs.replace(PARAMS, prompt_logprobs=2)
    rows = make(
        join(0, (9,), (0,)),
        msgspec.structs.replace(join(1, (1, 2, 3, 4, 5), (3, 1)), params=asked),
        msgspec.structs.replace(join(2, (6, 7, 8), (2,)), params=asked),
    )
    got = step(rows, Chunk(1, 0, 4, 0, 3), Chunk(2, 0, 3, 1, 2), num=(3, 8, 2))
    assert got.last is not None
    assert got.last.tolist() == [0, 7, 2, 3, 4, 5, 6]
    assert got.scored is not None
    assert got.scored.targets.tolist() == [3, 4, 5, 7, 8]
    assert (got.scored.rows, got.scored.num_top) == (((1, 3), (2, 2)), (2, 2))


def test_steady_steps_are_as_if_each_were_made_anew() -> None:
    """Through the ends of blocks, a prompt's chunk between them, and a row that leaves."""

    def rows() -> Rows:
        return make(
            join(0, (1, 2), (3,), num_computed=1, num_prompt=1),
            join(2, (4, 5, 6, 7), (1, 8, 6), num_computed=3, num_prompt=3),
        )

    def all_of(got: StepInputs) -> list[Any]:
        batch, tokens, positions = got.batch, got.tokens, got.positions
        assert batch is not None
        assert tokens is not None
        assert positions is not None
        assert (batch.max_context, batch.derived) == (max(batch.context_lens), {})
        batch.derived["seen"] = True
        arrays = (
            tokens, positions, batch.slots, batch.block_tables, batch.context_lens,
            batch.query_lens, got.draw_at,
        )  # fmt: skip
        return [array.tolist() for array in arrays]

    kept, anew = rows(), rows()
    earlier: list[tuple[StepInputs, list[int]]] = []
    for number in range(7):
        found = []
        for each in (kept, anew):
            joins, chunks, sums = (), (), (2, 2, 2)
            if number == 2:
                each.update_table(TableUpdate(0, 1, (5,)))
            if number == 3:
                each.join(join(1, (9, 9), (7,)))
                chunks, sums = (Chunk(1, 0, 1, 0),), (3, 3, 2)
            if number == 4:
                each.leave(1)
            if each is anew:
                each._last = None
            got = step(each, *chunks, num=sums, joins=joins)
            found.append(all_of(got))
            each.drew(got, [number + 10] * len(got.rows))
        assert found[0] == found[1]
        earlier.append((got, got.draw_at.tolist()))
    assert all(got.draw_at.tolist() == before for got, before in earlier)
