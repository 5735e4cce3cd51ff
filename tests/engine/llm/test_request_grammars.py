"""Constrained answers inside the engine: they are valid whatever else happens, and other requests do not wait."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.engine.llm import tiny
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.grammar import matcher as grammar_matcher
from weftline.engine.llm.model_loader import RunnerOptions
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.request import LlmRequestOptions
from weftline.engine.llm.request_grammars import RequestGrammars
from weftline.engine.llm.runner import Runner
from weftline.engine.llm.schedule import RoundLimits
from weftline.engine.llm.speculation import NgramProposer, Speculation
from weftline.engine.llm.tokens import Tokens
from weftline.errors import DeadlineExceeded, InputError

SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer"}, "colour": {"enum": ["red", "blue"]}},
    "required": ["count", "colour"],
    "additionalProperties": False,
}
FREE = {"tokens_max": 300, "temperature": 1.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def engine(folder: Path):
    runner = Runner.open(folder, RunnerOptions(kv_bytes=60 * 16 * 512))
    tokens = Tokens.open(folder, runner.context_max)
    grammars = RequestGrammars(tokens, runner.vocabulary, runner.ends)
    made = Engine(runner, tokens, RoundLimits(64, 8), speculation=Speculation(NgramProposer()), grammars=grammars)
    yield made
    made.close()


def _finish(engine: Engine) -> tuple[dict[tuple[int, int], str], dict[int, Exception]]:
    texts: dict[tuple[int, int], str] = {}
    errors: dict[int, Exception] = {}
    while engine.busy:
        for update in engine.step():
            texts[update.id, update.index] = texts.get((update.id, update.index), "") + update.text
            if update.error is not None:
                errors[update.id] = update.error
        engine.check()
    assert engine.stats().pages_used == 0
    return texts, errors


def test_callers_share_the_grammar_of_the_pipeline_file_only(engine):
    tokens, runner = engine.tokens, engine.runner
    grammars = RequestGrammars(tokens, runner.vocabulary, runner.ends, {"regex": "own"})
    made = Engine(runner, tokens, RoundLimits(64, 8), grammars=grammars)
    salts: list[tuple[bytes, str]] = []
    made.add(0, [5], SamplingParams(**FREE, regex="other"), LlmRequestOptions(salt=b"a"))
    submit = grammars._compiler.submit
    grammars._compiler.submit = lambda constraint, salt: (
        salts.append((salt, constraint.value)) or submit(constraint, salt)
    )
    for at, (salt, regex) in enumerate([(b"a", "own"), (b"b", "own"), (b"a", "other"), (b"b", "other")], 1):
        made.add(at, [5], SamplingParams(**FREE, regex=regex), LlmRequestOptions(salt=salt))
    assert salts == [(b"", "own"), (b"", "own"), (b"a", "other"), (b"b", "other")]
    grammars.close()


@pytest.mark.slow
def test_answers_of_many_forms_side_by_side_are_of_their_forms(engine):
    wanted = [
        {"regex": "(ab|cd){3,5}x"},
        {"choice": ["yes", "no", "it depends"]},
        {"json_schema": SCHEMA},
        {"grammar": 'start: "a" WORD "!"\nWORD: /[b-y]{1,6}/'},
        {},
    ]
    for at, constraint in enumerate(wanted):
        engine.add(at, [5, 6, 7 + at], SamplingParams(**FREE, seed=at, **constraint))
    texts, errors = _finish(engine)
    assert not errors
    assert re.fullmatch("(ab|cd){3,5}x", texts[0, 0])
    assert texts[1, 0] in ("yes", "no", "it depends")
    read = json.loads(texts[2, 0])
    assert type(read["count"]) is int
    assert read["colour"] in ("red", "blue")
    assert re.fullmatch("a[b-y]{1,6}!", texts[3, 0])


def test_every_one_of_several_answers_is_of_the_form(engine):
    engine.add(1, [5, 6], SamplingParams(**FREE, seed=3, n=6, regex="[0-9]{4}-[0-9]{2}"))
    texts, errors = _finish(engine)
    assert not errors
    assert len(texts) == 6
    assert all(re.fullmatch("[0-9]{4}-[0-9]{2}", text) for text in texts.values())
    assert len(set(texts.values())) > 1


def test_a_preempted_answer_goes_on_in_its_form(engine):
    for at in range(6):
        engine.add(at, list(range(3, 60)), SamplingParams(**FREE, seed=at, tokens_min=40, regex="[a-f]{50,60}"))
    texts = dict.fromkeys(range(6), "")
    step = 0
    while engine.busy:
        for update in engine.step():
            assert update.error is None
            texts[update.id] += update.text
        step += 1
        if step in (15, 25):
            engine.resize(24)
    assert engine.stats().preemptions > 0
    assert all(re.fullmatch("[a-f]{50,60}", text) for text in texts.values())


def test_shrinking_memory_leaves_room_while_a_grammar_compiles(engine):
    engine.add(1, list(range(3, 60)), SamplingParams(**FREE, regex="[a-f]{50,60}"))
    assert engine.resize(2) == 23
    texts, errors = _finish(engine)
    assert not errors
    assert re.fullmatch("[a-f]{50,60}", texts[1, 0])


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"regex": "(a"}, "regex"),
        ({"json_schema": {"type": "colour"}}, "json_schema"),
        ({"grammar": "start: nothing"}, "grammar"),
        ({"grammar": "root ::= a"}, "sampling.grammar: Rule 'a' not found"),
    ],
)
def test_a_bad_form_fails_its_request_and_the_others_go_on(engine, bad, named):
    engine.add(1, [5, 6], SamplingParams(tokens_max=5, ignore_eos=True))
    engine.add(2, [5, 6], SamplingParams(**bad))
    _, errors = _finish(engine)
    assert list(errors) == [2]
    assert isinstance(errors[2], InputError)
    assert named in str(errors[2])
    assert str(errors[2]).count("sampling") == 1


@pytest.mark.parametrize("moves", ["fill", "accept"])
def test_a_constraint_that_takes_too_long_is_named(engine, monkeypatch, moves):
    def exceed(self, argument):
        raise InputError(f"{grammar_matcher.WHERE} a token took 300 ms")

    engine.add(1, [5, 6], SamplingParams(regex="[a-f]{3}"))
    assert not _finish(engine)[1]
    monkeypatch.setattr(grammar_matcher.Matcher, moves, exceed)
    engine.add(2, [5, 6], SamplingParams(regex="[a-f]{3}"))
    error = _finish(engine)[1][2]
    assert str(error) == "sampling.regex: a token took 300 ms" and error.param == "regex"


@pytest.mark.parametrize("kind", ["json_schema", "regex", "grammar"])
@pytest.mark.parametrize("value", [0, False, ()])
def test_a_form_of_the_wrong_type_is_refused_and_not_taken_for_none(engine, kind, value):
    with pytest.raises(InputError, match=f"sampling.{kind}: found "):
        engine.add(1, [5, 6], SamplingParams(**{kind: value}))
    assert not engine.busy


def test_others_run_while_a_grammar_compiles_and_it_can_cancel_or_expire(engine):
    engine.add(1, [5, 6], SamplingParams(tokens_max=30, ignore_eos=True))
    engine.add(2, [5, 6], SamplingParams(**FREE, regex="[ab]{3}"), LlmRequestOptions(deadline_ms=5.0))
    engine.add(3, [5, 6], SamplingParams(**FREE, regex="[cd]{3}"))
    first = engine.step(0.0)
    assert [update.id for update in first] == [1]
    engine.cancel(3)
    late = engine.step(10.0)
    assert any(update.id == 2 and isinstance(update.error, DeadlineExceeded) for update in late)
    texts, errors = _finish(engine)
    assert not errors
    assert {id for id, _ in texts} == {1}
