"""Keys of the objects in Anthropic's requests: content blocks, tools, and options that are objects. Pure.

Each key is kept, without effect, or refused unless its value is one that would change nothing. A key in none of the
three is unknown, and refused with the nearest known one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weftline.engine.serving.http.errors import HttpError
from weftline.engine.serving.openai.bodies import unknown_field
from weftline.engine.serving.openai.fields import Refusals


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of one kind of object. without_effect: besides `type`, which selects the kind."""

    kept: tuple[str, ...]
    without_effect: tuple[str, ...] = ("cache_control",)
    refused: Refusals = field(default_factory=dict)

    def check(self, where: str, found: Mapping[str, Any]) -> None:
        """Raise HttpError for a key that is refused or unknown; null is the same as leaving a key out."""
        for key, value in found.items():
            if value is None or key == "type" or key in self.kept or key in self.without_effect:
                continue
            place, param = f"{where}.{key:.60}", where.partition("[")[0].partition(".")[0]
            if key not in self.refused:
                known = [*self.kept, *self.without_effect, *self.refused]
                raise HttpError(f"{place}: {unknown_field(key[:60], known)}", param=param)
            if value not in self.refused[key]:
                raise HttpError(f"{place}: not supported by this server; leave it out", param=param)


BLOCKS: Mapping[str, Keys] = {
    "text": Keys(("text",), refused={"citations": ([],)}),
    "image": Keys(("source",), refused={"transformations": ({}, {"oversized_image": "downsize"})}),
    "tool_use": Keys(("id", "name", "input"), refused={"caller": ({"type": "direct"},), "toolset_name": ()}),
    "tool_result": Keys(("tool_use_id", "content", "is_error"), refused={"toolset_name": ()}),
    "thinking": Keys(("thinking",), ("cache_control", "signature")),
    "redacted_thinking": Keys((), ("cache_control", "data")),
}
"""Content blocks by type; any other type is refused by its name."""

OPTIONS: Mapping[str, Keys] = {
    "messages": Keys(("role", "content"), ()),
    "tools": Keys(
        ("name", "description", "input_schema", "strict"),
        ("cache_control", "eager_input_streaming"),
        {"defer_loading": (False,), "allowed_callers": (["direct"],), "input_examples": ([],)},
    ),
    "tool_choice": Keys(("name", "disable_parallel_tool_use"), ()),
    "thinking": Keys(("display",), ("budget_tokens",)),
    "output_config": Keys(("effort", "format"), (), {"task_budget": ()}),
    "output_config.format": Keys(("schema",), ()),
}
"""Objects in other fields."""
