"""TextStream against the core: wherever `apply` may end a text, released text is not taken back."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from streamer.core.stopping.strings import can_end, find_stop, last_bytes
from streamer.tokenizer.text import TextStream

# Letters that overlap in stop strings, and the bytes of "é" and "😀", whole and in parts.
PIECES = st.lists(
    st.lists(st.sampled_from([b"a", b"b", b"ab", b"\xc3", b"\xa9", b"\xf0\x9f", b"\x98\x80"]))
    .map(b"".join)
    .filter(lambda piece: len(piece) < 7),
    max_size=16,
)
STOPS = st.lists(st.text("abé😀", min_size=1, max_size=4), max_size=3)


@given(PIECES, STOPS, st.integers(0, 6), st.booleans())
@example([b"aab", b"b"], ["abb", "b"], 0, False)
@example([b"a\xc3", b"b"], ["b"], 0, False)
@example([b"ab", b"ab", b"ab"], ["ab"], 2, True)
def test_text_is_the_cut_bytes(
    pieces: list[bytes], stops: list[str], min_tokens: int, ends_by_id: bool
) -> None:
    """The core's rule for stop strings: from `min_tokens` on, the earliest that has just ended."""
    written = tuple(s.encode() for s in stops)
    stream = TextStream(pieces, written)
    text, tail, whole = "", b"", b""
    for token, piece in enumerate(pieces):
        if ends_by_id and token == len(pieces) - 1:  # a stop token is not in the text
            text += stream.finish(len(whole))
            assert text == whole.decode("utf-8", "replace")
            return
        may_end = token >= min_tokens and can_end(piece, written)
        found = find_stop(tail, piece, written) if may_end else None
        if found is not None:
            cut = len(whole) - len(tail) + found[0]
            text += stream.finish(cut, token)
            assert text == (whole + piece)[:cut].decode("utf-8", "replace")
            return
        whole += piece
        tail = last_bytes([piece, tail], max(map(len, written)) - 1) if written else b""
        text += stream.push(token)
        assert whole.decode("utf-8", "replace").startswith(text)
    assert text + stream.finish() == whole.decode("utf-8", "replace")
