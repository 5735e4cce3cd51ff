"""Generator of the reference page of OpenAI's fields: `python -m weftline.engine.serving.openai.reference`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weftline.engine.serving.openai.bodies import OpenAiBody
from weftline.engine.serving.openai.fields import why_refused
from weftline.engine.serving.openai.route_bodies import BODIES

PAGE = Path("docs/reference/openai-fields.md")
COMMAND = "python -m weftline.engine.serving.openai.reference"

_INTRO = f"""\
# Fields of OpenAI's routes

<!-- Written by `{COMMAND}`; do not edit by hand. -->

Every field of the requests of OpenAI, vLLM and SGLang, and its effect here. `sampling.KEY` and `template.KEY` are keys
of the inputs of that name of an [llm step](nodes.md#llm); a field that is *read* has the meaning that
[the guide](../guides/openai.md) states. A field that is refused, or unknown, gets status 400 with its name in `param`,
unless its value is one of those that would change nothing. null is the same as leaving a field out.
"""


def fields_reference() -> str:
    """Return the page, in Markdown."""
    return page_of(_INTRO, BODIES)


def page_of(intro: str, bodies: Mapping[str, type[OpenAiBody]]) -> str:
    """Return a page with the fields of the bodies of routes."""
    parts = [intro]
    for body in dict.fromkeys(bodies.values()):
        title = ", ".join(f"`{path}`" for path, of in bodies.items() if of is body)
        rows = [f"| `{field}` | {effect} |" for field, effect in sorted(effects_of(body).items())]
        parts.append("\n".join([f"## {title}\n", "| field | effect |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def effects_of(body: type[OpenAiBody]) -> dict[str, str]:
    """Return the effect of every field of a body, as the page states it."""
    mapped = {field: f"`{key}`" if key else "read" for field, key in body.mapped().items()}
    refused = {field: _refusal(field, harmless) for field, harmless in body.refused.items()}
    return mapped | refused | {field: f"none: {why}" for field, why in body.without_effect.items()}


def _refusal(field: str, harmless: tuple[Any, ...]) -> str:
    return f"{refused_but_for(harmless)}: {why_refused(field).removesuffix('; leave it out')}"


def refused_but_for(harmless: tuple[Any, ...]) -> str:
    """Return the words for a refused field with values that change nothing."""
    shown = " or ".join(f"`{_shown(one)}`" for one in harmless)
    return f"refused, but for {shown}" if shown else "refused"


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')


if __name__ == "__main__":
    PAGE.write_text(fields_reference())
