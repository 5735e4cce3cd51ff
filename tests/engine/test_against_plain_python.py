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

from tests.engine import plain_steps
from weftline.engine.session import Session, Source
from weftline.pipelines.builder import Builder, constant
from weftline.pipelines.wire import Wire

HERE = Path(__file__).parent

TAKES = {
    "mark": "a: text", "both": "a: text, b: text", "maybe": "a: text, b: text?", "picky": "a: text", "kind": "a: text",
    "together": "a: text", "parts": "a: text", "joined": "a: list", "signal": "a: text", "scaled": "x: numbers",
    "told": "x: numbers",
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
        for place in range(self.rng.randint(4, 12)):
            self.step(f"s{place}")
        read = {wire for one in self.steps.values() for wire in [*one.reads.values(), *(one.when or ())[:1]]}
        stand_ins = {one.fallback for one in self.steps.values() if isinstance(one.fallback, str)}
        loose = [name for name in self.steps if name not in read | stand_ins]
        self.outputs = loose + [name for name in self.kinds if name in read and self.rng.random() < 0.3]

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
        if not found:  # numbers: nobody has given any yet
            self.steps["numbers"] = Drawn("numbers", "signal", {"a": "q"}, "numbers")
            self.kinds["numbers"] = "numbers"
            return "numbers"
        return self.rng.choice(found[-5:])


ABSENT = object()


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
            if isinstance(one.fallback, str):
                return self.value(one.fallback)
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


def built(drawn: Draw) -> Builder:
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


@pytest.mark.parametrize("seed", range(8))
def test_a_random_pipeline_answers_as_plain_calls_do(seed: int, start: Callable[[Source], Session]) -> None:
    drawn = Draw(seed)
    pipeline = built(drawn)
    session, rng = start(pipeline), Random(seed)
    names = [given.name for given in session.plan.inputs if not given.hidden]

    def text() -> str:
        return rng.choice(["x", "y", "z", "", "".join(rng.choices(LETTERS, k=rng.randint(1, 9)))])

    requests = []
    for _ in range(60):
        inputs: dict[str, Any] = {"q": text(), "texts": [text() for _ in range(rng.randint(0, 4))]}
        inputs |= {"more": text()} if rng.random() < 0.5 else {}
        wanted = rng.sample(drawn.outputs, rng.randint(1, len(drawn.outputs)))
        requests.append(({name: value for name, value in inputs.items() if name in names}, wanted))
    with ThreadPoolExecutor(12) as callers:
        results = list(callers.map(lambda one: session.run(outputs=one[1], **one[0]), requests))
    for (inputs, wanted), result in zip(requests, results):
        plain = Plain(drawn.steps, {"more": ABSENT, **inputs})
        for name in wanted:
            value = plain.value(name)
            assert same(result[name], None if value is ABSENT else value), (seed, name, inputs, pipeline.to_yaml())
        ran = {timing.step for timing in result.timings if timing.outcome in ("ok", "failed")}
        failed = {timing.step for timing in result.timings if timing.outcome == "failed"}
        owners = {one.fallback: one.name for one in drawn.steps.values() if isinstance(one.fallback, str)}
        assert {owners[name] for name in ran & owners.keys()} <= failed, "a fallback runs only when its step has failed"
