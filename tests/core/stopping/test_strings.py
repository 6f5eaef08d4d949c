"""Stop strings are found in the token that completes them, wherever the text is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streamer.core.stopping.strings import StopStrings, can_end, find_stop, last_bytes


def first_stop(pieces: list[bytes], stops: list[bytes]) -> int | None:
    """Feed the pieces one by one; the byte at which the text ends."""
    strings, tokens = StopStrings(stops, pieces), range(len(pieces))
    for token in tokens:
        found = strings.find(tokens, 0, token, token) if strings.may_end_in(token) else None
        if found is not None:
            return found.text_bytes
    return None


def test_a_stop_string_across_three_tokens() -> None:
    assert first_stop([b"ab", b"c\n", b"\nU", b"ser:"], [b"\n\nUser"]) == 3


def test_the_earliest_start_wins_then_the_first_listed() -> None:
    assert find_stop(b"", b"xxabc", [b"c", b"ab"]) == (2, 1)
    assert find_stop(b"", b"abc", [b"ab", b"abc"]) == (0, 0)


def test_a_stop_character_split_across_tokens_is_matched() -> None:
    euro = "€".encode()
    assert first_stop([b"5 ", euro[:1], euro[1:]], [euro]) == 2


def test_a_one_byte_stop_needs_no_bytes_before() -> None:
    assert last_bytes(iter([b"abc"]), 0) == b""


def test_pieces_that_can_not_end_a_stop_string() -> None:
    assert [can_end(piece, [b"abc"]) for piece in (b"", b"ab", b"c", b"bcx", b"ac", b"xabcx")] == [
        False, False, True, True, False, True,
    ]  # fmt: skip


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
