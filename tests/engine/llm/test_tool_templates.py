"""Chat templates in the style of five families: their calls, rendered by transformers, are read back as the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.llm import tiny
from weftline.engine.llm.answer_parser import AnswerParser
from weftline.engine.llm.answer_syntax import AnswerSyntax, find_tool_format
from weftline.engine.llm.tokens import Tokens

TEMPLATES = Path(__file__).parent / "templates"
FORMATS = {
    "hermes": "hermes",
    "qwen3": "hermes",
    "qwen3_coder": "qwen3_coder",
    "llama3": "llama3",
    "mistral": "mistral",
}
ENDS = {
    "hermes": ("<|im_start|>assistant", "<|im_end|>"),
    "qwen3": ("<|im_start|>assistant", "<|im_end|>"),
    "qwen3_coder": ("<|im_start|>assistant", "<|im_end|>"),
    "llama3": ("<|start_header_id|>assistant<|end_header_id|>", "<|eot_id|>"),
    "mistral": ("[/INST]", "</s>"),
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("look", "stop")
]
ARGUMENTS: list[dict[str, Any]] = [{"at": 'é "sky" \\ <b>', "list": [1, {"a": None}]}, {}]


def conversation(count: int, **more: Any) -> list[dict[str, Any]]:
    """Return a conversation with calls as OpenAI's clients send them, with the arguments as text."""
    calls = [
        {"id": f"abcdefgh{at}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for at, (name, arguments) in enumerate(zip(("look", "stop"), ARGUMENTS, strict=True))
    ]
    return [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": None, "tool_calls": calls[:count], **more},
        *({"role": "tool", "tool_call_id": call["id"], "content": "there"} for call in calls[:count]),
    ]


def rendered(family: str, messages: list[dict[str, Any]]) -> str:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text()
    words = Tokens(tokenizer, 4096)
    return words._decoder(control=True)(words.chat(messages, TOOLS))


@pytest.mark.parametrize("family", FORMATS)
def test_the_calls_of_a_conversation_are_read_back_as_the_same(family: str) -> None:
    format = find_tool_format((TEMPLATES / f"{family}.jinja").read_text())
    assert format == FORMATS[family]
    count = 1 if family == "llama3" else 2
    start, end = ENDS[family]
    text = rendered(family, conversation(count))
    turn = text.partition("Where?")[2].partition(start)[2].partition(end)[0]
    parser = AnswerParser(AnswerSyntax(format, {"look": {}, "stop": {}}))
    parser.push(turn, final=True)
    calls = [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in parser.parts.calls]
    assert calls == list(zip(("look", "stop"), ARGUMENTS, strict=True))[:count]
    assert parser.parts.content == ""
    assert text.partition(turn)[2].count("there") == count


def test_reasoning_of_a_conversation_is_rendered_and_read_back() -> None:
    messages = conversation(1, reasoning_content="Hm.\nI look.")
    turn = rendered("qwen3", messages).partition("<|im_start|>assistant\n")[2].partition("<|im_end|>")[0]
    assert turn.startswith("<think>\nHm.\nI look.\n</think>\n\n<tool_call>")
    parser = AnswerParser(AnswerSyntax("hermes", reasoning=True))
    parser.push(turn, final=True)
    assert (parser.parts.reasoning, parser.parts.content, len(parser.parts.calls)) == ("Hm.\nI look.", "", 1)


def test_ids_of_calls_are_those_that_templates_accept() -> None:
    parser = AnswerParser(AnswerSyntax("mistral"))
    parser.push('[TOOL_CALLS][{"name": "look", "arguments": {}}]', final=True)
    messages = conversation(1)
    messages[1]["tool_calls"] = list(parser.parts.calls)
    messages[2]["tool_call_id"] = parser.parts.calls[0]["id"]
    assert f'"id": "{parser.parts.calls[0]["id"]}"' in rendered("mistral", messages)
