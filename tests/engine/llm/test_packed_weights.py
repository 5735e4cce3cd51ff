"""AWQ and GPTQ checkpoints give the tokens of transformers' generate with the weights that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.engine.llm import tiny
from tests.engine.llm.packed_checkpoints import AWQ, GPTQ, write_packed
from weftline.engine.llm.checkpoint_format import PackedFormat
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.model_loader import RunnerOptions, load_model
from weftline.engine.llm.packed_weights import unpacked
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.runner import Runner
from weftline.engine.llm.schedule import RoundLimits
from weftline.errors import ModelError

CHECKPOINTS = {
    "awq": AWQ,
    "awq, one group": AWQ | {"group_size": -1},
    "awq, layers left": AWQ | {"modules_to_not_convert": ["model.layers.0.self_attn.q_proj"]},
    "gptq": GPTQ,
    "gptq, symmetric": GPTQ | {"sym": True},
    "gptq, 8 bits": GPTQ | {"bits": 8},
    "gptq, by activation": GPTQ | {"desc_act": True},
    "gptq, 8 bits by activation, v2": GPTQ | {"bits": 8, "desc_act": True, "checkpoint_format": "gptq_v2"},
    "gptq, v2": GPTQ | {"checkpoint_format": "gptq_v2"},
}


@torch.inference_mode()
def generated(model: Any, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def open_slices(folder: Path) -> dict[str, Any]:
    opened: Any = safe_open(folder / "model.safetensors", framework="pt")
    return {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  it is no mapping


@pytest.mark.parametrize(("kind", "family"), [*((kind, "llama") for kind in CHECKPOINTS), ("awq", "qwen2")])
def test_answers_are_those_of_the_unpacked_weights(tmp_path: Path, kind: str, family: str) -> None:
    model = write_packed(tmp_path, CHECKPOINTS[kind], family)
    engine = Engine(Runner.open(tmp_path, RunnerOptions(kv_bytes=4 << 20)), None, RoundLimits(64, 8))
    prompts = tiny.prompts(4, seed=3, longest=40)
    found = engine.generate(prompts, SamplingParams(tokens_max=12, temperature=0.0))
    assert found == [generated(model, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_weights_are_unpacked_to_the_bit(tmp_path: Path, kind: str) -> None:
    expected = write_packed(tmp_path, CHECKPOINTS[kind]).state_dict()
    model = load_model(tmp_path, RunnerOptions()).model
    assert all(torch.equal(weight, expected[name]) for name, weight in model.state_dict().items())
    model = load_model(tmp_path, RunnerOptions(dtype="bfloat16")).model
    assert all(torch.equal(weight, expected[name].bfloat16()) for name, weight in model.state_dict().items())


def test_experts_of_a_mixture_are_unpacked(tmp_path: Path) -> None:
    expected = write_packed(tmp_path, AWQ, "mixtral").state_dict()
    model = load_model(tmp_path, RunnerOptions()).model
    assert all(torch.equal(weight, expected[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_packed_checkpoint_is_quantised_anew_layer_by_layer(tmp_path: Path, form: str) -> None:
    pytest.importorskip("torchao")
    write_packed(tmp_path, AWQ)
    by_layer = load_model(tmp_path, RunnerOptions(weights=form))
    assert by_layer.layers is not None
    assert all(weight.is_meta for weight in by_layer.model.model.layers.parameters())
    ours = Runner(*by_layer).model.state_dict()
    whole = Runner(*load_model(tmp_path, RunnerOptions(weights=form), whole=True)).model.state_dict()
    text = torch.randn(3, 64).to(whole["lm_head.weight"].dtype)
    for name, weight in whole.items():
        if name.endswith("proj.weight") and weight.shape[1] == 64:
            assert torch.equal(torch.nn.functional.linear(text, weight), torch.nn.functional.linear(text, ours[name]))


def test_groups_that_older_writers_left_zero_are_in_order(tmp_path: Path) -> None:
    expected = write_packed(tmp_path, GPTQ).state_dict()
    state = load_file(tmp_path / "model.safetensors")
    for name in state:
        if name.endswith("g_idx"):
            state[name] = torch.zeros_like(state[name])
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_model(tmp_path, RunnerOptions()).model
    assert all(torch.equal(weight, expected[name]) for name, weight in model.state_dict().items())
    save_file({n: t for n, t in state.items() if "g_idx" not in n}, tmp_path / "model.safetensors")
    model = load_model(tmp_path, RunnerOptions()).model
    assert all(torch.equal(weight, expected[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("qweight", lambda t: t[:-1].contiguous(), "63 inputs and 96 outputs do not divide into 2 groups"),
        ("qweight", lambda t: t[:, :-1].contiguous(), r"up_proj\.qweight is \[64, 11\], expected \[64, 12\]"),
        ("qzeros", lambda t: t[:1].contiguous(), r"up_proj\.qzeros is \[1, 12\], expected \[2, 12\]"),
        ("scales", lambda t: t[:, :-1].contiguous(), r"expected \[64, 11\], beside scales \[2, 95\]"),
        ("scales", lambda t: t.int(), "its packed tensors are"),
        ("qweight", lambda t: t.float(), "expected I32"),
        ("qzeros", None, r"tensor model\.layers\.1\.mlp\.up_proj\.qzeros of a packed weight is missing"),
        ("scales", lambda t: t[0], "its packed tensors are no matrices"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, name: str, change: Any, reason: str) -> None:
    write_packed(tmp_path, AWQ)
    state = load_file(tmp_path / "model.safetensors")
    key = f"model.layers.1.mlp.up_proj.{name}"
    state = state | {key: change(state[key])} if change else {n: t for n, t in state.items() if n != key}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=reason):
        load_model(tmp_path, RunnerOptions())


def test_groups_outside_of_the_scales_are_refused(tmp_path: Path) -> None:
    write_packed(tmp_path, GPTQ)
    state = load_file(tmp_path / "model.safetensors")
    state["model.layers.0.mlp.up_proj.g_idx"][0] = 7
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"up_proj\.g_idx: an input's group is not one of the 2"):
        load_model(tmp_path, RunnerOptions())


def test_scales_of_an_activation_are_refused(tmp_path: Path) -> None:
    write_packed(tmp_path, AWQ)
    state = load_file(tmp_path / "model.safetensors") | {"model.layers.0.mlp.act.scales": torch.ones(96)}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"tensor model\.layers\.0\.mlp\.act\.scales belongs to no packed weight"):
        load_model(tmp_path, RunnerOptions())


def test_plain_weights_with_a_packed_config_are_refused(tmp_path: Path) -> None:
    tiny.reference("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"its config says awq, but no tensor is named \.\.\.qweight"):
        unpacked(open_slices(tmp_path), PackedFormat("awq", 4, 0), torch.float32)
