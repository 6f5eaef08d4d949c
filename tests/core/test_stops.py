"""Stop strings on bytes: found wherever token borders fall, and nowhere else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streamer.core.stops import find_stop, next_tail


def first_stop(pieces: list[bytes], stops: list[bytes]) -> int | None:
    """Feed the pieces one by one; the byte at which the text ends."""
    tail, done = b"", 0
    for piece in pieces:
        found = find_stop(tail, piece, stops)
        if found is not None:
            return done - len(tail) + found[0]
        done += len(piece)
        tail = next_tail(tail, piece, stops)
    return None


def test_a_stop_string_across_three_tokens() -> None:
    assert first_stop([b"ab", b"c\n", b"\nU", b"ser:"], [b"\n\nUser"]) == 3


def test_the_earliest_start_wins_then_the_first_listed() -> None:
    assert find_stop(b"", b"xxabc", [b"c", b"ab"]) == (2, 1)
    assert find_stop(b"", b"abc", [b"ab", b"abc"]) == (0, 0)


def test_a_character_cut_between_tokens_is_matched() -> None:
    euro = "€".encode()
    assert first_stop([b"5 ", euro[:1], euro[1:]], [euro]) == 2


def test_a_one_byte_stop_keeps_no_tail() -> None:
    assert next_tail(b"", b"abc", [b"x"]) == b""


@given(
    st.lists(st.binary(min_size=0, max_size=4).map(lambda b: bytes(c % 3 + 97 for c in b))),
    st.lists(st.text("abc", min_size=1, max_size=5).map(str.encode), min_size=1, max_size=3),
)
def test_equals_a_search_of_the_whole_text_at_every_step(
    pieces: list[bytes], stops: list[bytes]
) -> None:
    text, expected = b"", None
    for piece in pieces:
        text += piece
        starts = [at for at in (text.find(stop) for stop in stops) if at >= 0]
        if starts:
            expected = min(starts)
            break
    assert first_stop(pieces, stops) == expected
