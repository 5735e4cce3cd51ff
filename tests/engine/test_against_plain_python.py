"""Random pipelines of pure functions answer what plain Python calls of the same functions give.

A pipeline is drawn from a seed as a list of `Drawn` steps. It is built for the engine, and read by `Plain`, which knows
nothing of batches, workers or tickets: it calls what a wanted output needs, one call after the other. Conditions are
such that they can always be decided, and what can fail has a fallback that cannot, so there is one right answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.engine import plain_steps, reuse_steps
from weftline.engine.repository import Repository
from weftline.engine.request import RequestOptions
from weftline.engine.session import Session, Source
from weftline.errors import StepError
from weftline.nodes.detections import Detections
from weftline.nodes.urgency import SequencePart
from weftline.pipelines.spec.builder import Builder, constant
from weftline.pipelines.spec.wire import Wire

HERE = Path(__file__).parent

TAKES = {
    "mark": "a: text", "both": "a: text, b: text", "maybe": "a: text, b: text?", "picky": "a: text", "kind": "a: text",
    "together": "a: text", "parts": "a: text", "joined": "a: list", "signal": "a: text", "scaled": "x: numbers",
    "summary": "x: numbers",
}  # fmt: skip
GIVES = {"parts": "list", "signal": "numbers", "scaled": "numbers"}
FAILING = ("picky", "together")
LETTERS = "abcdefg"


@dataclass(frozen=True)
class Drawn:
    """One step. node: a function's name, 'first' or 'switch'. fallback: a step's name, or the constant."""

    name: str
    node: str
    reads: Mapping[str, str]  # by port; a wire as text, or 'constant'
    gives: str
    mapped: str = ""
    when: tuple[str, Sequence[str | None]] | None = None  # a wire, and what its value must be one of
    fallback: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)


class Draw:
    """Draws steps, each reading what is there by then; `steps` has stand-ins behind the steps they answer for."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.steps: dict[str, Drawn] = {}
        self.kinds = {"q": "text", "more": "text", "texts": "list"}  # of inputs and steps, by name
        self.outputs: list[str] = []
        self.shared: set[str] = set()  # steps that are fallbacks and outputs
        for place in range(self.rng.randint(4, 12)):
            self.step(f"s{place}")
        read = {wire for one in self.steps.values() for wire in [*one.reads.values(), *(one.when or ())[:1]]}
        stand_ins = {one.fallback for one in self.steps.values() if isinstance(one.fallback, str)}
        loose = [name for name in self.steps if name not in read | stand_ins]
        loose = [name for name in loose if name not in self.shared]
        self.outputs = loose + [name for name in self.kinds if name in read - self.shared and self.rng.random() < 0.3]
        self.outputs += [name for name in self.steps if name in self.shared and name not in loose]

    def step(self, name: str) -> None:
        node = self.rng.choice([*TAKES, *FAILING, "first", "switch", "switch"])
        if node in TAKES:
            drawn = self.function(name, node)
            if node in FAILING or self.rng.random() < 0.1:
                drawn = self.with_fallback(drawn)
        else:
            kind = self.rng.choice(["text", "text", "list"])
            reads = {"by": self.wire("text")} if node == "switch" else {}
            reads |= {port: self.wire(kind) for port in ("x", "y", "default")[: self.rng.randint(1, 3)]}
            drawn = Drawn(name, node, reads, kind, when=self.condition(0.1))
        self.steps[name] = drawn
        self.kinds[name] = drawn.gives

    def function(self, name: str, node: str) -> Drawn:
        reads, mapped, gives = {}, "", GIVES.get(node, "text")
        for taken in TAKES[node].split(", "):
            port, _, kind = taken.partition(": ")
            if kind.endswith("?") and self.rng.random() < 0.4:
                continue
            if kind.startswith("text") and not mapped and gives == "text" and self.rng.random() < 0.25:
                reads[port], mapped = self.wire("list"), port
            else:
                reads[port] = self.wire(kind.rstrip("?"))
        options = {"batch": {"items_max": self.rng.choice([1, 3, 16]), "wait_max_ms": self.rng.choice([0, 1])}}
        options |= {"worker": self.rng.choice("vw")} | ({"timeout_ms": 60_000} if self.rng.random() < 0.1 else {})
        options |= {"retry": 1} if self.rng.random() < 0.1 else {}
        return Drawn(name, node, reads, "list" if mapped else gives, mapped, self.condition(0.25), options=options)

    def with_fallback(self, one: Drawn) -> Drawn:
        constants: dict[str, Any] = {"text": "sorry", "list": ["so", "sorry"], "numbers": [1.0, 2.0]}
        draw = self.rng.random()
        if draw < 0.2:
            return Drawn(**vars(one) | {"fallback": "absent"})
        found = [name for name, kind in self.kinds.items() if kind == one.gives and name in self.steps]
        others = [name for name in found if self.steps[name].node in TAKES]
        if draw < 0.4 and others:  # a step that always runs where an output is wanted, and is read by an output
            shared = self.rng.choice(others)
            self.shared.add(shared)
            return Drawn(**vars(one) | {"fallback": shared})
        if one.gives != "text" or self.rng.random() < 0.4:
            return Drawn(**vars(one) | {"fallback": {"output": constants[one.gives]}})
        stand_in = Drawn(f"{one.name}_else", "mark", {"a": self.rng.choice(["q", "constant"])}, "text")
        if self.rng.random() < 0.5:
            stand_in = self.with_fallback(Drawn(**vars(stand_in) | {"node": "picky"}))
            stand_in = Drawn(**vars(stand_in) | {"fallback": stand_in.fallback or {"output": "sorry"}})
        self.steps[stand_in.name] = stand_in
        return Drawn(**vars(one) | {"fallback": stand_in.name})

    def condition(self, share: float) -> tuple[str, Sequence[str | None]] | None:
        if self.rng.random() > share:
            return None
        return self.wire("text"), self.rng.sample(["x", "y", "z", "", None, "(x)", "ab"], self.rng.randint(2, 5))

    def wire(self, kind: str) -> str:
        found = [name for name, one in self.kinds.items() if one == kind]
        if kind == "text" and self.rng.random() < 0.05:
            return "constant"
        if not found:  # numbers: no step returns any yet
            self.steps["numbers"] = Drawn("numbers", "signal", {"a": "q"}, "numbers")
            self.kinds["numbers"] = "numbers"
            return "numbers"
        return self.rng.choice(found[-5:])


ABSENT = object()


class NoAnswer(Exception):
    """A step has failed, and its fallback was skipped: the request fails."""


class Plain:
    """Answers one request by calling the functions."""

    def __init__(self, steps: Mapping[str, Drawn], inputs: Mapping[str, Any]) -> None:
        self._steps = steps
        self._known: dict[str, Any] = {"constant": "constant", **inputs}
        self.failed: set[str] = set()

    def value(self, name: str) -> Any:
        if name not in self._known:
            self._known[name] = self._run(self._steps[name])
        return self._known[name]

    def _run(self, one: Drawn) -> Any:
        if one.node == "switch":
            return self._chosen(one) if self._allowed(one) else ABSENT
        if one.node == "first":
            values = (self.value(wire) for wire in one.reads.values())
            return next((value for value in values if value is not ABSENT), ABSENT) if self._allowed(one) else ABSENT
        given = {port: self.value(wire) for port, wire in one.reads.items()}
        lacking = {port for port, value in given.items() if value is ABSENT}
        if lacking - {"b"} or (one.node == "both" and lacking) or one.mapped in lacking or not self._allowed(one):
            return ABSENT
        given = {port: value for port, value in given.items() if port not in lacking}
        try:
            if one.mapped:
                return [_call(one.node, {**given, one.mapped: element}) for element in given[one.mapped]]
            return _call(one.node, given)
        except ValueError:
            self.failed.add(one.name)
            if one.fallback == "absent":
                return ABSENT
            if isinstance(one.fallback, str):
                value = self.value(one.fallback)
                if value is ABSENT:
                    raise NoAnswer from None
                return value
            constant = one.fallback["output"]
            return np.array(constant, np.float32) if one.gives == "numbers" else constant

    def _chosen(self, one: Drawn) -> Any:
        by = self.value(one.reads["by"])
        case = by if by in ("x", "y") and by in one.reads else "default"
        return self.value(one.reads[case]) if by is not ABSENT and case in one.reads else ABSENT

    def _allowed(self, one: Drawn) -> bool:
        if one.when is None:
            return True
        found = self.value(one.when[0])
        return (None if found is ABSENT else found) in one.when[1]


def _call(name: str, given: Mapping[str, Any]) -> Any:
    function: Callable[..., Any] = getattr(plain_steps, name)
    if name == "together":
        return function([given["a"]])[0]
    return function(**given)


def built(drawn: Draw, share: bool = False) -> Builder:
    """Return the pipeline of drawn steps. share: its functions are shared with others, in processes of their own."""
    p = Builder("drawn", base_dir=HERE, limits={"arena_bytes": 8 << 20, "retry_share": 1.0})
    wires: dict[str, Wire] = {"constant": constant("constant")}
    for name, type in {"q": "text", "more": "text", "texts": "list[text]"}.items():
        if any(name in (*one.reads.values(), *(one.when or ())[:1]) for one in drawn.steps.values()):
            wires[name] = p.input(name, type, optional=name == "more")
    for one in drawn.steps.values():
        more: dict[str, Any] = dict(one.options)
        if one.node in TAKES:
            more |= {"function": f"plain_steps.py:{one.node}", "map": one.mapped or (), "fallback": one.fallback}
            more |= {"batched": True} if one.node == "together" else {}
            more |= {"share": True, "worker": None, "batch": {"items_max": 16, "wait_max_ms": 1}} if share else {}
        if one.when:
            seen = str(wires[one.when[0]]) if one.when[0] != "constant" else "'constant'"
            more["when"] = f"{seen} in {list(one.when[1])}".replace("None", "null")
        node = "function" if one.node in TAKES else one.node
        step = p.step(one.name, node, inputs={port: wires[wire] for port, wire in one.reads.items()}, **more)
        wires[one.name] = step.output if one.node in TAKES else step.value
    for name in drawn.outputs:
        p.output(name, wires[name])
    return p


def same(one: Any, other: Any) -> bool:
    if isinstance(other, np.ndarray):
        return isinstance(one, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    return bool(one == other)


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("seed", range(8))
def test_a_random_pipeline_answers_as_plain_calls_do(seed: int, start: Callable[[Source], Session]) -> None:
    drawn = Draw(seed)
    session = start(built(drawn))
    requests = _requests(session, drawn, Random(seed), 60)
    with ThreadPoolExecutor(12) as callers:
        results = list(callers.map(lambda one: _answer(session, *one), requests))
    _check(drawn, requests, results)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_two_pipelines_over_shared_nodes_answer_as_plain_calls_do(seed: int) -> None:
    draws = {"one": Draw(seed), "other": Draw(seed + 100)}
    with Repository() as pipelines:
        opened = dict(pipelines.load_together({name: built(drawn, share=True) for name, drawn in draws.items()}))
        assert opened == {"one": 1, "other": 1}
        sessions = {name: pipelines.get(name) for name in draws}
        one, other = ({*session.pids().values()} for session in sessions.values())
        assert one & other, "the two share processes"
        asked = {name: _requests(sessions[name], drawn, Random(seed), 60) for name, drawn in draws.items()}
        both = [(name, request) for at in range(60) for name, request in ((name, asked[name][at]) for name in draws)]
        with ThreadPoolExecutor(16) as callers:
            found = list(callers.map(lambda at: _answer(sessions[at[0]], *at[1]), both))
        for name, drawn in draws.items():
            _check(drawn, asked[name], [answer for at, answer in zip(both, found, strict=True) if at[0] == name])


def _requests(session: Session, drawn: Draw, rng: Random, count: int) -> list[tuple[dict[str, Any], list[str]]]:
    """Draw the inputs of requests and the outputs that each wants."""
    names = [given.name for given in session.plan.inputs if not given.hidden]

    def text() -> str:
        return rng.choice(["x", "y", "z", "", "".join(rng.choices(LETTERS, k=rng.randint(1, 9)))])

    requests = []
    for _ in range(count):
        inputs: dict[str, Any] = {"q": text(), "texts": [text() for _ in range(rng.randint(0, 4))]}
        inputs |= {"more": text()} if rng.random() < 0.5 else {}
        wanted = rng.sample(drawn.outputs, rng.randint(1, len(drawn.outputs)))
        requests.append(({name: value for name, value in inputs.items() if name in names}, wanted))
    return requests


def _check(drawn: Draw, requests: Sequence[tuple[dict[str, Any], list[str]]], results: Sequence[Any]) -> None:
    """Compare results with those of plain calls."""
    for (inputs, wanted), result in zip(requests, results, strict=True):
        plain = Plain(drawn.steps, {"more": ABSENT, **inputs})
        if isinstance(result, StepError):
            with pytest.raises(NoAnswer):
                [plain.value(name) for name in wanted]
            continue
        for name in wanted:
            value = plain.value(name)
            assert same(result[name], None if value is ABSENT else value), (name, inputs, built(drawn).to_yaml())
        ran = {timing.step for timing in result.timings if timing.outcome in ("ok", "failed")}
        failed = {timing.step for timing in result.timings if timing.outcome == "failed"}
        named = [one for one in drawn.steps.values() if isinstance(one.fallback, str)]
        owners = {one.fallback: one.name for one in named if one.fallback not in {"absent", *drawn.shared}}
        assert {owners[name] for name in ran & owners.keys()} <= failed, "a fallback runs only when its step has failed"


def _answer(session: Session, inputs: Mapping[str, Any], wanted: Sequence[str]) -> Any:
    try:
        return session.run(RequestOptions(outputs=wanted), **inputs)
    except StepError as error:
        return error


FUNCTIONS = (
    "Part", "Owned", "Weak", "Viewed", "Bytes", "common", "common_too", "same", "tail", "backwards", "Windows",
    "Mutated", "Raw", "Boxes",
)  # fmt: skip
"""Functions of reuse_steps, called item by item."""

IN_CHAIN = ("Part", "Owned", "Weak", "Viewed", "Bytes", "common", "common_too", "same", "tail", "Together", "Splits")
"""Those that others read, inside one worker."""


def reusing() -> Builder:
    """Return a pipeline of steps that use their memory again, alone, mapped and in chains; outputs name them."""
    p = Builder("reusing", base_dir=HERE, limits={"arena_bytes": 64 << 20})
    x, xs = p.input("x", "float32[N]"), p.input("xs", "list[float32[?]]")
    few = {"items_max": 3, "wait_max_ms": 1}

    def step(name: str, function: str, worker: str = "", **more: Any) -> Any:
        more |= {"batched": True} if function in ("Together", "Splits") else {}
        more |= {"worker": worker or "u"}
        return p.step(name, "function", function=f"reuse_steps.py:{function}", **more)

    for name in (*FUNCTIONS, "Together", "Splits"):
        batch = {"items_max": 16, "wait_max_ms": 2}
        p.output(f"alone_{name}", step(f"alone_{name}", name, x=x, batch=batch).output)
        p.output(f"map_{name}", step(f"map_{name}", name, x=xs, map="x", batch=few).output)
    for first, second in zip(IN_CHAIN, (*IN_CHAIN[1:], IN_CHAIN[0])):
        one = step(f"first_{first}", first, "v", x=x, batch=few)
        two = step(f"second_{first}_{second}", second, "v", x=one.output, batch={"items_max": 2})
        p.output(f"chain_{first}_{second}", two.output)
        if first in ("Owned", "tail"):
            p.output(f"chain_{first}", one.output)
    both = step("pair", "Pair", x=x, batch={"items_max": 16, "wait_max_ms": 2})
    p.output("pair_whole", both.whole)
    p.output("pair_most", both.most)
    for node in ("Rows", "Lazy", "Settles", "Flows"):
        more = {} if node == "Flows" else {"batch": {"items_max": 16, "wait_max_ms": 2}}
        p.output(f"node_{node}", p.step(f"node_{node}", f"reuse_steps.py:{node}", x=x, worker="nodes", **more).output)
    return p


def plainly(output: str, inputs: Mapping[str, Any]) -> Any:
    """Return what new instances of an output's functions answer in plain Python."""

    def call(name: str, x: np.ndarray) -> Any:
        function = getattr(reuse_steps, name)
        function = function() if isinstance(function, type) else function
        if name in ("Together", "Splits"):
            return function([x])[0]
        answer = function(x)
        return bytes(answer) if name == "Raw" else np.array(answer) if isinstance(answer, np.ndarray) else answer

    mode, *names = output.replace("common_too", "commontoo").split("_")
    names = [name.replace("commontoo", "common_too") for name in names]
    x = inputs["x"]
    if mode == "map":
        return [call(names[0], one) for one in inputs["xs"]]
    if mode == "pair":
        return np.array(x * 2 if names == ["whole"] else (x * 2)[1:])
    if mode == "node":
        return np.full(3, x.sum(), np.float32) if names == ["Rows"] else x * 2
    for name in names:
        x = call(name, np.array(x))
    return x


def alike(one: Any, other: Any) -> bool:
    if isinstance(other, list):
        return isinstance(one, list) and len(one) == len(other) and all(map(alike, one, other))
    if isinstance(other, Detections):
        return bool(np.array_equal(one.boxes, other.boxes) and np.array_equal(one.scores, other.scores))
    return same(one, other)


def requests_of(seed: int, count: int) -> list[dict[str, Any]]:
    """Return inputs whose every number tells the request: some travel inside messages, some in shared memory."""
    rng = Random(seed)

    def numbers(value: int) -> np.ndarray:
        size = rng.choice([4, 40, 5000, 5000, 7000])
        return np.arange(size, dtype=np.float32) % 7 + np.float32(value)

    return [
        {"x": numbers(10 * at), "xs": [numbers(10_000 + 10 * at + place) for place in range(rng.randint(0, 5))]}
        for at in range(count)
    ]


@pytest.mark.slow
def test_steps_that_use_their_memory_again_answer_as_plain_calls_do(start: Callable[[Source], Session]) -> None:
    session = start(reusing())
    requests = requests_of(1, 32)
    with ThreadPoolExecutor(16) as callers:
        results = list(callers.map(lambda inputs: session.run(**inputs), requests))
    wrong: dict[str, int] = {}
    for inputs, result in zip(requests, results):
        for name in result:
            if not alike(result[name], plainly(name, inputs)):
                wrong[name] = wrong.get(name, 0) + 1
    assert wrong == {}
    answers = session.run_together(requests)  # as the blocks of a job
    for inputs, answer in zip(requests, answers):
        assert not isinstance(answer, Exception)
        for name in answer:
            if not alike(answer[name], plainly(name, inputs)):
                wrong[name] = wrong.get(name, 0) + 1
    assert wrong == {}


@pytest.mark.slow
def test_state_of_a_sequence_is_kept_apart_and_unchanged(
    start: Callable[[Source], Session],
) -> None:
    p = Builder("keeping", base_dir=HERE, limits={"arena_bytes": 4 << 20})
    x = p.input("x", "float32[N]")
    batch = {"items_max": 8, "wait_max_ms": 2}
    before = p.step("before", "function", function="reuse_steps.py:Before", x=x, sequence={}, batch=batch)
    p.output("before", before.output)
    p.output("count", p.step("count", "reuse_steps.py:Counted", x=x, sequence={}, batch=batch).output)
    session = start(p)

    def talk(caller: int) -> list[tuple[float, int]]:
        found = []
        for at in range(8):
            part = SequencePart(f"s{caller}", start=at == 0, end=at == 7)
            answer = session.run(RequestOptions(sequence=part), x=np.full(8000, 100 * caller + at, np.float32))
            (value,) = set(answer["before"].tolist())
            found.append((value, answer["count"]))
        return found

    with ThreadPoolExecutor(8) as callers:
        for caller, found in enumerate(callers.map(talk, range(8))):
            assert found == [(100 * caller + max(at - 1, 0), at + 1) for at in range(8)]
