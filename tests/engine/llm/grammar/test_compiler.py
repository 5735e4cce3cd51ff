"""Grammar compilation beside the rounds: valid ones once, hostile ones within bounds, no request waits for others."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.engine.llm import tiny
from weftline.engine.llm.grammar import compiler as grammar_module
from weftline.engine.llm.grammar.compiler import Constraint, GrammarCompiler, Pending, _without_token_ids
from weftline.engine.llm.grammar.sandbox import TrialProcess
from weftline.errors import InputError, LimitReached, MissingPackage, ModelError, SessionClosed, WeftlineError

WORDS = tiny.tokenizer()
END = int(WORDS.eos_token_id)
WAIT_S = 60.0


class Counted(TrialProcess):
    """Counts the trials, and lets them wait for `gate`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.trials = 0
        self.gate = threading.Event()
        self.gate.set()

    def wait_trial(self, grammar: str) -> str:
        self.gate.wait(WAIT_S)
        self.trials += 1
        return super().wait_trial(grammar)


def compiler_with(trials: TrialProcess | None = None, **options: Any) -> GrammarCompiler:
    return GrammarCompiler(WORDS, len(WORDS) + 5, frozenset({END}), trials=trials, **options)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = compiler_with()
    yield made
    made.close()


@pytest.fixture
def counted() -> Iterator[tuple[GrammarCompiler, Counted]]:
    trials = Counted()
    made = compiler_with(trials, cache_max=3)
    yield made, trials
    trials.gate.set()
    made.close()


def outcome(pending: Pending) -> str:
    """Wait, and return what was wrong; empty for nothing."""
    assert pending.wait(WAIT_S)
    try:
        pending.result().matcher()
    except WeftlineError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "weftline-grammars"]


def test_a_grammar_of_gbnf_is_that_of_lark(compiler: GrammarCompiler) -> None:
    gbnf = compiler.submit(Constraint("grammar", 'root ::= "yes" | number\nnumber ::= [0-9]+ # digits\n'))
    assert gbnf.wait(WAIT_S)
    for text, fits in (("yes", True), ("42", True), ("no", False)):
        matcher = gbnf.result().matcher()
        assert all(matcher.accept(token) for token in WORDS.encode(text, add_special_tokens=False)) == fits


def test_nothing_is_started_before_the_first_constraint() -> None:
    before = len(threads())
    trials = TrialProcess()
    made = compiler_with(trials)
    assert len(threads()) == before
    assert trials._process is None and made._vocabulary is None
    made.close()


def test_submitting_does_not_wait_and_the_result_comes_later(counted: tuple[GrammarCompiler, Counted]) -> None:
    compiler, trials = counted
    trials.gate.clear()
    pending = compiler.submit(Constraint("regex", "[0-9]+"))
    assert not pending.ready
    assert not pending.wait(0.01)
    with pytest.raises(RuntimeError, match="not ready"):
        pending.result()
    trials.gate.set()
    assert outcome(pending) == ""
    assert pending.ready
    assert pending.result() is pending.result()


def test_a_known_constraint_is_not_prepared_again(counted: tuple[GrammarCompiler, Counted]) -> None:
    compiler, trials = counted
    first = compiler.submit(Constraint.read({"choice": ["yes", "no"]}))
    assert outcome(first) == ""
    assert compiler.submit(Constraint.read({"choice": ["yes", "no"]})) is first
    assert trials.trials == 1


def test_the_time_of_a_constraint_does_not_depend_on_other_callers(counted: tuple[GrammarCompiler, Counted]) -> None:
    compiler, trials = counted
    wanted = Constraint.read({"regex": "secret plan [0-9]"})
    first = compiler.submit(wanted, b"alice")
    assert outcome(first) == "" and trials.trials == 1
    other = compiler.submit(wanted, b"mallory")
    assert other is not first and outcome(other) == "" and trials.trials == 2
    assert compiler.submit(wanted, b"alice") is first and compiler.submit(wanted, b"mallory") is other


def test_a_refused_constraint_is_refused_again_at_once(counted: tuple[GrammarCompiler, Counted]) -> None:
    compiler, trials = counted
    bad = Constraint("regex", "(a")
    assert outcome(compiler.submit(bad)) == "InputError: sampling: the constraint: unclosed group"
    again = compiler.submit(bad)
    assert again.ready and outcome(again).startswith("InputError")
    with pytest.raises(InputError) as first:
        again.result()
    with pytest.raises(InputError) as second:
        again.result()
    assert first.value is not second.value  # each caller's has its own frames
    assert trials.trials == 1


def test_the_least_recently_used_one_is_forgotten_first(counted: tuple[GrammarCompiler, Counted]) -> None:
    compiler, trials = counted
    for pattern in ("a", "b", "c", "a", "d"):  # three are kept: b goes
        assert outcome(compiler.submit(Constraint("regex", pattern))) == ""
    assert trials.trials == 4
    for pattern in ("a", "c", "d"):
        assert outcome(compiler.submit(Constraint("regex", pattern))) == ""
    assert trials.trials == 4
    assert outcome(compiler.submit(Constraint("regex", "b"))) == ""
    assert trials.trials == 5
    assert len(compiler._known) == 3


@pytest.mark.slow
def test_what_failed_for_a_passing_reason_is_tried_again() -> None:
    broken = Counted(command=("-c", "raise SystemExit"))
    compiler = compiler_with(broken)
    assert outcome(compiler.submit(Constraint("regex", "a"))).startswith("LimitReached: no process can be started")
    broken._command = TrialProcess()._command
    assert outcome(compiler.submit(Constraint("regex", "a"))) == ""
    compiler.close()


@pytest.mark.parametrize("error", [LimitReached("full", 2.5), MissingPackage("llguidance", "llm"), InputError("wrong")])
def test_a_failure_is_raised_as_it_is_for_each_who_asks(error: WeftlineError) -> None:
    pending = Pending()
    pending.finish(error)
    pending.finish(InputError("later"))
    for _ in range(2):
        with pytest.raises(type(error)) as raised:
            pending.result()
        assert raised.value is not error
        assert str(raised.value) == str(error) and raised.value.retry_after_s == error.retry_after_s


def test_more_than_may_wait_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "WAITING_MAX", 3)
    trials = Counted()
    compiler = compiler_with(trials)
    trials.gate.clear()
    sent: list[Pending] = []
    with pytest.raises(LimitReached, match="3 constraints wait to be prepared") as raised:
        for number in range(6):  # one may be in the thread's hands
            sent.append(compiler.submit(Constraint("regex", f"a{number}")))
    assert raised.value.retry_after_s > 0
    assert 3 <= len(sent) <= 4
    trials.gate.set()
    assert [outcome(pending) for pending in sent] == [""] * len(sent)
    compiler.close()


def test_callers_in_many_threads_share_one_preparation(counted: tuple[GrammarCompiler, Counted]) -> None:
    compiler, trials = counted
    found: list[Pending] = []
    callers = [
        threading.Thread(target=lambda: found.append(compiler.submit(Constraint("regex", "[a-z]{3}"))))
        for _ in range(8)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(set(map(id, found))) == 1
    assert outcome(found[0]) == ""
    assert trials.trials == 1


@pytest.mark.slow
def test_one_that_hangs_is_refused_and_those_behind_it_are_served() -> None:
    stand_in = (
        "import sys, json\n"
        'print(\'{"error": ""}\', flush=True)\n'
        "for line in sys.stdin:\n"
        "    while 'hang' in line: pass\n"
        '    print(\'{"error": ""}\', flush=True)\n'
    )
    compiler = compiler_with(TrialProcess(trial_max_ms=1000.0, command=("-c", stand_in)))
    sent = [compiler.submit(Constraint("regex", pattern)) for pattern in ("one", "hang", "two")]
    first, second, third = map(outcome, sent)
    assert first == third == ""
    assert "not prepared after 1000 ms, the limit; simplify it" in second
    compiler.close()


def test_close_ends_thread_and_process_and_tells_those_who_wait() -> None:
    trials = Counted()
    compiler = compiler_with(trials)
    assert outcome(compiler.submit(Constraint("regex", "a"))) == ""
    process = trials._process
    assert process is not None
    ready = compiler.submit(Constraint("regex", "a"))
    trials.gate.clear()
    waiting = [compiler.submit(Constraint("regex", pattern)) for pattern in ("b", "c", "d")]
    threading.Timer(0.2, trials.gate.set).start()
    compiler.close()
    assert all(outcome(pending).startswith("SessionClosed") for pending in waiting)
    assert process.returncode is not None
    assert compiler._thread is not None and not compiler._thread.is_alive()
    assert ready.result().matcher().accept(WORDS.encode("a")[0])  # what is prepared stays usable
    with pytest.raises(SessionClosed):
        compiler.submit(Constraint("regex", "e"))
    compiler.close()


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"properties": {"a": schema}}
    return schema


def doubling(levels: int) -> dict[str, Any]:
    """A schema of a few hundred bytes whose written-out form has 2^levels parts."""
    parts: dict[str, Any] = {
        f"a{level}": {"type": "object", "properties": {name: {"$ref": f"#/$defs/a{level + 1}"} for name in "xy"}}
        for level in range(levels)
    }
    return {"$ref": "#/$defs/a0", "$defs": {**parts, f"a{levels}": {"type": "integer"}}}


LONG_CHAIN = (
    "".join(f"r{at} ::= r{at + 1}\n" for at in range(2500)) + 'r2500 ::= "a"\nw ::= ' + "." * 20_000 + " root\n"
)

HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"regex": "(a+)+$"}, ""),
    ({"regex": "((a+)+)+b"}, ""),
    ({"regex": "(x{1,100000}){1,100000}"}, ""),
    ({"regex": "((x{1,1000}){1,1000}){1,1000}"}, ""),
    ({"regex": ".*a.{200}"}, ""),
    ({"regex": "(" * 1900 + "a" + ")" * 1900}, "nested parentheses"),
    ({"regex": "|".join(f".*word{number}.*" for number in range(300))}, ""),
    ({"regex": r"(\p{L}|\p{N}){1,500}\p{Lu}{3,2000}"}, ""),
    ({"regex": r"[^\p{L}]{1,3000}[\p{Han}--\p{L}]{2000}"}, "any"),
    ({"regex": "a{1000000000}"}, "any"),
    ({"regex": "a{99999999999}"}, "any"),
    ({"regex": r"(a)\1"}, "backreferences are not supported"),
    ({"regex": "(?<=a)b"}, "look-around"),
    ({"regex": "[z-a]"}, "invalid character class range"),
    ({"json_schema": deep(31)}, ""),
    ({"json_schema": doubling(30)}, ""),
    ({"json_schema": {"$ref": "#"}}, "no text satisfies it"),
    ({"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "no text satisfies it"),
    ({"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}] * 2}}}}, "circular"),
    ({"json_schema": {"enum": [f"value number {number}" for number in range(2500)]}}, ""),
    ({"json_schema": {"properties": {f"p{number}": {"type": "integer"} for number in range(2000)}}}, "any"),
    (
        {
            "json_schema": {
                "allOf": [
                    {"anyOf": [{"properties": {f"{side}{number}": {"type": "null"}}} for side in "pq"]}
                    for number in range(30)
                ]
            }
        },
        "too large",
    ),
    ({"json_schema": {"type": "string", "pattern": "^(x{1,1000}){1,1000}$"}}, ""),
    ({"json_schema": {"type": "string", "pattern": "(a*)*" * 500}}, "any"),
    ({"json_schema": {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000}}, ""),
    ({"json_schema": {"type": "array", "items": {"type": "integer"}, "maxItems": 10**18}}, "any"),
    ({"json_schema": {"type": "string", "minLength": 10**6, "maxLength": 10**7}}, "any"),
    ({"json_schema": {"type": "object", "minProperties": 10**6}}, "any"),
    ({"json_schema": {"type": "integer", "multipleOf": 9973, "minimum": 3}}, "any"),
    ({"json_schema": {"type": "number", "minimum": -1e300, "maximum": 1.2345678901234e300}}, "any"),
    ({"json_schema": {"$ref": "http://127.0.0.1:9/x.json"}}, "does not fetch"),
    ({"json_schema": {"$ref": "file:///etc/passwd"}}, "does not fetch"),
    ({"json_schema": {"type": "strange"}}, "Invalid type: strange"),
    ({"json_schema": {"not": {"type": "string"}}}, "not"),
    ({"json_schema": {"not": {"type": "string"}, "x-guidance": {"lenient": True}}}, "not"),
    ({"grammar": 'start: start "a" | "a"\n'}, ""),
    ({"grammar": 'start: e\ne: e e | "a" |\n'}, ""),
    ({"grammar": "start: a\na: b\nb: a\n"}, "no text satisfies it"),
    ({"grammar": "start: nothing\n"}, 'unknown name: "nothing"'),
    ({"grammar": "start: A\nA: A\n"}, "any"),
    ({"grammar": "start: " + " ".join(["a?"] * 5000) + '\na: "x" | "xx"\n'}, "any"),
    ({"grammar": 'start: (("a"{1,1000}){1,1000}){1,1000}\n'}, "any"),
    ({"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000}, "too deeply nested"),
    ({"grammar": "start: " + "[" * 30_000}, "any"),
    ({"grammar": 'start: %json {"$ref": "#"}'}, "no text satisfies it"),
    ({"grammar": "start: %json " + json.dumps(deep(100))}, "any"),
    ({"grammar": '{"grammars": [{"lark_grammar": "start: \\"a\\""}]}'}, "expecting rule"),
    ({"grammar": 'root ::= "a"'}, ""),
    ({"grammar": "root ::= other"}, "Rule 'other' not found"),
    ({"grammar": "root ::= " + "(" * 30_000}, "any"),
    ({"grammar": 'root ::= ("a"{1,9}){1,99999}'}, "any"),
    ({"grammar": "root ::= r0\n" + LONG_CHAIN}, "not prepared after"),
    ({"grammar": "\n" * 60_000}, "any"),
    ({"grammar": "%import common.NUMBER\nstart: NUMBER"}, ""),
    ({"grammar": '%import "/etc/passwd"\nstart: "a"'}, "any"),
    ({"grammar": 'start: part "b"\npart[stop="x"]: /.*/\n'}, "leave out max_tokens and stop"),
    ({"grammar": 'start: <|im_end|> "a"'}, "names a control token"),
    ({"grammar": "start: <[0-2]>"}, "no token of this model can go on"),
    ({"choice": [f"{number} choice" for number in range(1024)]}, ""),
    ({"choice": ["a" * 60, "\u4e00" * 60] * 200}, ""),
]


@pytest.mark.slow(but_first=8)
@pytest.mark.parametrize(("wanted", "expected"), HOSTILE, ids=lambda value: str(value)[:45].replace("\n", " "))
def test_hostile_constraints_are_prepared_or_refused_in_bounded_time(
    compiler: GrammarCompiler, wanted: dict[str, Any], expected: str
) -> None:
    began = time.monotonic()
    found = outcome(compiler.submit(Constraint.read(wanted)))
    assert time.monotonic() - began < 10  # seen: 0.2
    if expected == "":
        assert found == ""
    elif expected == "any":
        assert found == "" or found.startswith("InputError: sampling")
    else:
        assert found.startswith("InputError: sampling") and expected in found
    assert len(found) < 400
    shown = "".join(map(str, wanted.values()))
    for forbidden in ("Traceback", ".rs", "/home", "/srv", "site-packages", str(Path.cwd()), "\n", "non-verbose"):
        assert forbidden not in found
    assert all(path in shown for path in re.findall(r"/(?:etc|tmp|usr|proc)[/\w]*", found))


@pytest.mark.parametrize("text", ['start: "<[1]>"', 'start: "a <[1]> b" // "', 'start: %json {"const": "<[1]>"}'])
def test_a_text_that_looks_like_a_token_id_stays_a_text(compiler: GrammarCompiler, text: str) -> None:
    assert _without_token_ids(Constraint("grammar", text)).value == text
    assert "unknown name" not in outcome(compiler.submit(Constraint("grammar", text)))


def test_after_all_that_others_are_served(compiler: GrammarCompiler) -> None:
    grammar = compiler.submit(Constraint("regex", "ab"))
    assert outcome(grammar) == ""
    matcher = grammar.result().matcher()
    assert all(matcher.accept(token) for token in (*WORDS.encode("a"), *WORDS.encode("b"), END))


def test_random_text_is_a_constraint_or_an_input_error(compiler: GrammarCompiler) -> None:
    noise = torch.Generator().manual_seed(7)
    pieces = ["(", ")", "[", "]", "{", "}", "1,9", "|", "*", "+", "?", "\\", "d", "p{L}", "a", "/", '"', "\n", ":", "é"]
    pieces += [
        "start: ",
        "%json ",
        "%ignore ",
        "%regex ",
        "%llguidance ",
        "<[1]>",
        "<|x|>",
        "~",
        "&",
        "..",
        "@",
        "#",
        "{}",
    ]
    for number in range(150):
        places = torch.randint(len(pieces), (12,), generator=noise)
        text = "".join(pieces[int(place)] for place in places)
        kind = "regex" if number % 2 else "grammar"
        try:
            constraint = Constraint(kind, text if kind == "regex" else f"start: a\na: {text}")
        except InputError:
            continue
        found = outcome(compiler.submit(constraint))
        assert found == "" or found.startswith("InputError: sampling"), (text, found)
        assert "cannot be prepared" not in found, (text, found)


@pytest.mark.parametrize("ends", [frozenset(), frozenset({9999})])
def test_a_model_without_an_end_cannot_be_constrained(ends: frozenset[int]) -> None:
    compiler = GrammarCompiler(WORDS, len(WORDS), ends)
    assert "ModelError: structured output: the model has no end-of-text token" in outcome(
        compiler.submit(Constraint("regex", "a"))
    )
    compiler.close()


def test_a_tokenizer_that_cannot_be_constrained_is_the_models_mistake() -> None:
    long = Tokenizer(models.BPE({"a": 0, "<end>": 1, "b" * 3000: 2}, []))
    long.decoder = decoders.ByteLevel()
    compiler = GrammarCompiler(PreTrainedTokenizerFast(tokenizer_object=long), 3, frozenset({1}))
    for _ in range(2):
        pending = compiler.submit(Constraint("regex", "a"))
        assert outcome(pending).startswith("ModelError: structured output: the model's tokenizer cannot be used")
    with pytest.raises(ModelError):
        pending.result()
    compiler.close()


def test_logits_narrower_than_the_tokenizer_are_no_obstacle() -> None:
    compiler = GrammarCompiler(WORDS, 200, frozenset({END, 63}))
    pending = compiler.submit(Constraint("regex", "[a-z]+"))
    assert outcome(pending) == ""
    matcher = pending.result().matcher()
    row = torch.zeros(matcher.words, dtype=torch.int32)
    matcher.fill(row)
    allowed = [token for token in range(32 * matcher.words) if int(row[token // 32]) >> (token % 32) & 1]
    assert allowed and max(allowed) < 200
    assert matcher.accept(allowed[0])
    matcher.fill(row)
    assert all(int(row[end // 32]) >> (end % 32) & 1 for end in (END, 63))  # a model may have several ends
    compiler.close()
