"""Which format a chat template has, and what the declarations promise the parser."""

from __future__ import annotations

import pytest

from streamer.errors import ConfigError
from streamer.server.parsing.formats import (
    HARMONY,
    REASONING_FORMATS,
    TOOL_FORMATS,
    Calls,
    ModelFormat,
    find_format,
)

# What is telling in the templates of well-known checkpoints.
TEMPLATES = {
    "{{ '<tool_call>' }} {{ '</tool_call>' }}": ("hermes", None),
    "<tool_call> </tool_call> <think> </think>": ("hermes", "qwen3"),
    "<tool_call><function=x><parameter=y></think>": ("qwen3_coder", "qwen3"),
    "<tool_call>{name}<arg_key>{k}</arg_key> </think>": ("glm45", "glm45"),
    "<|python_tag|> ipython": ("llama3_json", None),
    '{"name": function name, "parameters": dictionary of argument name}': ("llama3_json", None),
    "[INST] [TOOL_CALLS] [ARGS] [THINK]": ("mistral", "mistral"),
    "<｜tool▁calls▁begin｜> ```json </think>": ("deepseek_v3", "deepseek_r1"),
    "<｜tool▁calls▁begin｜> </think>": ("deepseek_v31", "deepseek_r1"),
    "<｜DSML｜function_calls>": ("deepseek_v32", None),
    "<|tool_calls_section_begin|>": ("kimi_k2", None),
    "<minimax:tool_call> </think>": ("minimax_m2", "minimax_m2"),
    "<|start|>assistant<|channel|>final<|message|>": ("openai", "openai_gptoss"),
    "{{ message.content }}": (None, None),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_says_its_format(template: str) -> None:
    tool, reasoning = TEMPLATES[template]
    found = find_format(template, None, None)
    assert found.calls == (TOOL_FORMATS[tool] if tool else None)
    think = REASONING_FORMATS[reasoning] if reasoning else None
    assert (found.channels if think is HARMONY else found.think) == think
    assert find_format(template, "none", "none") == ModelFormat()


def test_older_templates_of_mistral_write_calls_as_a_list() -> None:
    for template, is_list in (("[TOOL_CALLS] [", True), ("[TOOL_CALLS]f[ARGS]", False)):
        found = find_format(template, None, None).calls
        assert isinstance(found, Calls)
        assert (found.id_length, found.is_list) == (9, is_list)


def test_names_are_checked() -> None:
    named = find_format("", "glm45", "deepseek_r1")
    assert (named.calls, named.think) == (TOOL_FORMATS["glm45"], REASONING_FORMATS["qwen3"])
    for param, names in (("tool_call_parser", ("x", None)), ("reasoning_parser", (None, "x"))):
        with pytest.raises(ConfigError) as caught:
            find_format("", *names)
        assert caught.value.param == param


def test_no_marker_begins_another_that_may_come_at_the_same_place() -> None:
    for calls in TOOL_FORMATS.values():
        if not isinstance(calls, Calls):
            continue
        ends = (calls.close, *(calls.section or ()))
        parameters = calls.parameters
        beside = [(*calls.openings, "<think>"), calls.name_ends]
        if parameters is not None:
            beside += [(parameters.key[0], *ends), parameters.value[0]]
        for markers in beside:
            for one in markers:
                others = [m for m in markers if m != one]
                assert not any(other.startswith(one) for other in others), (one, markers)
