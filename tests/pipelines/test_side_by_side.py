"""Pipelines that are to be open at the same time are planned one beside the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from weftline.errors import PipelineError
from weftline.pipelines.graph import Pipeline
from weftline.pipelines.load import load_yaml
from weftline.pipelines.machine import Device, Machine
from weftline.pipelines.planning import make_plan
from weftline.pipelines.side_by_side import SideBySide

GIB = 1 << 30
MACHINE = Machine(2, 8 * GIB, (Device("cuda:0", 8 * GIB), Device("cuda:1", 8 * GIB)))


def taking(gib: int, device: str) -> Pipeline:
    step = f"{{node: echo, inputs: {{value: x}}, device: '{device}', device_bytes: {gib * GIB}}}"
    text = f"weftline: 1\nname: p\ninputs: {{x: text}}\nsteps: {{s: {step}}}\noutputs: {{y: s.value}}\n"
    return load_yaml(text, "p.yaml", Path())


def test_each_is_planned_for_what_those_before_it_leave() -> None:
    together = SideBySide(MACHINE)
    assert together.add(taking(4, "cuda"), "a") == make_plan(taking(4, "cuda"), MACHINE), "nobody was before it"
    with pytest.raises(PipelineError, match="a           another pipeline  claimed"):
        together.add(taking(3, "cuda"), "b")
    together.add(taking(3, "cuda:1"), "c")
    together.add(taking(1, "cuda"), "d")  # what was refused claims nothing
    with pytest.raises(PipelineError) as refused:
        together.add(taking(1, "cuda"), "e")
    assert refused.value.problems[0].fix.endswith("or unload a, d")
