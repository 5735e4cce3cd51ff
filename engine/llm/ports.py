"""Ports of llm steps: those of requests that generate, whatever engine answers them, and those of the other tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weftline.engine.llm.options import LlmConfig
from weftline.errors import InputError
from weftline.nodes.embed import embedding_width
from weftline.nodes.ports import Port, Ports, port

NAME_CHARS_MAX = 256
"""Most characters of a tenant or adapter name."""

TENANT = port("tenant", "text", optional=True, about="separates cached prompts of a caller's tenants")


def read_name(inputs: Mapping[str, Any], port_name: str) -> str:
    """Return the tenant or adapter in an input, '' for none; InputError if it is not a name."""
    name = inputs.get(port_name) or ""
    if not isinstance(name, str) or len(name) > NAME_CHARS_MAX:
        raise InputError(f"{port_name}: expected a text of at most {NAME_CHARS_MAX} characters")
    return name


def cache_owner(program: int, caller: str, tenant: str) -> str:
    """Return a text of its own for each program, caller and tenant, which share no cached prompt; '' for none."""
    own = f"{program}|" if program else ""
    return f"{own}{len(caller)}:{caller}:{tenant}" if own or caller or tenant else ""


def request_inputs(*images: Port) -> tuple[Port, ...]:
    """Return the inputs of a request that every engine has. images: the input for pictures, where the model sees."""
    return (
        port("prompt", "text", optional=True, about="user message; either this or messages"),
        port("messages", "json", optional=True, about="a conversation: [{role, content}, ...]"),
        *images,
        port("tools", "json", optional=True, about="tool definitions, as OpenAI's"),
        port("tool_choice", "json", optional=True, about="auto, none, required, or one function, as OpenAI's"),
        port("parallel_tool_calls", "json", optional=True, about="false: at most one call"),
        port("sampling", "json", optional=True, about="changes to the step's sampling options, by key"),
    )


def answer_outputs(reasoning: str = "the text between <think> and </think>") -> tuple[Port, ...]:
    """Return the outputs of an answer. reasoning: description of that output."""
    return (
        port("text", "text", pieces=True, about="the answer, without reasoning and tool calls"),
        port("reasoning", "text", pieces=True, about=reasoning),
        port("tool_calls", "json", about="the calls of tools: [{id, type, function: {name, arguments}}, ...]"),
        port("usage", "json", about="prompt, completion and cached tokens, finish_reason and stop_string"),
        port("logprobs", "json", pieces=True, about="tokens of the answer with log-probabilities, if requested"),
        port("answers", "json", about="all answers: [{index, text, finish_reason, stop_string, logprobs}, ...]"),
    )


def head_ports(config: LlmConfig, found: dict[str, Any] | None) -> Ports:
    """Return the ports of a step with task embed or classify."""
    text = port("text", "text", about="the text to embed or classify")
    usage = port("usage", "json", about="prompt and cached tokens")
    if config.task == "classify":
        scores = port("scores", "json", about="the model's score for each of its labels", labels=_labels(found))
        return Ports((text, TENANT), (scores, usage))
    width = embedding_width(found, config.model)
    return Ports(
        (text, TENANT), (port("embedding", f"float32[{width}]", about="the text's vector, of length 1"), usage)
    )


def _labels(found: dict[str, Any] | None) -> tuple[str, ...]:
    """Return the labels in a config.json, () where they are not known."""
    by_id = (found or {}).get("id2label")
    return tuple(str(label) for label in by_id.values()) if isinstance(by_id, dict) else ()
