"""Families of models answer as transformers' generate does, and those that cannot be paged are refused when opened.

The full run, with 200 prompts of each family, is `python -m tests.engine.llm.coverage`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tests.engine.llm import coverage, tiny
from weftline.engine.llm import attention
from weftline.engine.llm.model_loader import RunnerOptions
from weftline.engine.llm.runner import Runner
from weftline.errors import ModelError

PROMPTS = 10
"""Of each family; the models are tiny, and generate is the slow part."""


@pytest.mark.slow(but_first=3)
@pytest.mark.parametrize("family", list(tiny.FAMILIES))
def test_a_family_answers_as_generate_under_joins_preemption_and_cancels(family):
    tally = coverage.drive(family, PROMPTS, seed=5)
    assert not tally.wrong
    assert tally.equal >= 0.8 * (tally.equal + tally.ties) > 5
    assert tally.different > 5
    assert tally.preemptions > 0
    assert tally.hit_tokens > 0
    assert tally.cancelled > 0


_SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip
_MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
UNFIT = {
    "falcon_h1": (_MAMBA, "hybrid"),
    "mamba": ({}, "linear_attention"),
    "lfm2": ({"full_attn_idxs": [1]}, "conv"),
    "gpt_oss": ({"num_local_experts": 2, "num_experts_per_tok": 1}, "s_aux"),
    "bert": ({}, "attend to those after"),
    "gemma3_text": ({"use_bidirectional_attention": True}, "attend to those after"),
    "bart": (
        {"d_model": 32, "decoder_layers": 2, "encoder_layers": 2, "decoder_ffn_dim": 32},
        "does not accept position_ids",
    ),
    "bloom": ({"n_head": 2}, "attend through"),
}
"""Model types that cannot be paged, what their tiny models need besides sizes, and what is said about them."""


def _unfit(model_type: str) -> Any:
    attention.register()
    config = AutoConfig.for_model(model_type, **{**_SIZES, **UNFIT[model_type][0]})
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)


@pytest.mark.parametrize("model_type", list(UNFIT))
def test_a_model_that_cannot_be_paged_is_refused_and_the_reason_is_said(model_type):
    with pytest.raises(ModelError, match=UNFIT[model_type][1]):
        Runner(_unfit(model_type), RunnerOptions())


def test_a_model_whose_tokens_mix_outside_attention_is_detected(monkeypatch):
    monkeypatch.setattr(attention, "LAYERS_KNOWN", ("hybrid",))
    torch.manual_seed(3)
    with pytest.raises(ModelError, match="see each other beside attention"):
        Runner(_unfit("falcon_h1"), RunnerOptions())


def test_an_encoder_decoder_is_refused_before_its_weights_are_read(tmp_path: Path):
    config = AutoConfig.for_model("t5", vocab_size=64, d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16)
    AutoModel.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="model mine: t5 has an encoder; only decoders have pages"):
        Runner.open(tmp_path, shown="mine")


def test_a_model_that_keeps_to_its_own_attention_is_refused(tmp_path: Path):
    config = AutoConfig.for_model("falcon", vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    AutoModel.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="model mine: its attention cannot be replaced by the paged one"):
        Runner.open(tmp_path, shown="mine")
