"""A pipeline written out reads like one that was written by hand."""

from pathlib import Path

from weftline.pipelines.graph import Input, Pipeline, Step
from weftline.pipelines.load import load_yaml
from weftline.pipelines.policy import BatchPolicy
from weftline.pipelines.wire import Wire
from weftline.pipelines.written import to_document, to_yaml

WORDS = "on yes null ~ 12 012 1.5 1e3 .5 0o17 0x1F true 12:30 2024-01-01 << = # {x &a *a !t é ' \" 1_000 .inf"


def test_defaults_are_left_out_and_short_forms_used(samples) -> None:
    document = to_document(load_yaml(samples.ASSISTANT, "a.yaml", Path()))
    assert list(document) == ["weftline", "name", "about", "inputs", "steps", "outputs", "slo"]
    assert document["inputs"] == {"question": {"type": "audio", "seconds_max": 30.0}, "photo": "image"}
    assert document["steps"]["guard"] == {"node": "guardrail", "inputs": {"text": "answer.text"}}


def test_a_batch_of_defaults_is_not_the_nodes_own() -> None:
    pipeline = Pipeline("p", (), (Step("a", "x", batch=BatchPolicy()), Step("b", "x")), {})
    steps = load_yaml(to_yaml(pipeline), "x.yaml", Path()).steps
    assert [step.batch for step in steps] == [BatchPolicy(), None]


def test_text_that_looks_like_something_else_stays_text() -> None:
    odd = WORDS.split(" ")
    odd += ["", "- a", "a: b", "a\nb", "a\n\n  b\n", " lead", "trail ", "\t", "a\x85b", "a\u2028b\n", "a\rb", "\ufeff"]
    options = {"odd": odd, **{text: 1 for text in odd if text}}
    pipeline = Pipeline("p", (Input("q", "text"),), (Step("a", "x", options, {"v": Wire(None, "q")}),), {})
    assert load_yaml(to_yaml(pipeline), "x.yaml", Path()).steps[0].options == options
