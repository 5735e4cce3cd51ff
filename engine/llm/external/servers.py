"""Kinds of servers with OpenAI's API, and the fields of a chat completion that each of them reads.

A server ignores unknown fields, and the answer would silently differ from the one requested. So a key of
`sampling` that changes the answer is sent where the server's documentation has a field for it, and is refused
elsewhere.

A server may take the default of a field from its model's files (`generation_config.json`, an Ollama Modelfile). Such a
server is sent the step's value of every field, defaults included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from weftline.engine.llm.params import SamplingParams

COMMON = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop", "json_schema", "json_object")
"""Keys of `sampling` that every kind of server reads, under OpenAI's names."""

_OPENAI = ("n", "logit_bias", "logprobs")
_FURTHER = (*_OPENAI, "top_k", "min_p", "repetition_penalty", "tokens_min", "stop_token_ids", "ignore_eos")
_FIELDS = {"tokens_min": "min_tokens"}
_OPENAI_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Values that OpenAI documents as defaults; some hosted models refuse these fields altogether."""
_NUMBERS = (*_OPENAI_DEFAULTS, "top_k", "min_p", "repetition_penalty", "typical_p")
"""Keys that are sent at the step's default too, because the server may have another one."""
_APART = ("tokens_max", "seed", "stop", "json_schema", "json_object", "regex", "choice", "logprobs")
"""Keys that `request.py` writes in another form."""


@dataclass(frozen=True, slots=True)
class Server:
    """One kind of server.

    keys:        keys of `sampling` that it reads, besides `COMMON`.
    length:      its field for the length limit of an answer.
    defaults:    fields that are left out at these values; all others are sent.
    top_k_off:   its value for `top_k: 0`.
    salted:      it reads `cache_salt`: requests with different salts share no cached prefix.
    forces_tools: it reads `tool_choice`.
    limits_calls: it enforces `parallel_tool_calls: false`.
    """

    keys: tuple[str, ...]
    length: str = "max_tokens"
    defaults: Mapping[str, Any] | None = None
    top_k_off: int = -1
    salted: bool = False
    forces_tools: bool = True
    limits_calls: bool = True

    def fields_of(self, params: SamplingParams) -> dict[str, Any]:
        """Return the fields that have the value of a key of `sampling` as it is."""
        found: dict[str, Any] = {self.length: params.tokens_max}
        off = SamplingParams()
        for key in (*COMMON, *self.keys):
            value = getattr(params, key)
            if key in _APART or (key not in _NUMBERS and value == getattr(off, key)):
                continue
            if self.defaults is not None and self.defaults.get(key) == value:
                continue
            found[_FIELDS.get(key, key)] = list(value) if isinstance(value, tuple) else value
        if found.get("top_k") == 0:
            found["top_k"] = self.top_k_off
        return found

    def unsupported(self, params: SamplingParams) -> list[str]:
        """Return the keys of `sampling` that would change the answer and that the server does not read."""
        off, known = SamplingParams(), {*COMMON, *self.keys, "tokens_max"}
        return [one.name for one in fields(params) if one.name not in known and _differs(params, off, one.name)]


def _differs(params: SamplingParams, off: SamplingParams, key: str) -> bool:
    return bool(getattr(params, key) != getattr(off, key))


SERVERS: Mapping[str, Server] = {
    "openai": Server(_OPENAI, length="max_completion_tokens", defaults=_OPENAI_DEFAULTS),
    "vllm": Server(
        (*_FURTHER, "allowed_token_ids", "bad_words", "skip_special_tokens", "regex", "choice"), salted=True
    ),
    "sglang": Server((*_FURTHER, "skip_special_tokens", "regex"), salted=True),
    "tensorrt-llm": Server((*_FURTHER, "skip_special_tokens", "regex"), top_k_off=0, salted=True, limits_calls=False),
    "ollama": Server((), forces_tools=False, limits_calls=False),
    "weftline": Server((*_FURTHER, "typical_p", "allowed_token_ids", "bad_words", "skip_special_tokens"), top_k_off=0),
}
"""Kinds of servers by the value of the option `server`."""


def readers_of(keys: Iterable[str]) -> list[str]:
    """Return the kinds of servers that read all of `keys`."""
    return [name for name, one in SERVERS.items() if set(keys) <= {*COMMON, *one.keys, "tokens_max"}]
