"""Launches that write, norm and gate: what is refused."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

from weftline.engine.llm.kernels.rotate import rotate_launch
from weftline.engine.llm.kernels.rows import add_norm_launch, gate_launch, norm_launch
from weftline.engine.llm.kernels.write_pages import write_launch

GIVEN = {
    "key": torch.empty(5, 2, 64),
    "value": torch.empty(5, 2, 64),
    "keys": torch.empty(2, 80, 64),
    "values": torch.empty(2, 80, 64),
    "slots": torch.zeros(5, dtype=torch.int64),
}
TURNS = {"query": torch.empty(5, 4, 64), "cos": torch.empty(5, 64), "sin": torch.empty(5, 64)}


@pytest.mark.parametrize(
    ("name", "wrong", "says"),
    [
        ("value", torch.empty(5, 3, 64), "value: wants"),
        ("keys", torch.empty(3, 80, 64), "keys: wants [2, slots, 64]"),
        ("values", torch.empty(2, 80, 32), "values: wants width 64"),
        ("values", torch.empty(2, 80, 64, dtype=torch.float16), "keys, values: torch.float32, torch.float16"),
        ("slots", torch.zeros(5, dtype=torch.int32), "slots: wants int64 [5]"),
        ("slots", torch.zeros(4, dtype=torch.int64), "slots: wants int64 [5]"),
        ("key_scale", torch.ones(1), "both or none"),
    ],
)
def test_wrong_shapes_are_refused(name: str, wrong: object, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        write_launch(**{**GIVEN, name: wrong})


def test_only_float8_pages_have_scales() -> None:
    with pytest.raises(ValueError, match="only float8 pages have scales"):
        write_launch(**GIVEN, key_scale=torch.ones(1), value_scale=torch.ones(1))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"cos": torch.empty(5, 80), "sin": torch.empty(5, 80)}, "at most 64"),
        ({"cos": torch.empty(5, 33), "sin": torch.empty(5, 33)}, "even width"),
        ({"cos": torch.empty(5, 32)}, "cos, sin: want"),
        ({"query": torch.empty(5, 4, 32)}, "key: wants"),
        ({"query": torch.empty(5, 4, 64, dtype=torch.float16)}, "query: wants"),
    ],
)
def test_wrong_rotations_are_refused(wrong: dict[str, torch.Tensor], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        rotate_launch(**{**GIVEN, **TURNS, **wrong})


def test_wrong_norms_and_gates_are_refused() -> None:
    x, weight = torch.empty(3, 8), torch.empty(8)
    for given, says in (
        ((x[0], weight), "x: wants"),
        ((x, weight[:4]), "weight: wants"),
        ((x, weight.half()), "weight"),
    ):
        with pytest.raises(ValueError, match=says):
            norm_launch(*given, 1e-6)
    with pytest.raises(ValueError, match="residual: wants"):
        add_norm_launch(x, x[:2], weight, 1e-6)
    with pytest.raises(ValueError, match="merged: wants"):
        gate_launch(torch.empty(3, 7))
