"""Generator of the reference page of Anthropic's fields: `python -m weftline.engine.serving.anthropic.reference`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from weftline.engine.serving.anthropic.blocks import BLOCKS, OPTIONS, Keys
from weftline.engine.serving.anthropic.bodies import BODIES
from weftline.engine.serving.openai.reference import page_of, refused_but_for

PAGE = Path("docs/reference/anthropic-fields.md")
COMMAND = "python -m weftline.engine.serving.anthropic.reference"

_INTRO = f"""\
# Fields of Anthropic's routes

<!-- Written by `{COMMAND}`; do not edit by hand. -->

Every field of the requests of Anthropic's client, its beta ones included, and of vLLM and SGLang, and its effect here.
`sampling.KEY` is a key of the input of that name of an [llm step](nodes.md#llm); a field that is *read* has the meaning
that [the guide](../guides/anthropic.md) states. A field that is refused, or unknown, gets status 400 with its name,
unless its value is one of those that would change nothing. null is the same as leaving a field out.
"""


def fields_reference() -> str:
    """Return the page, in Markdown."""
    others = "Any other type is refused by its name."
    parts = [_section("Content blocks", BLOCKS, others), _section("Objects in other fields", OPTIONS, "")]
    return "\n".join([page_of(_INTRO, BODIES), *parts])


def _section(title: str, kinds: Mapping[str, Keys], note: str) -> str:
    rows = [f"| `{name}` | {_listed(keys.kept)} | {_listed(keys.without_effect)} | {_refused(keys)} |"
            for name, keys in kinds.items()]  # fmt: skip
    lines = [f"## {title}\n", *([f"{note}\n"] if note else []), "| object | read | without effect | refused |"]
    return "\n".join([*lines, "|---|---|---|---|", *rows]) + "\n"


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _refused(keys: Keys) -> str:
    return "; ".join(f"`{key}`: {refused_but_for(harmless)}" for key, harmless in keys.refused.items())


if __name__ == "__main__":
    PAGE.write_text(fields_reference())
