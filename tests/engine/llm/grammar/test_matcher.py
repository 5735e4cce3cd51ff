"""Whatever the model says, the answer is a text of the grammar; drafts come and go; excess fails one request only."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from transformers import AutoTokenizer

from tests.engine.llm import tiny
from weftline.engine.llm.grammar import matcher as grammar_matcher
from weftline.engine.llm.grammar.compiler import Constraint, Grammar, GrammarCompiler
from weftline.engine.llm.grammar.masks import apply_masks
from weftline.engine.llm.grammar.matcher import Matcher
from weftline.errors import InputError

CHAT = Path(__file__).resolve().parents[4] / "examples/models/shapes-chat"
PADDING = 13
"""Columns of the logits that no token stands behind."""
WAIT_S = 60.0


class Model:
    """A tokenizer with its compiler, and a model that says anything."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.size = len(tokenizer) + PADDING
        self.end: int = tokenizer.eos_token_id
        self.compiler = GrammarCompiler(tokenizer, self.size, frozenset({self.end}), cache_max=500)
        self.closing = torch.zeros(self.size)
        for token in range(len(tokenizer)):
            self.closing[token] = 10.0 * (tokenizer.decode([token]) in ('"', "}", "]", "0", "\n"))
        self.closing[self.end] = 20.0

    def grammar(self, **wanted: Any) -> Grammar:
        pending = self.compiler.submit(Constraint.read(wanted))
        assert pending.wait(WAIT_S)
        return pending.result()

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def allowed(self, matcher: Matcher) -> set[int]:
        logits = torch.zeros(1, self.size)
        assert apply_masks(logits, [matcher]) == {}
        return {int(token) for token in (logits[0] == 0).nonzero().flatten()}

    def answer(self, matcher: Matcher, seed: int, tokens: int = 40) -> str:
        """Return what comes of random logits; after `tokens` they favour the end, and what closes things."""
        noise = torch.Generator().manual_seed(seed)
        answer: list[int] = []
        while not answer or answer[-1] != self.end:
            assert len(answer) < 3000, "the answer does not end"
            logits = torch.randn((1, self.size), generator=noise)
            if len(answer) > tokens:
                logits += self.closing
            assert apply_masks(logits, [matcher]) == {}
            token = int(logits.argmax())
            assert logits[0, token] > -torch.inf
            assert matcher.accept(token)
            answer.append(token)
        assert matcher.finished
        return str(self.tokenizer.decode(answer[:-1], clean_up_tokenization_spaces=False))


@pytest.fixture(scope="module")
def little() -> Iterator[Model]:
    made = Model(tiny.tokenizer())
    yield made
    made.compiler.close()


@pytest.fixture(scope="module")
def chat() -> Iterator[Model]:
    made = Model(AutoTokenizer.from_pretrained(CHAT))
    yield made
    made.compiler.close()


@pytest.fixture(params=["little", "chat"])
def model(request: pytest.FixtureRequest) -> Model:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Model)
    return found


SHORT = {"type": "string", "maxLength": 6}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"name": SHORT, "age": {"type": "integer"}}, "required": ["age"]},
    {"type": "object", "properties": {"a": SHORT}, "required": ["a"], "additionalProperties": False},
    {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 120}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False, "minItems": 2},
    {"enum": ["red", "green", 5, None, {"deep": [1, 2]}]},
    {"const": {"ä": "ö\n\"'"}},
    {"anyOf": [{"type": "integer"}, {"type": "object", "properties": {"k": {"const": 1}}, "required": ["k"]}]},
    {"type": "number", "minimum": -2.5, "exclusiveMaximum": 17},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    {"type": "string", "pattern": "^[a-c]{2,5}(-[0-9]+)?$", "maxLength": 12},
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "string", "format": "date"},
    {"type": ["string", "null"], "maxLength": 3},
    {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
                "required": ["v", "kids"],
                "additionalProperties": False,
            }
        },
    },
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    {
        "type": "object",
        "properties": {
            "shape": {"enum": ["circle", "square"]},
            "side": {"type": "number"},
            "filled": {"type": "boolean"},
        },
        "required": ["shape", "filled"],
        "additionalProperties": False,
    },
    {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1, "maxProperties": 2},
]


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_random_logits_under_the_mask_give_json_of_the_schema(model: Model, schema: dict[str, Any]) -> None:
    grammar = model.grammar(json_schema=schema)
    for seed in range(4):
        text = model.answer(grammar.matcher(), seed)
        Draft202012Validator(schema).validate(json.loads(text))


PATTERNS = [
    "[0-9]+",
    "(a+)+",
    "(ab|a|b){3,9}",
    r"\d{4}-\d{2}-\d{2}",
    r"[^\n]{0,12}",
    "(the|an?) (user|assistant)( asks| answers){1,2}",
    "größer|kleiner|=",
    r"[A-Z][a-z]{1,8}(, [A-Z][a-z]{1,8}){0,3}\.",
    "^x*$",
    'a/b"c\\nd',
    "[αβγ]{1,4}😀?",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_random_logits_under_the_mask_match_the_whole_pattern(model: Model, pattern: str) -> None:
    grammar = model.grammar(regex=pattern)
    for seed in range(4):
        text = model.answer(grammar.matcher(), seed, tokens=15)
        assert re.fullmatch(pattern, text, re.ASCII), text


def test_random_logits_under_the_mask_give_one_of_the_choices(model: Model) -> None:
    choices = ["yes", "no", "no way", "größer", ".*", "a|b", "\\d", "two\nlines", "#/-&~<>\t\0", "😀"]
    grammar = model.grammar(choice=choices)
    seen = {model.answer(grammar.matcher(), seed) for seed in range(80)}
    assert seen <= set(choices)
    assert len(seen) > 3


def test_random_logits_under_the_mask_give_a_json_object(model: Model) -> None:
    grammar = model.grammar(json_object=True)
    for seed in range(4):
        assert isinstance(json.loads(model.answer(grammar.matcher(), seed, tokens=25), strict=False), dict)


def test_json_may_be_indented_but_not_go_on_with_spaces_for_ever(model: Model) -> None:
    matcher = model.grammar(json_object=True).matcher()
    for text in ("{", "\n", " ", " "):
        assert matcher.accept(model.ids(text)[0])
    space = model.ids(" ")[0]
    more = 0
    while matcher.accept(space):
        more += 1
        assert more < 200
    assert more == 18  # 20 spaces after a new line, two of them above
    assert matcher.accept(model.ids("}")[0])


def test_random_logits_under_the_mask_give_texts_of_a_grammar(model: Model) -> None:
    grammar = model.grammar(grammar='start: sum\nsum: sum "+" one | one\none: /[0-9]/ | "(" sum ")"\n')
    for seed in range(6):
        text = model.answer(grammar.matcher(), seed, tokens=12)
        assert set(text) <= set("0123456789+()")
        while text != (text := re.sub(r"\([0-9](\+[0-9])*\)", "1", text)):
            pass
        assert re.fullmatch(r"[0-9](\+[0-9])*", text)


@pytest.mark.parametrize("whole", [True, False])
def test_the_end_is_allowed_exactly_where_the_text_is_complete(model: Model, whole: bool) -> None:
    matcher = model.grammar(regex="ab(cd)?").matcher()
    assert not matcher.accept(model.end)
    for letter, complete in (("a", False), ("b", True), ("c", False), ("d", True)):
        assert model.end not in model.allowed(matcher) or matcher.complete
        assert matcher.accept(model.ids(letter)[0])
        assert matcher.complete == complete
        assert (model.end in model.allowed(matcher)) == complete
    assert matcher.finished  # nothing can follow, the end has not come yet
    assert model.allowed(matcher) == {model.end}
    if whole:
        assert matcher.accept(model.end)
        assert matcher.finished and matcher.complete
        assert not matcher.accept(model.end)
        assert model.allowed(matcher) == {model.end}


def test_tokens_that_are_no_text_are_never_allowed(little: Model) -> None:
    control = {0, 1, 2}
    beyond = set(range(len(little.tokenizer), little.size))
    for grammar in (little.grammar(regex=r"(?s:.*)"), little.grammar(grammar='start: "a" (<[1]> "b")*')):
        matcher = grammar.matcher()
        assert matcher.accept(little.ids("a")[0])
        assert little.allowed(matcher) & (control | beyond) == {little.end}
        for token in [*control - {little.end}, *beyond, -1, little.size, 1 << 40]:
            assert not matcher.accept(token)
        assert matcher.accept(little.end)


def test_what_is_refused_changes_nothing(model: Model) -> None:
    matcher = model.grammar(regex="[a-z]+[0-9]").matcher()
    assert matcher.accept(model.ids("a")[0])
    before = model.allowed(matcher)
    for token in range(-1, model.size + 2):
        if token not in before:
            assert not matcher.accept(token)
    assert model.allowed(matcher) == before


def test_going_back_is_exact_after_any_steps(model: Model) -> None:
    grammar = model.grammar(json_schema=SCHEMAS[0])
    rng = random.Random(5)
    for _ in range(6):
        matcher = grammar.matcher()
        masks, tokens = [model.allowed(matcher)], []
        for _ in range(60):
            if rng.random() < 0.35:
                back = rng.randint(0, len(tokens))
                matcher.rollback(back)
                tokens, masks = tokens[: len(tokens) - back], masks[: len(masks) - back]
            elif tokens and tokens[-1] == model.end:
                matcher.rollback(1)
                tokens, masks = tokens[:-1], masks[:-1]
            else:
                token = rng.choice(sorted(masks[-1]))
                assert matcher.accept(token)
                tokens.append(token)
                masks.append(model.allowed(matcher))
            assert model.allowed(matcher) == masks[-1]
            assert matcher.complete == (model.end in masks[-1])


def test_going_back_over_the_end_opens_the_text_again(model: Model) -> None:
    matcher = model.grammar(regex="ab?").matcher()
    a, b = model.ids("a")[0], model.ids("b")[0]
    assert matcher.accept(a) and matcher.accept(model.end) and matcher.finished
    matcher.rollback(1)
    assert not matcher.finished and matcher.complete
    assert matcher.accept(b) and matcher.accept(model.end)
    matcher.rollback(3)
    assert not matcher.complete
    assert matcher.accept(a)
    for tokens in (2, -1):
        with pytest.raises(ValueError, match="cannot take back"):
            matcher.rollback(tokens)


def test_two_sequences_of_one_grammar_do_not_disturb_each_other(model: Model) -> None:
    grammar = model.grammar(json_schema=SCHEMAS[0])
    alone = [model.answer(grammar.matcher(), seed) for seed in (1, 2)]
    first, second = grammar.matcher(), grammar.matcher()
    assert first.accept(model.ids("{")[0])
    assert model.allowed(second) != model.allowed(first)
    assert model.answer(second, 2) == alone[1]
    first.rollback(1)
    assert model.answer(first, 1) == alone[0]


AMBIGUOUS = 'start: e\ne: e e e | e e | "a" | "aa" |\n'


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("regex", "(x{1,100000}){1,100000}", "x"),
        ("regex", "((x{1,1000}){1,1000}){1,1000}", "x"),
        ("regex", ".*a.{200}", "a"),
        ("regex", "(.*a.{30}){3}", "ab"),
        ("regex", "(.{0,1000}x){0,60}", "xy"),
        ("regex", "([a-z]*x){1,100}y.{500}", "xay"),
        ("grammar", AMBIGUOUS, "a"),
        ("grammar", 'start: e\ne: e e | "a" |\n', "a"),
        ("grammar", 'start: b{1,1000}\nb: c{1,1000}\nc: d{1,1000}\nd: "a"\n', "a"),
        ("grammar", "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(40)) + 'r40: "a" |\n', "a"),
        ("grammar", "start: A\nA: /(.*a.{100})+/\n", "ab"),
    ],
    ids=lambda value: str(value)[:30].replace("\n", " "),
)
def test_what_explodes_while_it_is_followed_fails_with_a_reason(
    little: Model, monkeypatch: pytest.MonkeyPatch, kind: str, value: str, text: str
) -> None:
    monkeypatch.setattr(grammar_matcher, "MOVE_MAX_MS", 100.0)
    monkeypatch.setattr(grammar_matcher, "BURST_MS", 200.0)
    monkeypatch.setattr(grammar_matcher, "STEADY_MS", 1.0)
    clock = CountedTime(monkeypatch)
    reason = ""
    try:
        matcher = little.grammar(**{kind: value}).matcher()
        row = torch.zeros(matcher.words, dtype=torch.int32)
        for step in range(3000):
            matcher.fill(row)
            token = little.ids(text[step % len(text)])[0]
            if not matcher.accept(token):
                break
    except InputError as error:
        reason = str(error)
    assert not reason or ("make it simpler" in reason and len(reason) < 300), reason
    assert clock.longest_ms < 2000  # seen: 100
    innocent = little.grammar(choice=["fine"])
    assert little.answer(innocent.matcher(), 1) == "fine"


class CountedTime:
    """Notes the longest time between two looks at the clock of the matchers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.longest_ms = 0.0
        began: list[float] = []
        real = grammar_matcher.time.thread_time

        def thread_time() -> float:
            now = real()
            if began:
                self.longest_ms = max(self.longest_ms, (now - began.pop()) * 1e3)
            else:
                began.append(now)
            return now

        monkeypatch.setattr(grammar_matcher.time, "thread_time", thread_time)


def test_a_grammar_forgets_what_was_learnt_when_it_is_much(little: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = little.grammar(regex="[a-z]+[0-9]?")
    first = grammar.matcher()
    kept = grammar._fresh
    row = torch.zeros(first.words, dtype=torch.int32)
    first.fill(row)
    assert grammar.matcher() and grammar._fresh is kept
    _clock(monkeypatch, 200.0)
    first.fill(row)
    assert grammar.matcher() and grammar._fresh is kept
    first.fill(row)
    second = grammar.matcher()
    assert grammar._fresh is not kept
    kept = grammar._fresh
    assert second.accept(little.ids("a")[0]) and first.accept(little.ids("a")[0])
    assert grammar.matcher() and grammar._fresh is not kept
    monkeypatch.setattr(grammar, "_making_ms", 1000.0)
    kept = grammar._fresh
    second.fill(row)
    second.fill(row)
    assert grammar.matcher() and grammar._fresh is kept  # takes too long to make again


def _clock(monkeypatch: pytest.MonkeyPatch, ms: float) -> None:
    """Let every move take `ms` milliseconds by the clock."""
    now = [0.0]

    def thread_time() -> float:
        now[0] += ms / 1e3
        return now[0]

    monkeypatch.setattr(grammar_matcher.time, "thread_time", thread_time)


def test_a_move_that_takes_too_long_fails(little: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = little.grammar(regex="[a-z]+").matcher()
    row = torch.zeros(matcher.words, dtype=torch.int32)
    _clock(monkeypatch, 249.0)
    matcher.fill(row)
    _clock(monkeypatch, 251.0)
    with pytest.raises(InputError, match="a token took 251 ms, the most is 250; make it simpler"):
        matcher.fill(row)


def test_moves_that_take_long_again_and_again_fail(little: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = little.grammar(regex="[a-z]+").matcher()
    row = torch.zeros(matcher.words, dtype=torch.int32)
    _clock(monkeypatch, 9.9)
    for _ in range(1000):
        matcher.fill(row)
    _clock(monkeypatch, 30.0)
    moves = 0
    with pytest.raises(InputError, match=r"takes .* ms for each token, the most is 10"):
        while moves < 100:
            matcher.fill(row)
            moves += 1
    assert 40 <= moves <= 60


def test_one_that_uses_up_what_is_shared_does_not_fail_its_mates(
    little: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(grammar_matcher.LIMITS, "max_lexer_states", 1000)
    grammar = little.grammar(regex="[ab]*a[ab]{40}")
    patient, other = grammar.matcher(), grammar.matcher()
    a, b = little.ids("a")[0], little.ids("b")[0]
    for token in (a, b, a):
        assert patient.accept(token) and other.accept(token)
    before = little.allowed(patient)
    greedy, rng = grammar.matcher(), random.Random(3)
    row = torch.zeros(patient.words, dtype=torch.int32)
    with pytest.raises(InputError, match="too many states; make it simpler"):
        for _ in range(5000):
            greedy.fill(row)
            assert greedy.accept(rng.choice((a, b)))
    assert little.allowed(patient) == before
    assert patient.accept(b)
    patient.rollback(3)
    assert patient.accept(b)
    assert other.accept(b)  # without a mask in between
    assert a in little.allowed(grammar.matcher())


def test_one_that_is_ambiguous_is_not_followed_again_from_its_start(
    little: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(grammar_matcher.LIMITS, "max_items_in_row", 60)
    grammar = little.grammar(grammar='start: e\ne: e e | "a" | "x"\n')
    matcher, a = grammar.matcher(), little.ids("a")[0]
    kept = grammar._fresh
    row = torch.zeros(matcher.words, dtype=torch.int32)
    with pytest.raises(InputError, match="too many ways at once"):
        for _ in range(200):
            matcher.fill(row)
            assert matcher.accept(a)
    assert grammar._fresh is kept


def test_one_that_took_long_is_not_followed_again_from_its_start(
    little: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(grammar_matcher.LIMITS, "max_lexer_states", 1000)
    grammar = little.grammar(regex="[ab]*b[ab]{41}")
    patient, greedy, rng = grammar.matcher(), grammar.matcher(), random.Random(4)
    letters = (little.ids("a")[0], little.ids("b")[0])
    row = torch.zeros(patient.words, dtype=torch.int32)
    _clock(monkeypatch, 100.0)
    assert all(patient.accept(letter) for letter in (*letters, letters[1]))
    _clock(monkeypatch, 0.1)
    with pytest.raises(InputError, match="too many states"):
        for _ in range(5000):
            greedy.fill(row)
            assert greedy.accept(rng.choice(letters))
    with pytest.raises(InputError, match="too many states"):
        patient.fill(row)


def test_a_row_of_another_size_or_type_is_refused(little: Model) -> None:
    matcher = little.grammar(regex="a").matcher()
    words = matcher.words
    for row in (
        torch.zeros(words + 1, dtype=torch.int32),
        torch.zeros(2 * words, dtype=torch.int32)[::2],
        torch.zeros(words, dtype=torch.int8),
    ):
        with pytest.raises(ValueError, match="words of int32 side by side"):
            matcher.fill(row)
