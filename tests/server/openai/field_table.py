"""Every field of the three create bodies: honoured, accepted or refused, in one table.

Fields are those of the installed openai package's types, of vLLM's and SGLang's bodies, and our
own; the tests compare, so that a new one in the package fails until it has a row here. To honour a
refused field, give its row an effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints

from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params, responses_client_event_param

from tests.server.openai import field_effects as effects
from tests.server.openai import grammar_effects
from tests.server.support.calls import Asker

Effect = Callable[[Asker, str], None]


class Honoured(NamedTuple):
    """`effect` shows the field's effect."""

    effect: Effect


class Accepted(NamedTuple):
    """Any value is accepted, none has an effect: `why` says why there is nothing to do."""

    value: Any
    why: str


class Refused(NamedTuple):
    """This value is a 400 that names the field; `why` gives the reason."""

    value: Any
    why: str


Row = Honoured | Accepted | Refused

TOOLS, GRAMMAR = "tools come later", "structured_outputs is there"
MEDIA, HOSTED = "text only", "a service of OpenAI's platform, not of an engine"
NEVER = "nothing from a request is run or rendered as a template"

LABELS: dict[str, Row] = {
    "user": Accepted("someone", "a label for the operator's records"),
    "safety_identifier": Accepted("someone", "a label likewise"),
    "prompt_cache_key": Accepted("key", "a hint where a cache is warm: there is one cache"),
}
SAID_AGAIN: dict[str, Row] = {
    name: Honoured(effects.says_again(name, value))
    for name, value in {
        "user": "someone",
        "safety_identifier": "someone",
        "prompt_cache_key": "key",
        "parallel_tool_calls": False,
        "max_tool_calls": 3,
    }.items()
}

SAMPLING: dict[str, Row] = {
    "temperature": Honoured(effects.temperature),
    "top_p": Honoured(effects.keeps_only_the_best(top_p=0.001)),
    "top_k": Honoured(effects.keeps_only_the_best(top_k=1)),
    "min_p": Honoured(effects.keeps_only_the_best(min_p=1.0)),
    "repetition_penalty": Honoured(effects.repetition_penalty),
    "presence_penalty": Honoured(effects.presence_penalty),
    "frequency_penalty": Honoured(effects.frequency_penalty),
    "logit_bias": Honoured(effects.logit_bias),
    "seed": Honoured(effects.seed),
    "stop": Honoured(effects.stop),
    "stop_token_ids": Honoured(effects.stop_token_ids),
    "min_tokens": Honoured(effects.min_tokens),
    "ignore_eos": Honoured(effects.ignore_eos),
    "skip_special_tokens": Honoured(effects.skip_special_tokens),
    "speculation": Honoured(effects.speculation),
    "return_token_ids": Honoured(effects.return_token_ids),
    "priority": Honoured(effects.priority),
    "cache_salt": Honoured(effects.cache_salt),
    "detach_s": Honoured(effects.detach_s),
    "use_beam_search": Honoured(effects.use_beam_search),
    "beam_width": Honoured(effects.beam_width),
    "length_penalty": Honoured(effects.length_penalty),
    "early_stopping": Honoured(effects.early_stopping),
    "include_stop_str_in_output": Refused(True, "the text ends before a stop string"),
    "spaces_between_special_tokens": Refused(False, "special tokens are written as they are"),
    "truncate_prompt_tokens": Refused(5, "a response's prompt is what the next one continues"),
    "prompt_logprobs": Refused(1, "chats and completions have it"),
    "allowed_token_ids": Refused([5], GRAMMAR),
    "bad_words": Refused(["x"], GRAMMAR),
    "logits_processors": Refused(["x"], NEVER),
    "structured_outputs": Honoured(grammar_effects.structured_outputs),
    "thinking_token_budget": Honoured(grammar_effects.thinking_token_budget),
    "guided_json": Refused({}, GRAMMAR),
    "guided_regex": Refused("a+", GRAMMAR),
    "guided_choice": Refused(["a"], GRAMMAR),
    "guided_grammar": Refused("root ::= 'a'", GRAMMAR),
    "guided_decoding_backend": Refused("xgrammar", GRAMMAR),
    "guided_whitespace_pattern": Refused(" ", GRAMMAR),
    "structural_tag": Refused("{}", GRAMMAR),
    "return_tokens_as_token_ids": Refused(True, "return_token_ids says which tokens they are"),
    "kv_transfer_params": Refused({"a": 1}, "one engine, one cache"),
    "vllm_xargs": Refused({"a": 1}, "vLLM's own plugins"),
    "repetition_detection": Refused({"a": 1}, "repetition_penalty is there"),
    "request_id": Refused(
        "mine", "ids are random and assigned by the server, so that they cannot be guessed"
    ),
    "max_repetition_pattern_size": Refused(4, "repetition_penalty is there"),
    "min_repetition_pattern_size": Refused(4, "repetition_penalty is there"),
    "repetition_min_count": Refused(4, "repetition_penalty is there"),
    "regex": Refused("a+", GRAMMAR),
    "ebnf": Refused("root ::= 'a'", GRAMMAR),
    "grammar": Refused("root ::= 'a'", GRAMMAR),
    "json_schema": Refused("{}", GRAMMAR),
    "stop_regex": Refused("a+", "stop strings are strings"),
    "no_stop_trim": Refused(True, "the text ends before a stop string"),
    "lora_path": Refused("x", "one model a process"),
    "session_id": Refused("x", "previous_response_id is there"),
    "session_params": Refused({"id": "x"}, "previous_response_id is there"),
    "custom_logit_processor": Refused("x", NEVER),
    "custom_params": Refused({"a": 1}, NEVER),
    "return_hidden_states": Refused(True, "they stay on the device"),
    "input_ids": Refused([5], "completions take token ids"),
    "rid": Refused(
        "mine", "ids are random and assigned by the server, so that they cannot be guessed"
    ),
}

PROMPT: dict[str, Row] = {
    "prediction": Honoured(effects.prediction),
    "prompt_logprobs": Honoured(effects.prompt_logprobs),
    "truncate_prompt_tokens": Honoured(effects.truncate_prompt_tokens),
    "return_tokens_as_token_ids": Honoured(effects.return_tokens_as_token_ids),
}

CHAT: dict[str, Row] = {
    **SAMPLING,
    **PROMPT,
    **LABELS,
    "messages": Honoured(effects.prompt),
    "model": Honoured(effects.model),
    "max_tokens": Honoured(effects.limit("max_tokens")),
    "max_completion_tokens": Honoured(effects.limit("max_completion_tokens")),
    "n": Honoured(effects.n),
    "logprobs": Honoured(effects.chat_logprobs),
    "top_logprobs": Honoured(effects.chat_top_logprobs),
    "stream": Honoured(effects.streams),
    "stream_options": Honoured(effects.stream_options),
    "metadata": Honoured(effects.metadata),
    "add_generation_prompt": Honoured(effects.add_generation_prompt),
    "parallel_tool_calls": Honoured(effects.parallel_tool_calls),
    "audio": Refused({"voice": "x", "format": "wav"}, MEDIA),
    "function_call": Refused({"name": "f"}, TOOLS),
    "functions": Refused([{"name": "f"}], TOOLS),
    "modalities": Refused(["audio"], MEDIA),
    "moderation": Refused({"a": 1}, HOSTED),
    "prompt_cache_options": Refused({"a": 1}, HOSTED),
    "prompt_cache_retention": Refused("24h", HOSTED),
    "reasoning_effort": Honoured(effects.reasoning_effort),
    "response_format": Honoured(grammar_effects.response_format),
    "service_tier": Refused("priority", HOSTED),
    "store": Refused(True, "streams of chats are found by id, whole answers are not stored"),
    "tool_choice": Honoured(effects.tool_choice),
    "tools": Honoured(effects.tools),
    "verbosity": Refused("high", "models that know it come later"),
    "web_search_options": Refused({"a": 1}, HOSTED),
    "best_of": Refused(2, "completions have it"),
    "echo": Refused(True, "of a conversation there is no text to repeat"),
    "continue_final_message": Honoured(effects.continue_final_message),
    "add_special_tokens": Refused(True, "the chat template writes them"),
    "documents": Refused([{"text": "x"}], TOOLS),
    "chat_template": Refused("x", NEVER),
    "chat_template_kwargs": Honoured(effects.chat_template_kwargs),
    "mm_processor_kwargs": Refused({"a": 1}, MEDIA),
    "media_io_kwargs": Refused({"a": 1}, MEDIA),
    "include_reasoning": Accepted(False, "there is no reasoning to leave out"),
}

COMPLETIONS: dict[str, Row] = {
    **SAMPLING,
    **PROMPT,
    **LABELS,
    "prompt": Honoured(effects.prompt),
    "model": Honoured(effects.model),
    "max_tokens": Honoured(effects.limit("max_tokens")),
    "n": Honoured(effects.n),
    "logprobs": Honoured(effects.completion_logprobs),
    "stream": Honoured(effects.streams),
    "stream_options": Honoured(effects.stream_options),
    "add_special_tokens": Honoured(effects.add_special_tokens),
    "echo": Honoured(effects.echo),
    "best_of": Honoured(effects.best_of),
    "suffix": Refused("x", "models that fill in come later"),
    "response_format": Honoured(grammar_effects.response_format),
    "prompt_embeds": Refused("AAAA", "prompts are text or token ids"),
}

RESPONSES: dict[str, Row] = {
    **SAMPLING,
    **SAID_AGAIN,
    "input": Honoured(effects.prompt),
    "model": Honoured(effects.model),
    "instructions": Honoured(effects.instructions),
    "max_output_tokens": Honoured(effects.limit("max_output_tokens")),
    "top_logprobs": Honoured(effects.response_logprobs),
    "include": Honoured(effects.include),
    "metadata": Honoured(effects.metadata),
    "stream_id": Honoured(effects.stream_id),
    "stream_options": Honoured(effects.obfuscation),
    "access_programs": Refused(["x"], HOSTED),
    "background": Honoured(effects.background),
    "background_options": Refused({"a": 1}, HOSTED),
    "context_management": Refused([{"type": "compaction"}], HOSTED),
    "conversation": Refused("conv_1", "previous_response_id is there"),
    "fork": Honoured(effects.fork),
    "generate": Honoured(effects.generate),
    "image": Refused({"a": 1}, MEDIA),
    "moderation": Refused({"a": 1}, HOSTED),
    "previous_response_id": Honoured(effects.previous_response_id),
    "prompt": Refused({"id": "pmpt_1"}, HOSTED),
    "prediction": Honoured(effects.prediction),
    "n": Refused(2, "a response is one answer"),
    "best_of": Refused(2, "completions have it"),
    "prompt_cache_options": Refused({"a": 1}, HOSTED),
    "prompt_cache_retention": Refused("24h", HOSTED),
    "reasoning": Honoured(effects.reasoning_effort),
    "service_tier": Refused("priority", HOSTED),
    "store": Honoured(effects.store),
    "stream": Honoured(effects.streams),
    "text": Honoured(grammar_effects.text_format),
    "tool_choice": Honoured(effects.tool_choice),
    "tools": Honoured(effects.tools),
    "truncation": Refused("auto", "a prompt too long is refused, not cut"),
}

FIELDS: dict[str, dict[str, Row]] = {
    "chat": CHAT,
    "completions": COMPLETIONS,
    "responses": RESPONSES,
}

# vLLM's fields beside OpenAI's, as its documentation lists them.
VLLM = {
    *("top_k", "min_p", "repetition_penalty", "stop_token_ids", "min_tokens", "ignore_eos"),
    *("skip_special_tokens", "use_beam_search", "length_penalty", "include_stop_str_in_output"),
    *("spaces_between_special_tokens", "truncate_prompt_tokens", "prompt_logprobs"),
    *("allowed_token_ids", "bad_words", "priority", "return_token_ids"),
    *("return_tokens_as_token_ids", "cache_salt", "kv_transfer_params", "vllm_xargs"),
    *("structured_outputs", "request_id", "add_special_tokens", "logits_processors"),
    *("max_repetition_pattern_size", "min_repetition_pattern_size", "repetition_min_count"),
}
# SGLang's that constrain or change the answer, and llama.cpp's `grammar`.
SGLANG = {
    *("regex", "ebnf", "json_schema", "stop_regex", "no_stop_trim", "lora_path", "session_id"),
    *("session_params", "custom_logit_processor", "custom_params", "return_hidden_states", "rid"),
    *("input_ids", "grammar"),
}
VLLM_CHAT = VLLM | {
    *("echo", "add_generation_prompt", "continue_final_message", "documents", "chat_template"),
    *("chat_template_kwargs", "mm_processor_kwargs", "include_reasoning"),
}


def official(kind: str) -> set[str]:
    """The fields of a body that the installed openai package, vLLM and SGLang have."""
    if kind == "chat":
        return {*get_type_hints(chat_params.CompletionCreateParamsStreaming), *VLLM_CHAT, *SGLANG}
    if kind == "completions":
        hints = get_type_hints(completion_create_params.CompletionCreateParamsStreaming)
        return {*hints, *VLLM, *SGLANG}
    http = get_type_hints(response_create_params.ResponseCreateParamsStreaming)
    socket = get_type_hints(responses_client_event_param.ResponseCreate)
    return {*http, *socket, *SGLANG} - {"type"}
