"""Requests to a server with OpenAI's API: checks of a step's inputs, and the body of a chat completion."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from weftline.engine.llm.external.options import ExternalLlmConfig
from weftline.engine.llm.external.servers import SERVERS, Server
from weftline.engine.llm.params import SamplingParams, sampling_error
from weftline.engine.llm.ports import cache_owner, read_name
from weftline.engine.llm.tokens import check_messages, mapped
from weftline.engine.llm.tool_choice import ToolRequest
from weftline.errors import InputError

BODY_BYTES_MAX = 64 << 20
"""Longest body; a conversation of that size exceeds the context of any model."""
ANSWER_BYTES_MIN, TOKEN_BYTES_MAX, ANSWER_BYTES_MAX = 1 << 20, 8 << 10, 256 << 20
"""Longest response: some bytes for each token that was requested. A chunk has about 300 bytes around its text, and 20
log-probabilities take 3 000."""
SEEDS = 1 << 31
"""Seeds derived from a request's are below this: some servers keep seeds in 32 bits or in a float."""
SCHEMA_NAME = "answer"
_REGEX: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "vllm": lambda regex: {"structured_outputs": {"regex": regex}},
    "sglang": lambda regex: {"regex": regex},
    "tensorrt-llm": lambda regex: {"response_format": {"type": "regex", "regex": regex}},
}
"""The field of a regular expression, by the kind of server."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked request: its body as JSON, and what its answer must have.

    answers:  number of answers.
    logprobs: log-probabilities were requested.
    bytes_max: longest response.
    """

    body: bytes
    answers: int
    logprobs: bool
    bytes_max: int


def chat_request(
    config: ExternalLlmConfig,
    inputs: Mapping[str, Any],
    secret: bytes,
    caller: str = "",
    seed: int | None = None,
    program: int = 0,
) -> ChatRequest:
    """Return the request of a step's inputs; InputError for invalid ones.

    secret: key of the salts for the server's prefix cache.   caller: identity of the client; '' without one.
    seed:   seed of the request, unless its sampling options have one.   program: as in Urgency.
    """
    server = SERVERS[config.server]
    params = _params(config, inputs.get("sampling"), seed)
    body: dict[str, Any] = {
        "model": config.model,
        "messages": _messages(config, inputs),
        "stream": True,
        "stream_options": {"include_usage": True},
        **server.fields_of(params),
        **_other_forms(params, config.server),
        **_tools(inputs, server),
    }
    salt = _salt(secret, cache_owner(program, caller, read_name(inputs, "tenant")))
    if salt and server.salted:
        body["cache_salt"] = salt
    bytes_max = min(ANSWER_BYTES_MIN + params.n * params.tokens_max * TOKEN_BYTES_MAX, ANSWER_BYTES_MAX)
    return ChatRequest(_encoded(body), params.n, params.logprobs is not None, bytes_max)


def _params(config: ExternalLlmConfig, changes: object, seed: int | None) -> SamplingParams:
    params = config.sampling if changes is None else SamplingParams.read(changes, config.sampling)
    unread = SERVERS[config.server].unsupported(params)
    if unread:
        raise sampling_error(unread[0], "the engine of this step has no such option; leave it out")
    if seed is None or params.seed is not None:
        return params
    return dataclasses.replace(params, seed=seed % SEEDS)


def _messages(config: ExternalLlmConfig, inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    prompt, messages = inputs.get("prompt"), inputs.get("messages")
    if (prompt is None) == (messages is None):
        found = "neither" if prompt is None else "both"
        raise InputError(f"llm: found {found} of prompt and messages, expected exactly one")
    if messages is not None:
        checked: list[dict[str, Any]] = mapped(check_messages(messages), str)
        return [_with_encoded_calls(message) for message in checked]
    if not isinstance(prompt, str) or not prompt:
        raise InputError("prompt: found an empty text, expected at least one character")
    system = [{"role": "system", "content": config.system}] if config.system else []
    return [*system, {"role": "user", "content": prompt}]


def _with_encoded_calls(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose tool calls have their arguments as JSON text, as OpenAI's API has them."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_encoded_arguments(call) for call in calls]}


def _with_encoded_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _other_forms(params: SamplingParams, kind: str) -> dict[str, Any]:
    """Return the fields whose form differs from that of the key of `sampling`."""
    found: dict[str, Any] = {}
    if params.seed is not None:
        found["seed"] = params.seed
    if params.stop:
        found["stop"] = list(params.stop)
    if params.logprobs is not None:
        found |= {"logprobs": True, "top_logprobs": params.logprobs}
    if params.json_schema is not None:
        schema = {"name": SCHEMA_NAME, "schema": params.json_schema, "strict": True}
        found["response_format"] = {"type": "json_schema", "json_schema": schema}
    if params.json_object:
        found["response_format"] = {"type": "json_object"}
    if params.regex is not None:
        found |= _REGEX[kind](params.regex)
    if params.choice:
        found["structured_outputs"] = {"choice": list(params.choice)}
    return found


def _tools(inputs: Mapping[str, Any], server: Server) -> dict[str, Any]:
    read = ToolRequest.read(inputs)
    if read.forced and not server.forces_tools:
        raise InputError("tool_choice: the engine of this step cannot be made to call a tool; use auto or none")
    if not read.offered:
        return {}
    found: dict[str, Any] = {"tools": mapped(list(read.offered), str, "tools")}
    if read.kind == "required":
        found["tool_choice"] = "required"
    elif read.forced:
        found["tool_choice"] = {"type": "function", "function": {"name": str(read.name)}}
    if not read.parallel:
        if not server.limits_calls:
            raise InputError("parallel_tool_calls: the engine of this step cannot be limited to one call; leave it out")
        found["parallel_tool_calls"] = False
    return found


def _salt(secret: bytes, owner: str) -> str:
    """Return a text that other clients of the server cannot guess, for an owner of cached prompts; '' for none."""
    return hmac.new(secret, owner.encode(), hashlib.sha256).hexdigest() if owner else ""


def _encoded(body: Mapping[str, Any]) -> bytes:
    try:
        encoded = msgspec.json.encode(body)
    except (UnicodeEncodeError, TypeError, ValueError, OverflowError, RecursionError):
        found = "found a lone surrogate, or a value that JSON cannot have"
        raise InputError(f"messages, tools or sampling: {found}") from None
    if len(encoded) > BODY_BYTES_MAX:
        raise InputError(f"messages: {len(encoded)} bytes, expected at most {BODY_BYTES_MAX}")
    return encoded
