"""Checkpoints that are quantised already: loaded where they can be, and otherwise refused with what to do."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engine.llm import tiny
from weftline.engine.llm import quantised
from weftline.engine.llm.quantised import find_method, plan_weights
from weftline.errors import ModelError
from weftline.nodes.hugging_face import check_weights

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
TEXT = torch.randint(3, tiny.VOCABULARY, (1, 30), generator=torch.Generator().manual_seed(8))


def compressed(kind: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "channel", "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if kind == "float" else "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


def write(folder: Path, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Write tiny llama's weights as `settings` says; return what they come to when read back."""
    state, plain = {}, {}
    for name, weight in tiny.reference("llama").state_dict().items():
        state[name] = plain[name] = weight
        if "_proj." not in name:
            continue
        whole = settings["quant_method"] == "fp8"
        kind = "int" if settings.get("format") == "int-quantized" else "float"
        scale = weight.abs().amax(None if whole else 1, keepdim=True) / (127 if kind == "int" else 448)
        small = weight / scale
        state[name] = small.round().to(torch.int8) if kind == "int" else small.to(torch.float8_e4m3fn)
        state[name + ("_scale_inv" if whole else "_scale")] = scale.clone()
        plain[name] = state[name].float() * scale
    config = tiny.reference("llama").config.to_dict() | {"quantization_config": settings}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}), encoding="utf-8")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return plain


def load(folder: Path) -> Any:
    check_weights(folder, "m")
    config = AutoConfig.from_pretrained(folder)
    plan_weights("auto", "auto", "cpu", config, "m")
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()


def says(folder: Path, plain: dict[str, torch.Tensor]) -> bool:
    """Whether the checkpoint in `folder` computes what a model with the weights `plain` does."""
    model = AutoModelForCausalLM.from_config(tiny.config("llama")).eval()
    model.load_state_dict(plain)
    with torch.inference_mode():
        return torch.allclose(load(folder)(input_ids=TEXT).logits, model(input_ids=TEXT).logits, rtol=1e-4, atol=1e-3)


def test_an_fp8_checkpoint_is_unpacked_on_a_cpu(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    assert says(tmp_path, write(tmp_path, FP8))


@pytest.mark.parametrize("kind", ["float", "int"])
def test_a_checkpoint_of_compressed_tensors_is_unpacked_on_a_cpu(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("compressed_tensors")
    assert says(tmp_path, write(tmp_path, compressed(kind)))


def test_a_checkpoint_of_torchao_stays_as_it_is(tmp_path: Path) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    tiny.reference("llama").save_pretrained(tmp_path / "plain")
    settings = transformers.TorchAoConfig(torchao.Int8WeightOnlyConfig())
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=settings)
    saved.save_pretrained(tmp_path / "int8")
    model = load(tmp_path / "int8")
    assert type(model.model.layers[0].mlp.up_proj.weight.data) is torchao.Int8Tensor
    with torch.inference_mode():
        assert torch.equal(model(input_ids=TEXT).logits, saved(input_ids=TEXT).logits)


def test_on_a_gpu_fp8_checkpoints_stay_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised, "find_spec", lambda name: name)
    monkeypatch.setattr(quantised, "find_spec", lambda name: name)
    monkeypatch.setattr(quantised, "_capability", lambda device: (9, 0))
    config = SimpleNamespace(quantization_config=compressed("float"))
    assert plan_weights("auto", "auto", "cuda", config, "m").form is None
    assert config.quantization_config["use_optimized_inference"] is True
    for settings, weights, form in (
        (FP8, "auto", "fp8"),  # its own products would be fetched as code: unpacked, then quantised anew
        (FP8, "int8", "int8"),
        (compressed("float"), "int4", "int4"),
        (compressed("int"), "auto", None),
    ):
        config = SimpleNamespace(quantization_config=dict(settings))
        assert plan_weights(weights, "auto", "cuda", config, "m").form == form
        assert config.quantization_config["dequantize"] is True
    monkeypatch.setattr(quantised, "_capability", lambda device: (8, 0))
    config = SimpleNamespace(quantization_config=dict(FP8))
    assert plan_weights("auto", "auto", "cuda", config, "m").form is None


def test_what_cannot_be_loaded_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def config(method: str) -> Any:
        return SimpleNamespace(quantization_config={"quant_method": method})

    assert find_method(SimpleNamespace(), "m") is None
    with pytest.raises(ModelError, match="quantised by 'mxfp4', expected one of: fp8, compressed-tensors"):
        plan_weights("auto", "auto", "cpu", config("mxfp4"), "m")
    with pytest.raises(ModelError, match="quantised by gptq, which needs a GPU; found cpu"):
        plan_weights("auto", "auto", "cpu", config("gptq"), "m")
    monkeypatch.setattr(quantised, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"fix: pip install 'compressed-tensors>=0\.15'"):
        plan_weights("auto", "auto", "cpu", config("compressed-tensors"), "m")
    monkeypatch.setattr(quantised, "_capability", lambda device: (9, 0))
    with pytest.raises(ModelError, match="fix: pip install 'gptqmodel' 'accelerate'"):
        plan_weights("auto", "auto", "cuda", config("awq"), "m")
    monkeypatch.setattr(quantised, "find_spec", lambda name: name)
    assert plan_weights("auto", "auto", "cuda", config("awq"), "m").form is None
    with pytest.raises(ModelError, match="weights: found int8, expected auto: model m already is quantised, by awq"):
        plan_weights("int8", "auto", "cuda", config("awq"), "m")
