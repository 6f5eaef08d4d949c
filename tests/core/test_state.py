"""State: each owner is changed by its own methods alone, and check finds every missing part."""

from __future__ import annotations

import ast
import heapq
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamer import core
from streamer.core.blocks import BlockHasher
from streamer.core.state import State
from streamer.errors import InvariantViolated
from tests.core.driver import Driver, make_config
from tests.core.scripted import Scripted


def lose_a_row(state: State) -> None:
    state.leave_all(state.requests.by_id["r0"])
    state.rows.reserve(state.requests.by_id["r2"], 1)
    state.requests.by_id["r2"].sequences[0].row = -1


def free_a_row_twice(state: State) -> None:
    heapq.heappush(state.rows._free, 0)


def swap_two_rows(state: State) -> None:
    owners = state.rows.owners
    owners[0], owners[1] = owners[1], owners[0]


def drop_a_waiting_request(state: State) -> None:
    state.queue.remove(state.requests.by_id["r2"])


def queue_a_request_twice(state: State) -> None:
    state.enqueue(state.requests.by_id["r2"])


def queue_a_running_request(state: State) -> None:
    state.enqueue(state.requests.by_id["r0"])


def lose_a_block(state: State) -> None:
    state.kv.device.take(1)


def drop_a_running_request(state: State) -> None:
    state.requests.running.popitem()


def extend_a_steady_sequence(state: State) -> None:
    state.requests.by_id["r0"].sequences[0].steady_until += 1


def shorten_the_lineup(state: State) -> None:
    state.requests.lineup.remove(state.requests.by_id["r0"].sequences[0])


@pytest.mark.parametrize(
    ("corrupt", "says"),
    [
        (lose_a_row, r"2 rows: 0 free \+ 0 cooling \+ 1 held"),
        (free_a_row_twice, r"2 rows: 1 free \+ 0 cooling \+ 2 held"),
        (swap_two_rows, "another sequence"),
        (drop_a_waiting_request, "request r2 is waiting and not in the queue"),
        (queue_a_request_twice, "2 requests are queued, 1 of them different"),
        (queue_a_running_request, "request r0 is running and in the queue"),
        (lose_a_block, "1 references, held by 0 tables"),
        (drop_a_running_request, "2 requests are running, 1 in its set"),
        (extend_a_steady_sequence, "r0 counts as steady for 4 plans: 5 of 6 .*, room for 3"),
        (shorten_the_lineup, "2 sequences run, 1 of them steady; 1 are lined up, 1 of them"),
    ],
)
def test_check_finds_lost_entries(corrupt: Callable[[State], None], says: str) -> None:
    driver = Driver(make_config(max_num_seqs=2))
    for start in (0, 30, 60):
        driver.add([start, 1, 2])
    for _ in range(3):  # to steady sequences
        driver.step()
    state = driver.scheduler.state
    state.check()
    corrupt(state)
    with pytest.raises(InvariantViolated, match=says):
        state.check()


OWNERS = {"requests", "queue", "kv", "rows", "report"}
CHANGES = {
    *("append", "appendleft", "add", "clear", "discard", "extend", "insert", "pop", "popitem"),
    *("popleft", "remove", "setdefault", "sort", "update"),
}


def names(node: ast.expr) -> list[str]:
    """a.b[c].d as a, b, d."""
    match node:
        case ast.Attribute():
            return [*names(node.value), node.attr]
        case ast.Subscript():
            return names(node.value)
        case ast.Name():
            return [node.id]
    return []


def changes_of_an_owner(source: str) -> Iterator[str]:
    """Assignments to an owner's attributes, and changes of its containers, from outside."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                changed = [names(target)[:-1] for target in targets]
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                changed = [names(target)[:-1]]
            case ast.Call(func=ast.Attribute(attr=attr) as called) if attr in CHANGES:
                changed = [names(called)[:-2]]
            case _:
                continue
        if any(OWNERS & set(path) for path in changed):
            yield ast.unparse(node)


@pytest.mark.parametrize("path", sorted(Path(core.__path__[0]).glob("*.py")), ids=lambda p: p.stem)
def test_owners_change_only_through_their_own_methods(path: Path) -> None:
    assert not list(changes_of_an_owner(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "change",
    [
        "state.kv.plan = 3",
        "self.state.requests.counts[status] += 1",
        "kv.copies.pop(block)",
        "del state.requests.by_id[name]",
        "state.report.notices.insert(0, notice)",
    ],
)
def test_a_change_that_bypasses_an_owner_is_found(change: str) -> None:
    assert list(changes_of_an_owner(change)) == [change]


def test_blocks_that_come_are_counted_without_a_look_at_any_row_unless_one_verifies() -> None:
    """Every row that lacks a block asks."""

    class Unread(dict[Any, None]):
        def __iter__(self) -> Any:
            raise AssertionError("looked at the running requests")

    state = State(make_config(), BlockHasher(4, b"s" * 32), Scripted(0))
    state.requests.running = Unread()
    assert state.num_coming() == 0
