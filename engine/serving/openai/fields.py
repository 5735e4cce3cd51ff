"""Fields of requests that this server refuses, or that have no effect on an answer.

Together with the fields of the bodies (`bodies.py`), which are mapped, this is every field of the request models of
OpenAI, Anthropic, vLLM and SGLang: a test compares them. A field in neither is unknown, and refused with the nearest
known one. `openai-fields.md` and `anthropic-fields.md` of the reference are written from both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Refusals = Mapping[str, tuple[Any, ...]]
"""Refused fields, with the values that would change nothing; those and null are accepted."""

_OFF = (False,)

OF_REFUSAL = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "chat_template": "a request cannot bring a program; the template is the model's",
    "custom_logit_processor": "a request cannot bring a program",
    "lora_path": "use the name of a pipeline whose step has the adapter",
    "include_stop_str_in_output": "the stop string is never part of the answer",
    "no_stop_trim": "the stop string is never part of the answer",
    "truncate_prompt_tokens": "a prompt is never cut; shorten it",
    "dimensions": "the step sets the length of the vectors",
    "best_of": "use n",
    "prompt_logprobs": "use echo and logprobs of /v1/completions",
    "echo": "use /v1/completions",
    "container": "no tools run on this server",
    "mcp_servers": "this server calls no other server; a client can, and send what it gets as tools and results",
    "context_management": "no messages are removed; shorten them",
    "compaction": "no messages are summarised; shorten them",
    "thread": "no conversation is stored; send all messages",
    "inference_geo": "the server runs where its operator installed it",
    "truncation": "a conversation is never cut; shorten it",
    "background": "send the request without it and wait for the response, or stream it",
    "background_options": "there are no background responses",
    "conversation": "use previous_response_id",
    "prompt": "a prompt template kept by the provider; send instructions and input",
    "previous_response": "use previous_response_id, or send the items as input",
    "previous_input_messages": "use previous_response_id, or send the items as input",
    "response_format": "use text.format",
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "reasoning_effort": "use reasoning.effort",
    "messages": "use input",
    "logprobs": 'use include: ["message.output_text.logprobs"]',
    "n": "a response has one answer; use a chat",
}
"""Reasons of refusals, or their replacement; others are not supported."""

_ENGINE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("use_beam_search", "watermarking", "include_stop_str_in_output", "no_stop_trim"), _OFF),
    **dict.fromkeys(("return_hidden_states", "return_routed_experts", "return_cached_tokens_details"), _OFF),
    **dict.fromkeys(("return_token_ids", "return_prompt_token_ids", "return_tokens_as_token_ids"), _OFF),
    **dict.fromkeys(("return_meta_info", "return_token_offsets", "return_prompt_text"), _OFF),
    **dict.fromkeys(("custom_params", "images_config", "session_params", "vllm_xargs"), ({},)),
    **dict.fromkeys(("media_io_kwargs", "mm_processor_kwargs"), ({},)),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params"), ({},)),
    **dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room"), ()),
    **dict.fromkeys(("custom_logit_processor", "lora_path", "logprob_token_ids", "extra_key"), ()),
    "length_penalty": (1,),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ([], ""),
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": (),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
}
"""Fields of vLLM and SGLang for answers of both generating routes."""

CHAT_REFUSED: Refusals = _ENGINE | {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "moderation": (),
    "chat_template": (),
    "add_special_tokens": _OFF,
    "echo": _OFF,
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "input_ids": (),
    "task": (),
    "max_dynamic_patch": (),
    "min_dynamic_patch": (),
    "use_audio_in_video": _OFF,
    "suffix": ("",),
    "best_of": (1,),
}

RESPONSES_REFUSED: Refusals = _ENGINE | {
    "background": _OFF,
    "background_options": ({},),
    "conversation": (),
    "prompt": (),
    "moderation": (),
    "access_programs": ({},),
    "context_management": ([],),
    "image": ({},),
    "truncation": ("disabled",),
    "enable_response_messages": _OFF,
    "previous_input_messages": ([],),
    "previous_response": (),
    **dict.fromkeys(("response_format", "max_tokens", "max_completion_tokens", "reasoning_effort", "messages"), ()),
    "logprobs": _OFF,
    "n": (1,),
}
"""Fields of /v1/responses; those of chat requests that have another name here are named with their replacement."""

COMPLETION_REFUSED: Refusals = _ENGINE | {"suffix": ("",), "best_of": (1,), "prompt_embeds": ()}

_POOLING: dict[str, tuple[Any, ...]] = {
    "use_activation": (),
    "mm_processor_kwargs": ({},),
    "padding": ("do_not_pad",),
    "cache_salt": (),
    "lora_path": (),
}

EMBEDDING_REFUSED: Refusals = _POOLING | {
    "add_special_tokens": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "normalize": (),
    "messages": (),
    "add_generation_prompt": _OFF,
    "continue_final_message": _OFF,
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "media_io_kwargs": ({},),
    "embed_override_token_id": (),
    "embed_overrides": (),
}

RERANK_REFUSED: Refusals = _POOLING | dict.fromkeys(
    (
        *("max_chunks_per_doc", "max_tokens_per_doc", "rank_fields"),
        *("activation", "softmax", "instruction", "instruct"),
    ),
    (),
)
"""Fields that would change the scores."""

_KEEP_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}
MESSAGES_REFUSED: Refusals = {
    "container": (),
    "mcp_servers": ([],),
    "context_management": ({}, {"edits": []}, {"edits": [_KEEP_THINKING]}),
    "compaction": (),
    "thread": (),
    "fallbacks": ([], "default"),
    "inference_geo": ("global",),
    "kv_transfer_params": ({},),
}
"""Fields of Anthropic's client, with its beta ones, and of vLLM, for /v1/messages."""

TRANSCRIPTION_REFUSED: Refusals = {
    **dict.fromkeys(("include", "keywords", "languages"), ([],)),
    **dict.fromkeys(("known_speaker_names", "known_speaker_references"), ([],)),
    "chunking_strategy": ("auto", ["auto"]),
}

_IDENTITY = {
    "user": "a name for the provider's own use",
    "metadata": "kept with a stored answer; nothing is stored",
    "request_id": "send the header x-request-id",
    "rid": "send the header x-request-id",
}

GENERATION_WITHOUT_EFFECT = _IDENTITY | {
    "store": "nothing is stored",
    "service_tier": "there is one tier; use priority",
    "prompt_cache_key": "every prompt is cached",
    "prompt_cache_options": "every prompt is cached",
    "prompt_cache_retention": "every prompt is cached",
    "safety_identifier": "a name for the provider's own use",
    "prediction": "a hint for speed",
    "session_id": "a hint for routing among servers",
    "stream_interval": "a hint for the size of chunks",
    "truncation_side": "only with truncate_prompt_tokens, which is refused",
    "routed_experts_prompt_start": "only with return_routed_experts, which is refused",
    "routed_experts_start_len": "only with return_routed_experts, which is refused",
    "return_mm_kwargs": "of vLLM's render routes",
    "guided_decoding_backend": "there is one engine for constraints",
    "ngram_corpus_id": "a hint for speed",
    "routed_dp_rank": "a hint for routing among servers",
    "disagg_prefill_dp_rank": "a hint for routing among servers",
    "data_parallel_rank": "a hint for routing among servers",
    "custom_labels": "labels of SGLang's metrics",
}

MESSAGES_WITHOUT_EFFECT = {
    "metadata": _IDENTITY["user"],
    "service_tier": GENERATION_WITHOUT_EFFECT["service_tier"],
    "speed": "a hint for speed",
    "cache_control": "every prompt is cached",
    "diagnostics": "no prompt is compared with an earlier one",
    "user_profile_id": _IDENTITY["user"],
    "workspace_id": _IDENTITY["user"],
    "billing_policy": "nothing is billed",
    "fallback_credit_token": "nothing is billed",
    "betas": "the header anthropic-beta, which has no effect",
}
_KEPT = ("store", "metadata")
RESPONSES_WITHOUT_EFFECT = {name: why for name, why in GENERATION_WITHOUT_EFFECT.items() if name not in _KEPT} | {
    "max_tool_calls": "limits calls of built-in tools, and there are none",
}

POOLING_WITHOUT_EFFECT = _IDENTITY
AUDIO_WITHOUT_EFFECT = {"user": _IDENTITY["user"]}


def why_refused(field: str) -> str:
    """Return the reason that a refusal states."""
    return OF_REFUSAL.get(field, "not supported by this server") + "; leave it out"
