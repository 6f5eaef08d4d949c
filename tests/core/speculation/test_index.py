"""Text: the longest earlier occurrence, the votes of equal ones, and the ends of documents."""

from __future__ import annotations

from streamer.core.speculation.index import CANDIDATES, Text


def key(*tokens: int) -> int:
    return hash(tokens)


def test_the_longest_of_several_occurrences_wins_over_later_ones() -> None:
    text = Text()
    text.add([1, 2, 3, 4, 50, 9, 2, 3, 4, 60])
    at, length, is_disputed = text.longest(text.last[key(2, 3, 4)], [1, 2, 3, 4])
    assert (text.tokens[at], length, is_disputed) == (50, 4, False)


def test_of_equally_long_ones_the_token_that_follows_most_wins_and_the_rest_is_known() -> None:
    text = Text()
    for after in (50, 60, 50):
        text.add([1, 2, 3, after])
    at, length, is_disputed = text.longest(text.last[key(1, 2, 3)], [1, 2, 3])
    assert (text.tokens[at], length, is_disputed) == (50, 3, True)
    assert at == 11  # the latest of them


def test_one_occurrence_alone_is_not_disputed() -> None:
    text = Text()
    text.add([7, 1, 2, 3, 50, 51])
    assert text.longest(text.last[key(1, 2, 3)], [9, 1, 2, 3]) == (4, 3, False)
    assert text.continuation(4, 9) == [50, 51]


def test_an_occurrence_that_nothing_follows_is_none() -> None:
    text = Text()
    text.add([1, 2, 3, 4, 1, 2, 3])
    assert text.longest(text.last[key(1, 2, 3)], [1, 2, 3]) == (3, 3, False)
    text.end_document()
    assert text.longest(text.last[key(1, 2, 3)], [1, 2, 3]) == (3, 3, False)


def test_a_collision_of_keys_is_no_match() -> None:
    text = Text()
    text.add([1, 2, 3, 50])
    assert text.longest(text.last[key(1, 2, 3)], [7, 8, 9]) == (0, 0, False)


def test_no_match_and_no_continuation_goes_across_documents() -> None:
    text = Text()
    text.add([1, 2])
    text.end_document()
    text.add([3, 4, 5, 6])
    text.end_document()
    text.add([7])
    assert key(1, 2, 3) not in text.last
    assert key(2, 3, 4) not in text.last
    assert text.continuation(text.last[key(3, 4, 5)], 9) == [6]


def test_the_work_of_a_common_run_is_bounded() -> None:
    text = Text()
    text.add([9, 1, 2, 3, 50])
    for _ in range(CANDIDATES):
        text.add([8, 1, 2, 3, 60])
    at, _, _ = text.longest(text.last[key(1, 2, 3)], [9, 1, 2, 3])
    assert text.tokens[at] == 60  # the longer one is too far back


def test_a_sequences_own_tokens_are_indexed_from_the_given_start_on() -> None:
    known = [5, 6, 7]
    text = Text(known, start=3)
    known += [1, 2, 3, 4]
    assert len(text) == 0
    text.last[key(1, 2, 3)] = 6
    text.before += [0, 0, 0]
    assert text.longest(6, [7, 1, 2, 3]) == (6, 4, False)
