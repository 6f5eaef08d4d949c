"""Recent outputs: kept by owner, found by that owner alone, the oldest dropped first."""

from __future__ import annotations

from streamer.core.speculation.recent import Recent

ME, OTHER = (b"salt", "me"), (b"salt", "other")


def kept(recent: Recent, owner: tuple[bytes, str]) -> list[int]:
    return [token for text in recent.texts(owner) for token in text.tokens if token >= 0]


def test_an_output_is_found_by_its_owner_alone() -> None:
    recent = Recent(100)
    recent.add(ME, [1, 2, 3], is_last=True)
    assert kept(recent, ME) == [1, 2, 3]
    for owner in (OTHER, (b"pepper", "me"), (b"", "")):
        assert recent.texts(owner) == ()


def test_the_parts_of_an_output_are_one_document_and_the_next_is_another() -> None:
    recent = Recent(100)
    recent.add(ME, [1, 2], is_last=False)
    recent.add(ME, [3, 4], is_last=True)
    recent.add(ME, [5], is_last=True)
    (text,) = recent.texts(ME)
    assert hash((2, 3, 4)) in text.last
    assert hash((3, 4, 5)) not in text.last


def test_the_oldest_half_goes_when_the_bound_is_reached_and_the_bound_holds() -> None:
    recent = Recent(20)
    for i in range(50):
        recent.add(ME if i % 2 else OTHER, [i] * 4, is_last=True)
        assert len(recent) <= 20
    assert set(kept(recent, ME)) | set(kept(recent, OTHER)) >= {48, 49}
    assert 40 not in kept(recent, OTHER)


def test_every_change_of_an_owners_texts_is_a_new_generation() -> None:
    recent, seen = Recent(8), set()
    for i in range(6):
        recent.add(ME, [i] * 2, is_last=True)
        seen.add((recent.generation, tuple(map(id, recent.texts(ME)))))
    assert len({generation for generation, _ in seen}) == len(seen) > 1
