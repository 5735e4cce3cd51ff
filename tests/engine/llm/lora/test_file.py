"""Adapters from files: plain LoRA is read, everything else refused with its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.llm import tiny_adapters
from weftline.engine.llm.lora import file as lora_file
from weftline.engine.llm.lora.file import read_adapter
from weftline.errors import ModelError


def test_rank_scale_and_pairs_are_those_of_the_file(tmp_path: Path) -> None:
    adapter = read_adapter(tiny_adapters.write(tmp_path, seed=3, rank=4, lora_alpha=6), "mine")
    assert (adapter.rank, adapter.scale) == (4, 1.5)
    expected = tiny_adapters.matrices(3, 4)
    assert adapter.pairs.keys() == expected.keys()
    assert all(torch.equal(adapter.pairs[m][side], expected[m][side]) for m in expected for side in (0, 1))


def test_rslora_divides_by_the_root_of_the_rank(tmp_path: Path) -> None:
    assert read_adapter(tiny_adapters.write(tmp_path, rank=4, lora_alpha=6, use_rslora=True), "mine").scale == 3.0


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"peft_type": "IA3"}, "peft_type: found 'IA3', expected 'LORA'"),
        ({"use_dora": True}, "DoRA scales the model's own weights"),
        ({"bias": "lora_only"}, "biases cannot change"),
        ({"modules_to_save": ["lm_head"]}, "whole modules saved beside LoRA"),
        ({"rank_pattern": {"q_proj": 8}}, "ranks that differ by module"),
        ({"alpha_pattern": {"q_proj": 8}}, "alphas that differ by module"),
        ({"lora_bias": True}, "biases of its own"),
        ({"target_parameters": ["experts.down_proj"]}, "parameters that are no linear layer"),
        ({"trainable_token_indices": [1]}, "embeddings of its own"),
        ({"layer_replication": [[0, 2]]}, "layers used more than once"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the model's own weights"),
        ({"use_something_new": {"a": 1}}, "not known here"),
        ({"r": 0}, "r: found 0, expected a whole number from 1 to 256"),
        ({"r": 257}, "r: found 257"),
        ({"r": True}, "r: found True"),
        ({"lora_alpha": None}, "lora_alpha: found None"),
        ({"lora_alpha": -1}, "lora_alpha: found -1"),
        ({"r": 8}, r"found A \[4, 96\] and B \[64, 4\], expected \[8, in\] and \[out, 8\]"),
    ],
)
def test_what_is_no_plain_lora_is_refused(tmp_path: Path, changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        read_adapter(tiny_adapters.write(tmp_path, **changed), "mine")


def rewrite(folder: Path, change: Any) -> Path:
    path = folder / "adapter_model.safetensors"
    state = load_file(path)
    change(state)
    save_file(state, path)
    return folder


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: s.pop(FIRST), "q_proj has lora_B only"),
        (lambda s: s.clear(), "holds no tensors"),
        (lambda s: s.update({"base_model.model.lm_head.weight": torch.zeros(2)}), "is no LoRA matrix"),
        (lambda s: s.update({FIRST.replace("lora_A", "lora_magnitude_vector"): torch.zeros(2)}), "is no LoRA matrix"),
        (lambda s: s.update({FIRST: torch.zeros(4, 64, dtype=torch.int8)}), "found torch.int8"),
        (lambda s: s[FIRST].fill_(torch.nan), "not finite"),
        (lambda s: s.update({FIRST: torch.zeros(4)}), r"found A \[4\]"),
    ],
)
def test_weights_that_are_no_pairs_are_refused(tmp_path: Path, change: Any, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        read_adapter(rewrite(tiny_adapters.write(tmp_path), change), "mine")


def test_a_truncated_file_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    path = tiny_adapters.write(tmp_path) / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ModelError, match="truncated"):
        read_adapter(tmp_path, "mine")


def test_pickled_weights_are_not_looked_at(tmp_path: Path) -> None:
    (tiny_adapters.write(tmp_path) / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"has no adapter_model\.safetensors; pickled weights are not loaded"):
        read_adapter(tmp_path, "mine")


def test_a_file_larger_than_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_file, "WEIGHTS_BYTES_MAX", 1000)
    with pytest.raises(ModelError, match="expected at most 1000"):
        read_adapter(tiny_adapters.write(tmp_path), "mine")


@pytest.mark.parametrize("text", ["{", "[]", "\0", json.dumps({"a": 1}), "[" * 100_000])
def test_a_config_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tiny_adapters.write(tmp_path) / "adapter_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match=r"mine/adapter_config\.json"):
        read_adapter(tmp_path, "mine")


def test_errors_hold_no_path_of_this_machine(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        read_adapter(tmp_path / "nowhere", "mine")
    assert str(tmp_path) not in str(caught.value) and "mine/adapter_config.json: no such file" in str(caught.value)
