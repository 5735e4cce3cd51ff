"""A pipeline written out reads like one that was written by hand."""

from pathlib import Path

from weftline.pipelines.spec.graph import Input, Pipeline, Step
from weftline.pipelines.spec.loader import load_yaml
from weftline.pipelines.spec.policy import BatchPolicy, Retry, SequencePolicy
from weftline.pipelines.spec.serialisation import to_document, to_yaml
from weftline.pipelines.spec.wire import Wire

WORDS = "on yes null ~ 12 012 1.5 1e3 .5 0o17 0x1F true 12:30 2024-01-01 << = # {x &a *a !t é ' \" 1_000 .inf"


def test_defaults_are_left_out_and_short_forms_used(samples) -> None:
    document = to_document(load_yaml(samples.ASSISTANT, "a.yaml", Path()))
    assert list(document) == ["weftline", "name", "about", "inputs", "steps", "outputs", "slo"]
    assert document["inputs"] == {"question": {"type": "audio", "seconds_max": 30.0}, "photo": "image"}
    assert document["steps"]["guard"] == {"node": "guardrail", "inputs": {"text": "answer.text"}}


def test_a_batch_of_defaults_is_not_the_nodes_own() -> None:
    plain = Step("a", "x", batch=BatchPolicy(), sequence=SequencePolicy(), retry=Retry())
    pipeline = Pipeline("p", (), (plain, Step("b", "x")), {})
    assert load_yaml(to_yaml(pipeline), "x.yaml", Path()).steps == pipeline.steps


def test_constants_stand_where_they_are_read() -> None:
    inputs = (Input("q", "text"), Input("a/size", "json", default=[1, None], hidden=True))
    step = Step("a", "x", inputs={"text": Wire(None, "q"), "size": Wire(None, "a/size")}, retry=Retry(2))
    document = to_document(Pipeline("p", inputs, (step,), {}))
    assert document["inputs"] == {"q": "text"}
    assert document["steps"]["a"] == {"node": "x", "inputs": {"text": "q", "size": {"value": [1, None]}}, "retry": 2}


def test_text_that_looks_like_something_else_stays_text() -> None:
    odd = WORDS.split(" ")
    odd += ["", "- a", "a: b", "a\nb", "a\n\n  b\n", " lead", "trail ", "\t", "a\x85b", "a\u2028b\n", "a\rb", "\ufeff"]
    options = {"odd": odd, **{text: 1 for text in odd if text}}
    pipeline = Pipeline("p", (Input("q", "text"),), (Step("a", "x", options, {"v": Wire(None, "q")}),), {})
    assert load_yaml(to_yaml(pipeline), "x.yaml", Path()).steps[0].options == options
