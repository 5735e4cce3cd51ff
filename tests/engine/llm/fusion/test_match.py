"""What a module's code does beyond a pattern is seen in the names it uses, even where no probe would show it."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaModel

from tests.engine.llm.fusion.test_fuse import build
from weftline.engine.llm.fusion import match as fuse_match
from weftline.engine.llm.fusion.fuse import fuse
from weftline.engine.llm.fusion.match import names_used, unknown_children, unknown_names


def test_what_only_shows_in_large_numbers_keeps_a_module_from_being_fused() -> None:
    model = build("Olmo", {"clip_qkv": 1e6})  # no query of the probe is as large
    report = fuse(model)
    assert "attention" not in report.counts
    assert {left.reason for left in report.left if left.pattern == "attention"} == {
        "its code also uses clamp_, clip_qkv"
    }


def test_llamas_code_is_within_every_pattern() -> None:
    for kind, known in (
        (LlamaAttention, fuse_match.ATTENTION), (LlamaMLP, fuse_match.MLP), (LlamaDecoderLayer, fuse_match.LAYER),
        (LlamaModel, fuse_match.MODEL),
    ):  # fmt: skip
        assert names_used(kind.forward) <= known


def test_names_are_attributes_calls_and_what_getattr_asks_for() -> None:
    def forward(self: Any, given: torch.Tensor) -> torch.Tensor:
        if getattr(self.config, "scaled", None):
            given = given * self.factor
        return torch.relu(float(given))  # type: ignore[arg-type]

    assert names_used(forward) == {"getattr", "config", "scaled", "factor", "relu", "float"}
    assert names_used(torch.relu) == frozenset()


def test_replaced_forwards_and_unknown_children_are_reported() -> None:
    module = torch.nn.Module()
    assert unknown_names(module, frozenset()) is not None
    module.forward = lambda given: given  # type: ignore[method-assign, assignment]
    assert unknown_names(module, frozenset()) == "its forward has been replaced"
    module.gate, module.sinks = torch.nn.Linear(2, 2), torch.nn.Parameter(torch.zeros(2))
    assert unknown_children(module, frozenset({"gate"})) == "it also has sinks"
    assert unknown_children(module, frozenset({"gate", "sinks"})) is None
