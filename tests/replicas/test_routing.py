"""Where requests go: to what is known of their prompts, unless that is too busy."""

from __future__ import annotations

import random

from streamer.core.blocks import BlockHasher
from streamer.replicas.routing import IMBALANCE, Known, choose

HASHER = BlockHasher(16, bytes(32))


class Candidate:
    def __init__(self, busyness: float = 0.0, max_blocks: int = 1000) -> None:
        self.known = Known(max_blocks)
        self.busyness = busyness


def hashes(*words: int) -> tuple[bytes, ...]:
    """Of a prompt of so many blocks, each of one number."""
    return HASHER.hash_blocks([word for word in words for _ in range(16)], b"")


def test_the_longest_known_prefix_comes_first() -> None:
    short, long, none = Candidate(), Candidate(IMBALANCE), Candidate()
    short.known.add(hashes(1, 2))
    long.known.add(hashes(1, 2, 3, 4))
    assert choose([none, short, long], hashes(1, 2, 3, 9)) is long
    assert choose([none, short, long], hashes(1, 9)) is not none
    long.busyness += 0.01  # beyond the bound
    assert choose([none, short, long], hashes(1, 2, 3, 9)) in (short, none)
    assert choose([], hashes(1)) is None


def test_without_a_known_prefix_the_least_busy_one_is_chosen() -> None:
    busy, idle = Candidate(0.3), Candidate(0.2)
    assert choose([busy, idle], hashes(1, 2)) is idle
    assert choose([busy, idle], ()) is idle


def test_what_is_known_is_bounded_and_the_oldest_goes_first() -> None:
    known = Known(4)
    known.add(hashes(1, 2))
    known.add(hashes(3, 4))
    known.add(hashes(1, 2))  # used again
    known.add(hashes(5))
    assert len(known) == 4
    assert known.num_known(hashes(1, 2)) == 2
    assert known.num_known(hashes(3, 4)) == 1  # its last block went


def hit_rate(is_random: bool, num_replicas: int = 4) -> float:
    """Share of the prompts' blocks that the chosen replica has: 64 conversations of 8 turns."""
    draw = random.Random(5)
    replicas = [Candidate(max_blocks=512) for _ in range(num_replicas)]
    turns = [conversation for conversation in range(64) for _ in range(8)]
    draw.shuffle(turns)
    prompts: dict[int, list[int]] = {}
    hit = num = 0
    for turn in turns:
        words = prompts.setdefault(turn, [0, turn])  # all begin with the same block
        words += [draw.getrandbits(30), draw.getrandbits(30)]
        wanted = hashes(*words)
        chosen = draw.choice(replicas) if is_random else choose(replicas, wanted)
        assert chosen is not None
        hit += chosen.known.num_known(wanted)
        num += len(wanted)
        chosen.known.add(wanted)
        for each in replicas:
            each.busyness = 0.9 * each.busyness + (0.1 if each is chosen else 0.0)
    return hit / num


def test_conversations_find_their_blocks_more_often_than_at_random() -> None:
    assert hit_rate(is_random=False) > 0.7
    assert hit_rate(is_random=True) < 0.5
