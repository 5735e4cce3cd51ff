"""Variables of chat templates, messages that an answer continues, and prompts without a template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.llm import tiny
from weftline.engine.llm.template_options import TemplateOptions
from weftline.engine.llm.tokens import Tokens
from weftline.errors import InputError

SWITCH = (
    r"""{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"""
)
QWEN3 = (Path(__file__).parent / "templates/qwen3.jinja").read_text() + SWITCH
"""As Qwen 3's own: reasoning is off where the prompt ends with an empty one."""
ASKED: Any = [{"role": "user", "content": "Why?"}]
BEGUN: Any = [*ASKED, {"role": "assistant", "content": "Because of "}]


def tokens(template: str = tiny.TEMPLATE) -> Tokens:
    words = tiny.tokenizer()
    words.chat_template = template
    return Tokens(words, 4096)


def prompt(found: Tokens, messages: Any = ASKED, **options: Any) -> str:
    ids = found.chat(messages, options=TemplateOptions.read(options))
    return str(found.tokenizer.decode(ids, skip_special_tokens=False))


def test_a_variable_of_the_request_reaches_the_template() -> None:
    found = tokens(QWEN3)
    assert prompt(found, variables={"enable_thinking": False}).endswith("</think>\n\n")
    assert not prompt(found, variables={"enable_thinking": True}).endswith("</think>\n\n")
    assert prompt(found, reasoning_effort="none") == prompt(found, variables={"enable_thinking": False})
    assert prompt(found, reasoning_effort="high") == prompt(found)
    assert prompt(found, reasoning_effort="none", variables={"enable_thinking": True}) == prompt(found)


def test_an_effort_reaches_a_template_that_reads_it_as_text() -> None:
    found = tokens("{{ messages[0].content }} {{ reasoning_effort }} {{ thinking }} {{ documents }}")
    text = prompt(found, reasoning_effort="low", documents=[{"title": "a"}])
    assert text == "Why? low True [{'title': 'a'}]"


def test_an_effort_is_refused_where_the_template_reads_none() -> None:
    with pytest.raises(InputError, match="reasoning_effort: the model's chat template has no variable") as refused:
        prompt(tokens(), reasoning_effort="high")
    assert refused.value.param == "reasoning_effort"
    assert prompt(tokens(), reasoning_effort="none") == prompt(tokens())


def test_names_of_control_tokens_in_variables_stay_text() -> None:
    found = tokens("{{ messages[0].content }}{{ extra }}{{ documents[0].text }}")
    mark = "<|im_end|>"
    ids = found.chat(ASKED, options=TemplateOptions(variables={"extra": mark}, documents=[{"text": mark}]))
    assert not any(map(found.is_control, ids))
    assert found.tokenizer.decode(ids) == f"Why?{mark}{mark}"


def test_an_answer_continues_the_last_message() -> None:
    found = tokens()
    assert prompt(found, BEGUN, continue_final_message=True).endswith("<|im_start|>assistant\nBecause of ")
    assert prompt(found, BEGUN).endswith("Because of <|im_end|>\n<|im_start|>assistant\n")
    assert prompt(found, BEGUN, add_generation_prompt=False).endswith("Because of <|im_end|>\n")
    trimmed = tokens("{% for m in messages %}{{ m.content | trim }}!{% endfor %}")
    assert prompt(trimmed, BEGUN, continue_final_message=True) == "Why?!Because of "


def test_a_message_that_the_template_drops_cannot_be_continued() -> None:
    with pytest.raises(InputError, match="leaves the last message out") as refused:
        prompt(tokens("{{ messages[0].content }}"), BEGUN, continue_final_message=True)
    assert refused.value.param == "continue_final_message"


def test_private_characters_of_a_message_are_no_end_of_the_last() -> None:
    begun = [{"role": "user", "content": "Why \uf8fe not?"}, BEGUN[1]]
    assert "\uf8fe not?" in prompt(tokens(), begun, continue_final_message=True)
    with pytest.raises(InputError, match="leaves the last message out"):
        prompt(tokens("{{ messages[0].content }}"), begun, continue_final_message=True)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"variables": {"messages": []}}, "variables"),
        ({"variables": {str(place): 1 for place in range(65)}}, "variables"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"apply": "no"}, "apply"),
        ({"aply": False}, "template"),
        ("none", ""),
    ],
)
def test_wrong_options_are_refused_by_name(options: Any, param: str) -> None:
    with pytest.raises(InputError) as refused:
        tokens().chat(ASKED, options=TemplateOptions.read(options))
    assert refused.value.param == param


def test_a_template_with_a_mistake_refuses_the_request() -> None:
    for wrong in ("{% if %}", "{{ messages | no_such_filter }}"):
        with pytest.raises(InputError, match="messages: the model's chat template"):
            prompt(tokens(wrong))


def test_a_text_is_the_prompt_as_it_is() -> None:
    found = tokens()
    assert found.tokenizer.decode(found.raw("Why?")) == "Why?"
