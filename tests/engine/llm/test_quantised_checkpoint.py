"""Checkpoints that are quantised already: loaded where they can be, and otherwise refused with what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engine.llm import tiny
from tests.engine.llm.packed_checkpoints import AWQ, GPTQ
from weftline.engine.llm import checkpoint_format, quantised
from weftline.engine.llm.quantised import WeightPlan, plan_weights
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


def write_4_bits(
    folder: Path, form: str, weights: dict[str, Any], pack: Callable[[torch.Tensor, str], dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Write tiny llama's weights in 4 bits; return what they come to when read back.

    pack: returns the tensors of a weight of that name, and under the name alone what it comes to.
    """
    groups = {"group_0": {"targets": ["Linear"], "weights": weights | {"num_bits": 4, "symmetric": True}}}
    settings = compressed("int") | {"format": form, "config_groups": groups}
    plain = write(folder, settings | {"format": "int-quantized"})  # its config and the layers that stay whole
    state = {name: weight for name, weight in load_file(folder / "model.safetensors").items() if "_proj." not in name}
    for name, weight in tiny.reference("llama").state_dict().items():
        if "_proj." in name:
            tensors = pack(weight, name)
            plain[name] = tensors.pop(name)
            state |= tensors
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return plain


def pack_w4a16(weight: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
    """Pack codes from -8 to 7 with a scale for 32 inputs, eight in an int32."""
    groups = weight.unflatten(1, (-1, 32))
    scale = groups.abs().amax(2, keepdim=True) / 7
    codes = (groups / scale).round().clamp(-8, 7)
    words = (codes.flatten(1).long() + 8).unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
    packed = torch.from_numpy(words.sum(2).numpy().astype("uint32").view("int32"))
    return {
        name: (codes * scale).flatten(1), f"{name}_packed": packed, f"{name}_scale": scale[..., 0].clone(),
        f"{name}_shape": torch.tensor(weight.shape),
    }  # fmt: skip


def pack_nvfp4(weight: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
    """Pack e2m1 numbers with an fp8 scale for 16 inputs and one for all, two in a byte."""
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    groups = weight.unflatten(1, (-1, 16))
    whole = 448 * 6 / weight.abs().max()
    scale = (groups.abs().amax(2) / 6 * whole).to(torch.float8_e4m3fn)
    inverse = scale.float()[..., None] / whole
    codes = ((groups / inverse).abs()[..., None] - levels).abs().argmin(-1)
    plain = (torch.where(groups < 0, -1.0, 1.0) * levels[codes] * inverse).flatten(1)
    nibbles = (codes + 8 * (groups < 0)).flatten(1).to(torch.uint8)
    packed = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
    return {name: plain, f"{name}_packed": packed, f"{name}_scale": scale, f"{name}_global_scale": whole.reshape(1)}


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


def test_a_checkpoint_of_4_bits_is_unpacked_on_a_cpu(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    weights = {"type": "int", "strategy": "group", "group_size": 32}
    assert says(tmp_path, write_4_bits(tmp_path, "pack-quantized", weights, pack_w4a16))


def test_a_checkpoint_of_nvfp4_is_unpacked_on_a_cpu(tmp_path: Path) -> None:
    """Its package rounds the values to bfloat16 on the way."""
    pytest.importorskip("compressed_tensors")
    weights = {
        "type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"
    }  # fmt: skip
    plain = write_4_bits(tmp_path, "nvfp4-pack-quantized", weights, pack_nvfp4)
    found = load(tmp_path).state_dict()
    assert all(torch.allclose(found[name], weight, rtol=2**-7, atol=0) for name, weight in plain.items())


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
    monkeypatch.setattr(checkpoint_format, "find_spec", lambda name: name)
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
    def config(method: str, **settings: Any) -> Any:
        return SimpleNamespace(quantization_config={"quant_method": method, **settings})

    with pytest.raises(ModelError, match=r"quantised by 'mxfp4'\n    expected: one of: fp8, compressed-tensors"):
        plan_weights("auto", "auto", "cpu", config("mxfp4"), "m")
    monkeypatch.setattr(checkpoint_format, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"compressed-tensors, whose .*\n    fix: pip install 'weftline\[quantised\]'"):
        plan_weights("auto", "auto", "cpu", config("compressed-tensors"), "m")
    monkeypatch.setattr(checkpoint_format, "find_spec", lambda name: name)
    with pytest.raises(ModelError, match=r"weights: found int8, expected auto: model m already is .* by torchao"):
        plan_weights("int8", "auto", "cpu", config("torchao"), "m")


def test_packed_weights_are_plain_to_transformers() -> None:
    for settings in (AWQ, GPTQ):
        config = SimpleNamespace(quantization_config=settings)
        plan = plan_weights("auto", "auto", "cpu", config, "m")
        assert plan.packed is not None and plan.packed.method == settings["quant_method"] and plan.by_layer
        assert not hasattr(config, "quantization_config")
    assert plan_weights("auto", "auto", "cpu", SimpleNamespace(), "m") == WeightPlan()
