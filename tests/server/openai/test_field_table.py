"""The table of every field, row by row: honoured fields have their effect, the rest is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from streamer.server.openai import chat, completions
from streamer.server.responses import body as responses
from tests.server.openai.field_table import FIELDS, Accepted, Honoured, Refused, official
from tests.server.support import calls
from tests.server.support.calls import KINDS, Asker
from tests.server.support.greedy import GREEDY, STORY
from tests.server.support.running import Running

TYPES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "chat": (chat.ChatRequest, chat.FIELDS),
    "completions": (completions.CompletionRequest, completions.FIELDS),
    "responses": (responses.ResponseCreate, responses.FIELDS),
}
ROWS = [(kind, name, row) for kind, table in FIELDS.items() for name, row in table.items()]


def rows(of: type) -> Any:
    """Parameters for the rows of one sort."""
    return [pytest.param(k, n, r, id=f"{k}-{n}") for k, n, r in ROWS if isinstance(r, of)]


@pytest.fixture
def asker(server: Running, monkeypatch: pytest.MonkeyPatch) -> Asker:
    return Asker(server, monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_has_every_field_and_says_what_the_server_does(kind: str) -> None:
    body, known = TYPES[kind]
    assert official(kind) - set(FIELDS[kind]) == set()
    honoured = {name for name, row in FIELDS[kind].items() if isinstance(row, Honoured)}
    assert honoured == set(body.__struct_encode_fields__)
    assert set(FIELDS[kind]) - honoured == set(known)


@pytest.mark.parametrize(("kind", "name", "row"), rows(Honoured))
def test_what_is_honoured_has_its_effect(asker: Asker, kind: str, name: str, row: Honoured) -> None:
    row.effect(asker, kind)
    assert asker.seen, "the effect asked for nothing"


@pytest.mark.parametrize(("kind", "name", "row"), rows(Refused))
def test_what_is_refused_is_named(asker: Asker, kind: str, name: str, row: Refused) -> None:
    with pytest.raises(calls.Refused) as caught:
        asker.ask(kind, **{name: row.value})
    assert (caught.value.status, caught.value.param) == (400, name)
    assert row.why
    assert not asker.seen


@pytest.mark.parametrize(("kind", "name", "row"), rows(Accepted))
def test_what_is_accepted_changes_nothing(
    asker: Asker, kind: str, name: str, row: Accepted
) -> None:
    with_it, without = asker.ask(kind, seed=1, **{name: row.value}), asker.ask(kind, seed=1)
    assert with_it.text == without.text
    alone = {"request_id": None, "context": None, "context_bytes": 0}
    requests = [msgspec.structs.replace(a.request, **alone) for a in (with_it, without)]
    assert requests[0] == requests[1]
    assert row.why


# ---------------------------------------------------------------- the bundled model


@pytest.fixture
def greedy(bundled: Running, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The text of an answer of the bundled model, greedy unless asked otherwise."""
    asker = Asker(bundled, monkeypatch)

    def ask(kind: str, **fields: Any) -> str:
        return asker.ask(kind, STORY, 40, **{**GREEDY, **fields}).text

    return ask


@pytest.mark.parametrize("kind", KINDS)
def test_bundled_sampling_fields_show_in_the_text(greedy: Any, kind: str) -> None:
    best = greedy(kind)
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert greedy(kind, temperature=1.5, seed=1, **narrow) == best
    drawn = [greedy(kind, temperature=1.5, seed=s) for s in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    for other in (
        {"repetition_penalty": 2.0},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"logit_bias": {"300": 100}},
    ):
        assert greedy(kind, **other) != best
    word = best.split()[3]
    assert greedy(kind, stop=[word]) == best[: best.index(word)]
    assert greedy(kind, stop=["nowhere in it"]) == best
