"""Tool calls of a conversation, in every form that clients send, render in the templates of five families."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage

from tests.engine.llm import tiny
from weftline.engine.llm.tokens import Tokens
from weftline.engine.serving.openai.messages import read_conversation

TEMPLATES = Path(__file__).parent / "templates"
FAMILIES = ("llama3", "qwen3", "qwen3_coder", "mistral", "glm", "hermes")
ARGUMENTS = {"city": "Bergen", "days": 2}
USER = {"role": "user", "content": "Will it rain?"}
RESULT = {"role": "tool", "tool_call_id": "call_0123456789abcdefghijklmn", "content": "yes, it will"}


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    return {
        "id": RESULT["tool_call_id"],
        "type": "function",
        "function": {"name": "weather", "arguments": arguments},
    } | more


def assistant(*calls: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)} | more


OPENAI = ChatCompletionMessage.model_validate(assistant(call(json.dumps(ARGUMENTS))))
FORMS: dict[str, list[dict[str, Any]]] = {
    "openai, dumped": [USER, OPENAI.model_dump(), RESULT],
    "openai, without null": [USER, OPENAI.model_dump(exclude_none=True), RESULT],
    "content is empty": [USER, assistant(call(json.dumps(ARGUMENTS)), content=""), RESULT],
    "content is parts": [
        USER | {"content": [{"type": "text", "text": "Will it rain?"}]},
        assistant(call(json.dumps(ARGUMENTS)), content=[{"type": "text", "text": ""}]),
        RESULT | {"content": [{"type": "text", "text": "yes, "}, {"type": "text", "text": "it will"}]},
    ],
    "no content": [
        USER,
        {key: one for key, one in assistant(call(json.dumps(ARGUMENTS))).items() if key != "content"},
        RESULT,
    ],
    "arguments are an object": [USER, assistant(call(ARGUMENTS)), RESULT],
    "arguments have spaces": [USER, assistant(call(json.dumps(ARGUMENTS, indent=2) + "\n")), RESULT],
    "no type": [
        USER,
        assistant({key: one for key, one in call(json.dumps(ARGUMENTS)).items() if key != "type"}),
        RESULT,
    ],
    "with an index and a name": [USER, assistant(call(json.dumps(ARGUMENTS), index=0)), RESULT | {"name": "weather"}],
    "a function_call": [
        USER,
        {"role": "assistant", "content": None, "function_call": call(json.dumps(ARGUMENTS))["function"]},
        {"role": "function", "name": "weather", "content": "yes, it will"},
    ],
    "with reasoning": [USER, assistant(call(json.dumps(ARGUMENTS)), reasoning="hm"), RESULT],
}


def rendered(family: str, messages: Any) -> str:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text()
    words = Tokens(tokenizer, 8192)
    read = read_conversation(copy.deepcopy(messages)).messages
    return words._decoder(control=True)(words.chat(list(read)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_call_is_rendered_as_the_same(family: str, form: str) -> None:
    text = rendered(family, FORMS[form])
    for part in ("weather", "Bergen", "yes, it will", "Will it rain?"):
        assert part in text, text
    if form not in ("a function_call", "with reasoning"):
        assert text == rendered(family, FORMS["openai, without null"])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("arguments", ["", "{}", "null", None, {}])
def test_a_call_without_arguments_is_rendered(family: str, arguments: Any) -> None:
    assert rendered(family, [USER, assistant(call(arguments)), RESULT]) == rendered(
        family, [USER, assistant(call("{}")), RESULT]
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_side_by_side_are_rendered_with_their_results(family: str) -> None:
    calls = [call(json.dumps({"city": city}), id=f"call_{city}") for city in ("Bergen", "Oslo")]
    results = [RESULT | {"tool_call_id": f"call_{city}", "content": f"in {city}: {rain}"} for city, rain in
               (("Oslo", "no"), ("Bergen", "yes"))]  # fmt: skip
    text = rendered(family, [USER, assistant(*calls), *results, {"role": "user", "content": "Thanks"}])
    places = [text.index(part) for part in ("Will it rain?", '"Bergen"' if '"Bergen"' in text else "Bergen", "Thanks")]
    assert places == sorted(places) and all(f"in {city}" in text for city in ("Bergen", "Oslo"))
    if family == "llama3":  # each call is followed by its result
        order = [text.index(part) for part in ('"Bergen"', "in Bergen", '"Oslo"', "in Oslo")]
        assert order == sorted(order)


def test_ids_of_mistral_have_nine_characters_and_stay_apart() -> None:
    text = rendered("mistral", FORMS["openai, dumped"])
    made = text.partition('"id": "')[2][:9]
    assert made.isalnum() and text.count(made) == 2
    kept = [USER, assistant(call("{}", id="abcdefgh1")), RESULT | {"tool_call_id": "abcdefgh1"}]
    assert rendered("mistral", kept).count("abcdefgh1") == 2


@pytest.mark.parametrize("family", ["qwen3", "glm"])
def test_instructions_of_a_developer_are_those_of_the_system(family: str) -> None:
    found, wanted = (
        rendered(family, [{"role": role, "content": "Be brief."}, USER]) for role in ("developer", "system")
    )
    assert found == wanted and "Be brief." in found


def test_an_empty_list_of_calls_is_no_call() -> None:
    said = {"role": "assistant", "content": "Perhaps."}
    assert rendered("mistral", [USER, said | {"tool_calls": []}, USER]) == rendered("mistral", [USER, said, USER])
