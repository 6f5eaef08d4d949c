"""Chat templates: where they are found, what they may do, and which party an error is blamed on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from streamer.errors import ConfigError, InvalidRequest
from streamer.fake.tokenizer import END, fake_tokenizer
from streamer.tokenizer import chat as tokenizer_chat
from streamer.tokenizer.chat import ChatTemplate
from streamer.tokenizer.tokenizer import EarlierTurn, Tokenizer

HI = [{"role": "user", "content": "hi"}]


def backend() -> tokenizers.Tokenizer:
    """Bytes, a begin and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    return made


def chat(template: Any, messages: Any = HI, **kwargs: Any) -> str:
    settings = {"chat_template": template, "bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(backend(), settings).render_chat(messages, **kwargs)


def folder(path: Path, **settings: Any) -> Path:
    backend().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return path


def test_roles_tokens_and_generation_prompt() -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}{{ pad_token }}"
    )
    assert chat(template) == "<s>[user]hi</s>[assistant]"
    assert chat(template, add_generation_prompt=False) == "<s>[user]hi</s>"


def test_a_template_uses_what_a_request_gives_it() -> None:
    template = "{% if enable_thinking %}[think]{% endif %}{{ note }}{{ messages[0].content }}"
    settings = {"chat_template": template, "bos_token": "<s>"}
    t = Tokenizer(backend(), settings)
    ids = t.encode_chat(HI, variables={"enable_thinking": True, "note": "</s>"})
    assert t.decode(ids) == "[think]</s>hi"  # as text, like a special token in a message
    assert t.decode(t.encode_chat(HI)) == "hi"
    for taken in ("messages", "bos_token"):
        with pytest.raises(InvalidRequest) as caught:
            t.encode_chat(HI, variables={taken: "x"})
        assert caught.value.param == f"chat_template_kwargs.{taken}"


def test_a_rendered_chat_begins_once() -> None:
    settings = {"chat_template": "{{ bos_token }}x", "bos_token": "<s>"}
    t = Tokenizer(backend(), settings)
    ids = t.encode(t.render_chat(HI), add_special_tokens=False)
    assert ids.count(t.bos_token_id or -1) == 1


def test_blocks_leave_no_blank_lines() -> None:
    template = "{% for m in messages %}\n    {{ m.content }}\n    {% endfor %}\nend"
    assert chat(template) == "    hi\nend"


def test_loop_controls_and_generation_blocks() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    )
    messages = [{"role": "system", "content": "s"}, *HI, {"role": "user", "content": "2"}]
    assert chat(template, messages) == "hi"


def test_tojson_is_plain_json() -> None:
    tools = [{"name": "größe", "description": "<a & 'b'>"}]
    assert json.loads(chat("{{ tools | tojson }}", tools=tools)) == tools
    assert "größe" in chat("{{ tools | tojson }}", tools=tools)
    assert "<a & 'b'>" in chat("{{ tools | tojson(indent=2) }}", tools=tools)
    assert chat("{{ tools is none }}", tools=[]) == "True"


def test_strftime_now() -> None:
    assert len(chat("{{ strftime_now('%Y-%m-%d') }}")) == 10


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert chat("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "ab"


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([{"type": "image_url", "image_url": {}}], "messages[0].content[0]"),
        ([{"type": "text", "text": "a"}, 5], "messages[0].content[1]"),
        ([{"type": "text"}], "messages[0].content[0].text"),
        (7, "messages[0].content"),
    ],
)
def test_other_content_is_refused_by_name(content: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat("{{ messages }}", [{"role": "user", "content": content}])
    assert caught.value.param == param


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content.strip() }}",
        "{{ 1 / 0 }}",
        "{{ messages[0] + 1 }}",
        "{{ messages | map('nothing') | list }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_is_the_callers_mistake(template: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(template)
    assert caught.value.param == "messages"


def test_the_templates_own_message_reaches_the_caller() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        chat("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ cycler.__init__.__globals__.os }}",
    ],
)
def test_templates_are_in_a_sandbox(template: str) -> None:
    try:
        rendered = chat(template)
    except InvalidRequest:
        return
    assert rendered == ""  # Jinja's undefined


def test_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    chat("{{ messages[0].content }}", messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    t = Tokenizer.from_folder(folder(tmp_path))
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        t.render_chat(HI)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "says"), [("ok\n{% for %}", "line 2"), ("{% break %}", "loop")]
)
def test_a_template_that_is_no_jinja_stops_the_start(
    tmp_path: Path, template: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        Tokenizer.from_folder(folder(tmp_path, chat_template=template))
    assert caught.value.param == "chat_template"


def test_where_templates_are_found(tmp_path: Path) -> None:
    """The operator's first, then the folder's own file, then the settings."""
    path = folder(tmp_path, chat_template="settings")
    assert Tokenizer.from_folder(path).render_chat(HI) == "settings"
    (path / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_folder(path).render_chat(HI) == "file"
    given = tmp_path / "given.jinja"
    given.write_text("given")
    assert Tokenizer.from_folder(path, str(given)).render_chat(HI) == "given"
    with pytest.raises(ConfigError, match="absent") as caught:
        Tokenizer.from_folder(path, str(tmp_path / "absent"))
    assert caught.value.param == "chat_template"


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    t = Tokenizer.from_folder(folder(tmp_path, chat_template=named))
    assert t.render_chat(HI) == "plain"
    assert t.render_chat(HI, tools=[{"name": "f"}]) == "tools"
    t = Tokenizer.from_folder(folder(tmp_path, chat_template=named[:1]))
    assert t.render_chat(HI, tools=[{"name": "f"}]) == "plain"


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system comes first') }}{% endif %}"
    "{% if not loop.first and m.role == loop.previtem.role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<' ~ m.role ~ '>' ~ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("roles", "text"),
    [
        ("system system user user assistant", "<system>0\n\n1<user>2\n\n3<assistant>4"),
        ("system user system", "<system>0<user>1\n\n2"),
        ("user assistant system user", "<user>0<assistant>1<user>2\n\n3"),
    ],
)
def test_agents_messages_suit_a_strict_template(roles: str, text: str) -> None:
    """Codex and Claude Code send several messages of the system, and of the user."""
    messages = [{"role": r, "content": str(i)} for i, r in enumerate(roles.split())]
    assert chat(STRICT, messages) == text
    lax = "{% for m in messages %}{{ m.role ~ m.content }}{% endfor %}"
    assert chat(lax, messages) == "".join(m["role"] + m["content"] for m in messages)
    with pytest.raises(InvalidRequest, match="alternate"):
        chat(STRICT, [{"role": "assistant", "content": "x"}] * 2)


# ---------------------------------------------------------------- next turns


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if i % 2 else "user", "content": t} for i, t in enumerate(texts)]


def test_a_next_turn_keeps_the_earlier_ids_and_adds_the_rest() -> None:
    t = fake_tokenizer()
    ids = [*t.encode_chat(turns("hi <|end|>")), 300, 301]  # not what " 39 40" encodes to
    earlier_turn = EarlierTurn(turns("hi <|end|>"), True, " 39 40", ids)
    for last in ("on", "<|end|>", "hi <|end|>"):
        after = t.encode_chat(turns("hi <|end|>", " 39 40", last), earlier_turn=earlier_turn)
        assert after[: len(ids)] == ids
        whole = t.encode_chat(turns("hi <|end|>", " 39 40", last))
        assert after[len(ids) :] == whole[whole.index(END, len(ids)) :]


def test_a_turn_that_is_not_extended_is_encoded_again() -> None:
    t = fake_tokenizer()
    for messages, answer in ((turns("other"), " 1"), (turns("hi"), " 2")):
        earlier_turn = EarlierTurn(messages, True, answer, [1, 2, 3])
        conversation = turns("hi", " 1", "on")
        assert t.encode_chat(conversation, earlier_turn=earlier_turn) == t.encode_chat(conversation)


def test_plain_text_has_no_special_tokens() -> None:
    t = fake_tokenizer()
    assert t.encode_plain("a<|end|>b") == [*b"a<|end|>b"]
    assert t.encode("a<|end|>b", False).count(END) == 1


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * ['a'] }}",
        "{% set x = 'a' * 10000000000 %}",
        "{{ 7 ** 1000000000 }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ 'a' | center(10000000000) }}",
        "{{ '%10000000000d' | format(1) }}",
        "{{ 'a' | indent(10000000000, true) }}",
        "{{ 'a'.ljust(10000000000) }}",
        "{{ '{:10000000000}'.format(1) }}",
        "{{ [1] | tojson(indent=10000000000) }}",
        "{% set n = namespace(x='aaaa') %}{% for i in range(40) %}{% set n.x = n.x + n.x %}"
        "{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'a' * 9999 }}{% endfor %}"
        "{% endfor %}",
    ],
)
def test_a_template_can_not_take_the_hosts_memory(source: str) -> None:
    """Neither when it is compiled, which folds constants, nor when it is rendered."""
    template = ChatTemplate(source, {})
    with pytest.raises(InvalidRequest, match=r"too l|more than"):
        template.render([], add_generation_prompt=True, tools=None)


def test_bounds_leave_templates_alone() -> None:
    """Large numbers that are no widths, and strings with stars."""
    source = (
        "{{ '**%s** %05d' % ('a', 7) }} {{ '{:>4} {}'.format(1, 1700000000) }} "
        "{{ '%d' | format(1700000000) }} {{ 'ab' * 3 + 'c' }} {{ 2 ** 10 * 1.5 }} "
        "{{ 'a' | center(3) }}"
    )
    text = ChatTemplate(source, {}).render([], add_generation_prompt=True, tools=None)
    assert text == "**a** 00007    1 1700000000 1700000000 abababc 1536.0  a "


def test_a_template_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_chat, "MAX_RENDER_S", 0.0)
    template = ChatTemplate("{% for i in range(9) %}{{ i }}{% endfor %}", {})
    with pytest.raises(InvalidRequest, match="more than 0 s"):
        template.render([], add_generation_prompt=True, tools=None)
    with pytest.raises(ConfigError, match="1048577 characters"):
        ChatTemplate(" " * ((1 << 20) + 1), {})
