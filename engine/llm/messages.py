"""Chat messages of a request, validated.

A message has a role and content, and may carry what tool-calling models use: `tool_calls`, `tool_call_id`, `name`,
`reasoning_content`. What tools look like is the model's business: their shape is not judged here, only that it is JSON
of reasonable size. The format follows OpenAI's chat completions, as most chat templates expect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from weftline.errors import InputError

ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGES_MAX = 1024
"""Most messages of one conversation."""
TOOLS_MAX = 128
"""Most tools offered to the model."""
DEPTH_MAX = 32
"""Deepest nesting of a tool call or a tool's schema."""
VALUES_MAX = 100_000
"""Most single values in a conversation and its tools together."""
_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Return a conversation with contents as plain texts; InputError says which message is wrong, and how."""
    if not isinstance(messages, list) or not 0 < len(messages) <= MESSAGES_MAX:
        found = f"a list of {len(messages)}" if isinstance(messages, list) else type(messages).__name__
        raise InputError(f"messages: found {found}, expected a list of 1 to {MESSAGES_MAX} messages")
    return [_check_message(f"messages[{place}]", message) for place, message in enumerate(messages)]


def check_tools(tools: object) -> list[dict[str, Any]]:
    """Return the tools offered to the model; InputError unless they are a list of objects."""
    if not isinstance(tools, list) or len(tools) > TOOLS_MAX or not all(isinstance(one, Mapping) for one in tools):
        raise InputError(f"tools: expected a list of at most {TOOLS_MAX} objects")
    return [dict(one) for one in tools]


def mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Return JSON-like `value` with every text in it, keys included, changed; InputError when it is too deep or big."""
    left = VALUES_MAX

    def visit(value: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if depth > DEPTH_MAX or left < 0:
            what = f"nested deeper than {DEPTH_MAX}" if depth > DEPTH_MAX else f"more than {VALUES_MAX} values"
            raise InputError(f"messages: {what}")
        if isinstance(value, str):
            return change(value)
        if isinstance(value, Mapping):
            return {change(str(key)): visit(one, depth + 1) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [visit(one, depth + 1) for one in value]
        if value is None or isinstance(value, bool | int | float):
            return value
        raise InputError(f"messages: found a {type(value).__name__}, expected JSON")

    return visit(value, 0)


def _check_message(where: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping) or "role" not in message or not set(message) <= _KEYS:
        known = ", ".join(sorted(_KEYS))
        raise InputError(f"{where}: expected an object with role and content; known keys: {known}")
    if message["role"] not in ROLES:
        raise InputError(f"{where}.role: found {message['role']!r:.40}, expected {', '.join(ROLES)}")
    checked = {key: value for key, value in message.items() if value is not None}
    checked["content"] = _content(f"{where}.content", message.get("content"), "tool_calls" in checked)
    return checked


def _content(where: str, content: object, optional: bool) -> str:
    """Return content as one text: it may come as a list of text parts, or be absent beside tool calls."""
    if content is None and optional:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        for place, part in enumerate(content):
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise InputError(
                    f"{where}[{place}]: expected {{type: text, text: ...}}; pictures are steps of their own"
                )
        return "".join(part["text"] for part in content)
    raise InputError(f"{where}: found {type(content).__name__}, expected text")
