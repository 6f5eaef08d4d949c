"""TextStream: when text is released, and that the whole equals a plain decode."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streamer.tokenizer.text import TextStream

BYTES = tuple(bytes([b]) for b in range(256))  # token = byte
SPECIAL = 256


def spell(text: bytes, **kwargs: object) -> tuple[list[str], str]:
    """The text that each byte releases, and the rest."""
    stream = TextStream(BYTES, **kwargs)  # type: ignore[arg-type]
    return [stream.push(b) for b in text], stream.finish()


@given(st.text(max_size=60), st.lists(st.text(min_size=1, max_size=4), max_size=3))
def test_text_is_the_same_however_its_bytes_are_cut(text: str, stops: list[str]) -> None:
    pieces, rest = spell(text.encode(), stop=[s.encode() for s in stops])
    assert "".join(pieces) + rest == text


@given(st.binary(max_size=60))
@example(b"\xf0\x9f\x98")
@example(b"\xff" * 50)
def test_any_bytes_decode_as_they_would_at_once(data: bytes) -> None:
    pieces, rest = spell(data)
    assert "".join(pieces) + rest == data.decode("utf-8", "replace")


@given(st.lists(st.binary(min_size=0, max_size=5), max_size=30))
def test_pieces_of_any_length_make_the_same_text(pieces: list[bytes]) -> None:
    stream = TextStream(pieces)
    text = "".join(stream.push(i) for i in range(len(pieces))) + stream.finish()
    assert text == b"".join(pieces).decode("utf-8", "replace")


def test_a_character_is_released_when_it_is_complete() -> None:
    pieces, rest = spell("aé😀".encode())
    assert pieces == ["a", "", "é", "", "", "", "😀"]
    assert rest == ""


def test_bytes_that_never_become_valid_are_not_held() -> None:
    stream = TextStream(BYTES)
    released = "".join(stream.push(0x80) for _ in range(1000))
    assert len(released) >= 997


@pytest.mark.parametrize(
    ("stop", "text", "released"),
    [
        (b"END", b"xEN", ["x", "", ""]),
        (b"END", b"xENx", ["x", "", "", "ENx"]),
        (b"aab", b"aaac", ["", "", "a", "aac"]),
        (b"aa", b"bab", ["b", "", "ab"]),
    ],
)
def test_a_stop_strings_beginning_is_held_back(
    stop: bytes, text: bytes, released: list[str]
) -> None:
    assert spell(text, stop=[stop])[0] == released


def test_the_longest_beginning_counts() -> None:
    assert spell(b"xab", stop=[b"bcd", b"abz"])[0] == ["x", "", ""]


def test_a_cut_takes_the_stop_string_and_all_after_it() -> None:
    stream = TextStream((b"one ", b"two END of it"), stop=[b"END"])
    assert stream.push(0) == "one "
    assert stream.finish(text_bytes=8, token_id=1) == "two "


def test_a_stop_string_that_did_not_end_the_choice_is_text() -> None:
    """Before min_tokens the core lets a stop string pass, and cuts at the second."""
    stream = TextStream((b"END.", b"yes", b"END"), stop=[b"END"])
    text = stream.push(0) + stream.push(1) + stream.finish(text_bytes=7, token_id=2)
    assert text == "END.yes"


@given(st.text("ab", max_size=40), st.text("ab", min_size=1, max_size=5))
def test_held_text_always_covers_a_stop_string_in_the_making(text: str, stop: str) -> None:
    """Wherever the stop string first ends, no part of it was released before."""
    end = text.find(stop)
    stream = TextStream(BYTES, stop=[stop.encode()])
    released = ""
    for i, byte in enumerate(text.encode()):
        if end >= 0 and i == end + len(stop) - 1:
            released += stream.finish(text_bytes=end, token_id=byte)
            assert released == text[:end]
            return
        released += stream.push(byte)
        assert end < 0 or len(released) <= end
    assert released + stream.finish() == text


def test_special_tokens_are_shown_on_request_where_they_came() -> None:
    stream = TextStream(BYTES, special={SPECIAL: b"<x>"})
    text = "".join(stream.push(t) for t in (*b"a", SPECIAL, *b"b", SPECIAL)) + stream.finish()
    assert text == "a<x>b<x>"


def test_special_tokens_have_no_bytes_in_the_core() -> None:
    stream = TextStream(BYTES, stop=[b"END"], special={SPECIAL: b"<x>"})
    text = "".join(stream.push(t) for t in (*b"a", SPECIAL, *b"bEN"))
    text += stream.finish(text_bytes=2, token_id=ord("D"))
    assert text == "a<x>b"


def test_ids_beyond_the_table_have_no_text() -> None:
    assert TextStream(BYTES).push(100_000) == ""


def test_adversarial_stop_strings_cost_no_more_than_others() -> None:
    """16 long stop strings that nearly match everywhere: one pass over the bytes, not a search."""
    stops = [b"a" * 1023 + bytes([b]) for b in range(16)]
    stream = TextStream((b"a" * 16,), stop=stops)
    released = "".join(stream.push(0) for _ in range(200))
    assert len(released) == 200 * 16 - 1023
