"""Notation of reasoning and tool calls in a model's answers. Pure.

Models write both as text, in a notation that their chat template shows:

    hermes   <tool_call>{"name": "f", "arguments": {...}}</tool_call>, once per call (Hermes, Qwen 2.5 and 3), or with a
             list of such objects
    llama3   {"name": "f", "parameters": {...}} where the answer begins or after <|python_tag|>; more calls after `;`
             (Llama 3.1 and later)
    qwen3_coder  <tool_call><function=f><parameter=a>value</parameter></function></tool_call>, once per call
    mistral  [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...], or [TOOL_CALLS]f[ARGS]{...} once per call

Reasoning stands between <think> and </think> at the beginning. Some templates end the prompt with <think>.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TOOL_FORMATS = ("hermes", "llama3", "mistral", "qwen3_coder")
FORCED_FORMATS = ("hermes", "llama3", "mistral")
"""Formats in which a call can be forced by a grammar."""

MARKED_FORMATS = ("hermes", "mistral")
"""Those of FORCED_FORMATS whose calls begin with a mark, by which a grammar separates them from other JSON."""
THINK, END_THINK = "<think>", "</think>"
HERMES, END_HERMES = "<tool_call>", "</tool_call>"
LLAMA3 = "<|python_tag|>"
MISTRAL = "[TOOL_CALLS]"
MARKS = (END_THINK, HERMES, END_HERMES, MISTRAL)
"""Marks that the grammar of a forced call contains; tokenizers may have tokens for them."""
OPENING = {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL, "qwen3_coder": HERMES}
"""Mark before the first call, by format."""

CALLS_MAX = 64
"""Most calls of an answer."""


@dataclass(frozen=True, slots=True)
class AnswerSyntax:
    """Notation of one request's answers.

    tools:     format of tool calls; '' leaves them in the content.
    schemas:   parameters of the offered functions, by name.
    reasoning: True to separate reasoning from the content.
    thinking:  True if the prompt ends within the reasoning.
    forced:    True if the answer must be a call.
    calls_max: most calls to return; further ones are dropped.
    key:       bytes that the ids of calls depend on.
    """

    tools: str = ""
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    reasoning: bool = False
    thinking: bool = False
    forced: bool = False
    calls_max: int = CALLS_MAX
    key: bytes = b""


def find_tool_format(template: str) -> str:
    """Return the format of calls that a chat template shows; '' for none that is known."""
    if "<function=" in template:
        return "qwen3_coder" if "<parameter=" in template and HERMES in template else ""
    if "<arg_key>" in template:  # GLM: another XML inside <tool_call>
        return ""
    if HERMES in template:
        return "hermes"
    if MISTRAL in template:
        return "mistral"
    return "llama3" if LLAMA3 in template or "dictionary of argument name" in template else ""
