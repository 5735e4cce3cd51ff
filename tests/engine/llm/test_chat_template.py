"""Test the limits of a model's chat template, and that its text is that of transformers."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest
from jinja2 import TemplateError

from weftline.engine.llm.chat_template import ChatTemplate
from weftline.nodes.template_sandbox import Overrun

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <b>"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1, "é"]}}}]},
]

HONEST = """
{%- macro shown(text, kind='x') %}<{{ kind }}>{{ text }}{% endmacro %}
{%- set ns = namespace(found=false, last=messages|length - 1) %}
{%- if messages[0].role == 'system' %}
    {%- set rest = messages[1:] %}
    {{- bos_token ~ shown(messages[0]['content'] | trim, kind='sys') + '\\n' }}
{%- endif %}
{%- set block %}{{ rest | length }} of %d{% endset %}
{{- block }}{{ ' | '.join(['a', 'b']) }}{{ '%s-%02d' % ('n', 3) }}
{%- for message in rest if message.role != 'tool' %}
    {%- if loop.index0 > 5 %}{% break %}{% endif %}
    {%- set ns.found = true %}
    {{- message.role.upper() }}: {{ message.content.split('<')[0].strip() }}
    {%- for call in message.tool_calls or [] %}
        {{- call.function | tojson }}{{ call.function.arguments | tojson(indent=2) }}
    {%- endfor %}
    {% generation %}{{ message.content }}{% endgeneration %}
{%- endfor %}
{%- set pairs = [{'a': 1}] + [{'b': [2, 3]}] %}{{ pairs | map('tojson') | join(',') }}{{ pairs[1].b }}
{%- if tools is none and ns.found %}{{ 'end' }}{% endif %}
{%- if add_generation_prompt %}{{ '<go>' }}{% endif %}
"""


def render(source: str, ms: float = 2_000.0) -> str:
    values = {"messages": MESSAGES, "tools": None, "add_generation_prompt": True, "bos_token": "<s>"}
    return ChatTemplate(source).render(values, ms)


def test_an_honest_template_gives_the_text_of_transformers() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    theirs, _ = render_jinja_template(
        conversations=[MESSAGES], chat_template=HONEST, add_generation_prompt=True, bos_token="<s>"
    )
    assert render(HONEST) == theirs[0]


HOSTILE = {
    "endless loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "long text": "{{ 'a' * 6000000000 }}",
    "long list": "{{ [1] * 600000000 }}",
    "large power": "{{ 9 ** 999999999 }}",
    "doubled text": "{% set ns = namespace(a='aaaaaaaa') %}"
    + "{% for i in range(64) %}{% set ns.a = ns.a + ns.a %}{% endfor %}{{ ns.a }}",
    "doubled blocks": "{% set a0 %}"
    + "a" * 1000
    + "{% endset %}"
    + "".join(f"{{% set a{i + 1} %}}{{{{ a{i} }}}}{{{{ a{i} }}}}{{% endset %}}" for i in range(40)),
    "doubled lists": "{% set ns = namespace(a=[1]) %}"
    + "{% for i in range(64) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a == ns.a }}{{ ns.a }}",
    "doubled dicts": "{% set ns = namespace(a={}) %}"
    + "{% for i in range(64) %}{% set ns.a = {'a': ns.a, 'b': ns.a} %}{% endfor %}{{ ns.a | tojson }}",
    "recursive macro": "{% macro m(n) %}{{ m(n + 1) }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "text in a loop": "{% set x %}{% for i in range(99999) %}" + "a" * 60_000 + "{% endfor %}{% endset %}{{ x }}",
    "padding": "{{ 'a'.ljust(6000000000) }}",
    "zeros": "{{ '1'.zfill(6000000000) }}",
    "format": "{{ '{:>6000000000}'.format('a') }}",
    "percent": "{{ '%6000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (600000000, 1) }}",
    "filter center": "{{ 'a' | center(6000000000) }}",
    "filter indent": "{{ 'a' | indent(6000000000) }}",
    "json indent": "{{ [1, [2]] | tojson(indent=600000000) }}",
    "replaced": "{% set a = 'a' * 60000 %}{{ a.replace('a', a) }}",
    "joined": "{% set a = 'a' * 60000 %}{{ a.join(a | list) }}",
    "internals": "{{ messages.append.__self__.__class__.__mro__ }}",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_soon_and_small(name: str) -> None:
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises((Overrun, TemplateError, RecursionError)):
        render(HOSTILE[name], 1_000.0)
    assert time.monotonic() - started < 8
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 700_000  # kilobytes


def test_a_long_template_is_refused() -> None:
    with pytest.raises(TemplateError, match="the most is"):
        ChatTemplate("a" * (1 << 20))


BUNDLED = Path(__file__).parents[3] / "examples" / "models" / "shapes-chat"


def test_the_template_of_the_bundled_model_gives_the_text_of_transformers() -> None:
    from transformers import AutoTokenizer

    from weftline.engine.llm.tokens import Tokens

    theirs, ours = AutoTokenizer.from_pretrained(BUNDLED), Tokens.open(BUNDLED, 512)
    first = [{"role": "user", "content": "How many circles?"}]
    whole = [{"role": "system", "content": "Be brief."}, *first, {"role": "assistant", "content": "2"}, *first]
    for turns in (first, whole):
        text = ours._template(None, None).render({"messages": turns, "tools": None, "add_generation_prompt": True})
        assert text == theirs.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        assert ours.chat(turns) == theirs.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
