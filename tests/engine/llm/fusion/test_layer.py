"""Rotary embeddings looked up are those computed; a lean stack leaves calls that ask for more to the model's code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.engine.llm.fusion.test_fuse import build, logits
from weftline.engine.llm.fusion import layer as fuse_layer
from weftline.engine.llm.fusion.fuse import fuse
from weftline.engine.llm.fusion.layer import RotaryTable


class Counted(torch.nn.Module):
    def __init__(self, rope: dict[str, Any]) -> None:
        super().__init__()
        config = LlamaConfig(
            hidden_size=64, num_attention_heads=4, max_position_embeddings=8192,
            rope_parameters={"rope_theta": 1e4, **rope},
        )  # fmt: skip
        self.inner = LlamaRotaryEmbedding(config)
        self.rope_type, self.inv_freq, self.calls = self.inner.rope_type, self.inner.inv_freq, 0

    def forward(self, like: torch.Tensor, places: torch.Tensor) -> Any:
        self.calls += 1
        return self.inner(like, places)


ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 256},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 256},
]  # fmt: skip


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_embeddings_of_places_are_those_of_the_model(rope: dict[str, Any], dtype: torch.dtype) -> None:
    module, like = Counted(rope), torch.zeros(1, dtype=dtype)
    turns = RotaryTable(module)
    for places in ([0, 1, 2], [5, 250, 3], [7], [300, 12, 4000], [4000]):
        asked = torch.tensor([places])
        cos, sin = turns.at(asked, like)
        wanted = module.inner(like, asked)
        assert torch.equal(cos, wanted[0][0]) and torch.equal(sin, wanted[1][0])
    steady = rope["rope_type"] != "dynamic"
    assert module.calls == (2 if steady else 5)  # to 256 places, then to 4096


@torch.inference_mode()
def test_places_beyond_the_table_are_computed_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse_layer, "TABLE_BYTES", 40_000)  # 256 places are 32 kB
    module, like = Counted({"rope_type": "default"}), torch.zeros(1)
    turns = RotaryTable(module)
    for places in ([200], [201], [300], [301]):
        asked = torch.tensor([places])
        assert torch.equal(turns.at(asked, like)[0], module.inner(like, asked)[0][0])
    assert module.calls == 3


@torch.inference_mode()
def test_a_call_that_asks_for_more_gets_it_from_the_models_own_code() -> None:
    model = build("Llama", {})
    fuse(model)
    ids = torch.arange(6)[None]
    from weftline.engine.llm.fusion.probe import ProbeForm, probing

    with probing(model, ProbeForm()):
        plain = model.model(input_ids=ids, position_ids=ids, use_cache=False)
        embedded = model.model(inputs_embeds=model.model.embed_tokens(ids), position_ids=ids, use_cache=False)
        without = model.model(input_ids=ids, use_cache=False)
        every = model.model(input_ids=ids, position_ids=ids, use_cache=False, output_hidden_states=True)
    for other in (embedded, without, every):
        torch.testing.assert_close(other.last_hidden_state, plain.last_hidden_state, rtol=1e-4, atol=1e-4)
    assert len(every.hidden_states) == 4


@torch.inference_mode()
def test_a_lean_layer_leaves_its_input_as_it_was() -> None:
    model = build("Llama", {})
    before = logits(model)
    fuse(model)
    assert torch.allclose(logits(model), before, atol=1e-4)
    assert torch.equal(logits(model), logits(model))
