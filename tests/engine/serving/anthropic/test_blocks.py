"""Every key of the objects of the stock client's requests is read, without effect, or refused."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest
from anthropic import types

from weftline.engine.serving.anthropic.blocks import BLOCKS, OPTIONS, Keys

PARAMS: dict[str, tuple[Keys, Any]] = {
    "text": (BLOCKS["text"], types.TextBlockParam),
    "image": (BLOCKS["image"], types.ImageBlockParam),
    "tool_use": (BLOCKS["tool_use"], types.ToolUseBlockParam),
    "tool_result": (BLOCKS["tool_result"], types.ToolResultBlockParam),
    "thinking": (BLOCKS["thinking"], types.ThinkingBlockParam),
    "redacted_thinking": (BLOCKS["redacted_thinking"], types.RedactedThinkingBlockParam),
    "messages": (OPTIONS["messages"], types.MessageParam),
    "tools": (OPTIONS["tools"], types.ToolParam),
    "tool_choice": (OPTIONS["tool_choice"], types.ToolChoiceParam),
    "thinking field": (OPTIONS["thinking"], types.ThinkingConfigParam),
    "output_config": (OPTIONS["output_config"], types.OutputConfigParam),
    "beta output_config": (OPTIONS["output_config"], types.beta.BetaOutputConfigParam),
    "beta tools": (OPTIONS["tools"], types.beta.BetaToolParam),
    "output_config.format": (OPTIONS["output_config.format"], types.JSONOutputFormatParam),
}


@pytest.mark.parametrize("name", PARAMS)
def test_every_key_of_the_client_is_in_the_table(name: str) -> None:
    keys, params = PARAMS[name]
    wanted = {key for one in get_args(params) or (params,) for key in one.__annotations__} - {"type"}
    assert sorted(wanted - {*keys.kept, *keys.without_effect, *keys.refused}) == []


@pytest.mark.parametrize("name", PARAMS)
def test_a_key_has_one_effect(name: str) -> None:
    keys, _ = PARAMS[name]
    every = [*keys.kept, *keys.without_effect, *keys.refused]
    assert len(every) == len(set(every))


def test_every_block_that_is_read_is_one_of_the_client() -> None:
    blocks = get_args(types.ContentBlockParam)
    kinds = {kind for one in blocks for kind in get_args(get_args(get_type_hints(one)["type"])[0]) or
             get_args(get_type_hints(one)["type"])}  # fmt: skip
    assert set(BLOCKS) <= kinds
