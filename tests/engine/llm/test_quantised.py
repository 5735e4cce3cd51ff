"""Weights in fewer bits: how far they are from what they were, what they take, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.engine.llm import tiny, tiny_adapters
from weftline.engine.llm import attention, quantised
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.fusion import linear as fuse_linear
from weftline.engine.llm.lora.adapters import Adapters
from weftline.engine.llm.model_loader import RunnerOptions
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.quantised import WeightPlan, plan_weights, quantise, weight_bytes
from weftline.engine.llm.request import LlmRequestOptions
from weftline.engine.llm.runner import Runner
from weftline.errors import MissingPackage, ModelError

pytest.importorskip("torchao")

PLAIN = SimpleNamespace(quantization_config=None)
DTYPES = {"int8": torch.float32, "int4": torch.bfloat16, "fp8": torch.bfloat16}
TEXT = torch.randint(3, tiny.VOCABULARY, (2, 30), generator=torch.Generator().manual_seed(8))


@pytest.fixture
def fp8_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torchao quantise to fp8 without a GPU: torch has the product for CPUs too, but slow."""
    inference = pytest.importorskip("torchao.float8.inference")
    monkeypatch.setattr(inference, "is_MI300", lambda: True)


def gpu(monkeypatch: pytest.MonkeyPatch, *capability: int) -> None:
    monkeypatch.setattr(quantised, "_capability", lambda device: capability)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=TEXT, use_cache=False).logits.float()
    return found


def read_back(linear: nn.Linear) -> torch.Tensor:
    """Return the weight that a quantised layer computes with, [out, in]: what it makes of unit vectors."""
    unit = torch.eye(linear.in_features, dtype=linear.weight.dtype)
    with torch.no_grad():
        return nn.functional.linear(unit, linear.weight).float().T


def steps(weight: torch.Tensor, form: str) -> torch.Tensor:
    """Return half a step of `form`'s numbers at each weight: the most that rounding may move it."""
    if form == "int8":
        return weight.abs().amax(1, keepdim=True) / 127 / 2
    if form == "fp8":  # 3 bits after the point
        return torch.maximum(weight.abs() / 2**4, weight.abs().amax(1, keepdim=True) / 448 / 2**9)
    groups = weight.unflatten(1, (-1, 128 if weight.shape[1] % 128 == 0 else 32 if weight.shape[1] % 64 else 64))
    step = (groups.amax(2, keepdim=True) - groups.amin(2, keepdim=True)) / 15 / 2
    return step.expand_as(groups).flatten(1)


@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("width", [256, 96])
def test_every_weight_is_the_nearest_that_the_form_has(form: str, width: int, fp8_anywhere: None) -> None:
    torch.manual_seed(1)
    linear = nn.Linear(width, 64, bias=False, dtype=DTYPES[form])
    linear.weight.data[:8] *= 1e-5 if form == "fp8" else 1e-3  # outputs of small weights have scales of their own
    before = linear.weight.detach().float()
    quantised.quantise_linear(linear, form, "cpu")
    rounding = 1e-6 if form == "int8" else 0.01  # of bfloat16, in scales and in reading back
    moved = (read_back(linear) - before).abs()
    assert bool((moved <= 1.02 * steps(before, form) + rounding * before.abs().amax(1, keepdim=True)).all())
    assert float(moved.max()) > 0


@pytest.mark.parametrize(("form", "most"), [("int8", 0.26), ("int4", 0.14), ("fp8", 0.26)])
def test_weights_take_the_bits_that_the_form_says(form: str, most: float, fp8_anywhere: None) -> None:
    linear = nn.Linear(512, 256, bias=False, dtype=DTYPES[form])
    quantised.quantise_linear(linear, form, "cpu")
    assert weight_bytes(linear) < most * 512 * 256 * 4
    assert weight_bytes(linear) >= 512 * 256 / (2 if form == "int4" else 1)


@pytest.mark.parametrize(("form", "most"), [("int8", 0.15), ("fp8", 0.5)])
def test_a_model_says_nearly_the_same(form: str, most: float, fp8_anywhere: None) -> None:
    model = tiny_adapters.model().to(DTYPES[form])
    before = logits(model)
    report = quantise(model, form, "cpu")
    assert (report.layers, report.left) == (14, (("lm_head", "it is the output layer"),))
    assert report.after_bytes == weight_bytes(model) < report.before_bytes
    after = logits(model)
    assert float((after - before).norm() / before.norm()) < most  # random weights forgive less than trained ones


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_merging_first_changes_no_number(form: str) -> None:
    apart, merged = (tiny_adapters.model("qwen2").to(DTYPES[form]) for _ in range(2))
    for layer in merged.model.layers:
        fuse_linear.merge(layer.self_attn, ("q_proj", "k_proj", "v_proj"), "qkv_proj")
        fuse_linear.merge(layer.mlp, ("gate_proj", "up_proj"), "gate_up_proj")
    assert (quantise(apart, form, "cpu").layers, quantise(merged, form, "cpu").layers) == (14, 8)
    for one, other in zip(apart.model.layers, merged.model.layers, strict=True):
        attention = one.self_attn
        parts = [read_back(linear) for linear in (attention.q_proj, attention.k_proj, attention.v_proj)]
        assert torch.equal(torch.cat(parts), read_back(other.self_attn.qkv_proj))
    assert torch.allclose(logits(apart), logits(merged), rtol=1e-3, atol=1e-3)


def test_adapters_work_on_quantised_weights(tmp_path: Path) -> None:
    model = tiny_adapters.model()
    quantise(model, "int8", "cpu")
    bare = logits(model)
    adapters = Adapters(model)
    slot = adapters.load("a", tiny_adapters.write(tmp_path))
    adapters.choose([(0, 30, slot), (30, 60, 0)])
    mixed, merged = logits(model), logits(tiny_adapters.merged(1))
    assert torch.allclose(mixed[1], bare[1], rtol=1e-4, atol=1e-4)
    assert float((mixed[0] - merged[0]).norm() / merged[0].norm()) < 0.15


def test_a_fused_engine_with_adapters_answers_as_full_weights_do(tmp_path: Path) -> None:
    def engine(model: Any) -> Engine:
        attention.register()
        ours = AutoModelForCausalLM.from_config(tiny.config("llama"), attn_implementation=attention.NAME)
        ours.load_state_dict(model.state_dict())
        return Engine(Runner(ours, RunnerOptions(page_tokens=8, kv_bytes=1 << 20)))

    def answers(engine: Engine) -> list[list[int]]:
        found: list[list[int]] = [[], [], []]
        engine.runner.load_adapter("a", tiny_adapters.write(tmp_path))
        for at, name in enumerate(["a", "", "a"]):
            params = SamplingParams(tokens_max=8, ignore_eos=True)
            engine.add(at, tiny.prompts(3, seed=2)[at], params, LlmRequestOptions(adapter=name))
        while engine.busy:
            for update in engine.step():
                found[update.id] += update.tokens
        return found

    serving = engine(tiny_adapters.model())
    assert quantise(serving.runner.model, "int8", "cpu").layers == 8
    full = tiny_adapters.model()
    quantise(full, "int8", "cpu")
    for module in full.modules():
        if isinstance(module, nn.Linear) and type(module.weight.data) is not torch.Tensor:
            module.weight = nn.Parameter(read_back(module))
    assert answers(serving) == answers(engine(full))


@pytest.mark.slow
def test_the_bundled_model_answers_in_int8_as_it_does_in_float32() -> None:
    from transformers import AutoTokenizer

    from examples.models import llm_data

    folder = Path(__file__).parents[3] / "examples/models/shapes-chat"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    pairs = list(llm_data.held_out_pairs(3, 64))
    fed = tokenizer.apply_chat_template(
        [[{"role": "user", "content": text}] for text, _ in pairs], add_generation_prompt=True, padding=True,
        return_tensors="pt", return_dict=True,
    )  # fmt: skip

    def answers() -> list[str]:
        made = model.generate(**fed, max_new_tokens=48, do_sample=False)[:, fed["input_ids"].shape[1] :]
        said: list[str] = tokenizer.batch_decode(made, skip_special_tokens=True)
        return said

    before = answers()
    assert quantise(model, "int8", "cpu").after_bytes < 0.33 * model.num_parameters() * 4
    after = answers()
    assert sum(a == b for a, b in zip(before, after, strict=True)) >= 0.97 * len(pairs)
    right = sum(said == turn.answer for said, (_, turn) in zip(after, pairs, strict=True))
    assert right >= 0.97 * sum(said == turn.answer for said, (_, turn) in zip(before, pairs, strict=True)) > 32


def test_layers_that_cannot_be_quantised_stay_and_say_why() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 64), nn.Linear(64, 8, bias=False)
            self.head.weight = self.embed.weight
            self.gate, self.odd, self.narrow = nn.Linear(64, 32), nn.Linear(40, 64), nn.Linear(64, 12)
            self.up = nn.Linear(64, 32)

        def get_input_embeddings(self) -> nn.Module:
            return self.embed

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    model = Model().bfloat16()
    report = quantise(model, "int4", "cpu")
    assert report.layers == 1
    assert dict(report.left) == {
        "head": "it is the output layer",
        "gate": "it chooses experts",
        "odd": "40 inputs are no multiple of 32",
        "narrow": "12 outputs are no multiple of 8",
    }
    del model.odd, model.narrow
    model.up.weight = nn.Parameter(model.gate.weight.data.to(torch.float8_e4m3fn), requires_grad=False)
    assert quantised.misfit(model.up, "int8") == "its weight is quantised already"
    with pytest.raises(ModelError, match="no layer of Model can be int4"):
        quantise(model, "int4", "cpu")


def test_a_plan_names_the_form_and_what_it_computes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_weights("auto", "float16", "cpu", PLAIN, "m") == WeightPlan()
    assert plan_weights("int8", "float16", "cpu", PLAIN, "m") == WeightPlan("int8")
    assert plan_weights("int4", "auto", "cpu", PLAIN, "m") == WeightPlan("int4", "bfloat16")
    gpu(monkeypatch, 9, 0)
    assert plan_weights("fp8", "bfloat16", "cuda", PLAIN, "m") == WeightPlan("fp8", "bfloat16")
    gpu(monkeypatch, 8, 0)
    assert plan_weights("int4", "auto", "cuda", PLAIN, "m") == WeightPlan("int4", "bfloat16")


def test_what_does_not_go_together_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="found 'int2', expected auto, fp8, int8, int4"):
        plan_weights("int2", "auto", "cpu", PLAIN, "m")
    with pytest.raises(ModelError, match="int4 computes in bfloat16, but dtype is float32"):
        plan_weights("int4", "float32", "cpu", PLAIN, "m")
    with pytest.raises(ModelError, match=r"fp8 needs a GPU of compute capability 8\.9 or newer, found cpu"):
        plan_weights("fp8", "auto", "cpu", PLAIN, "m")
    gpu(monkeypatch, 8, 6)
    with pytest.raises(ModelError, match=r"found a GPU of 8\.6"):
        plan_weights("fp8", "auto", "cuda", PLAIN, "m")
    gpu(monkeypatch, 7, 5)
    with pytest.raises(ModelError, match=r"int4 needs a GPU of compute capability 8\.0"):
        plan_weights("int4", "auto", "cuda", PLAIN, "m")
    nothing: Callable[[str], None] = lambda name: None  # noqa: E731
    monkeypatch.setattr(quantised, "find_spec", nothing)
    with pytest.raises(MissingPackage, match=r"weftline\[quantised\]"):
        plan_weights("int8", "auto", "cuda", PLAIN, "m")


def test_fp8_inputs_are_scaled_by_one_kernel_where_there_is_one(
    fp8_anywhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(tuple(x.shape))
        scales = x.float().abs().amax(1, keepdim=True) / 448
        return (x.float() / scales).to(torch.float8_e4m3fn), scales

    torch.manual_seed(0)
    linear = nn.Linear(64, 32, dtype=torch.bfloat16).requires_grad_(False)
    theirs = nn.Linear(64, 32, dtype=torch.bfloat16).requires_grad_(False)
    theirs.load_state_dict(linear.state_dict())
    quantised.quantise_linear(theirs, "fp8", "cpu")
    monkeypatch.setattr("weftline.engine.llm.kernels.availability.available", lambda device: None)
    monkeypatch.setattr("weftline.engine.llm.kernels.float8.quantise_rows", quantise_rows)
    quantised.quantise_linear(linear, "fp8", "cpu")
    given = torch.randn(1, 5, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        # torchao rounds scales to bfloat16
        torch.testing.assert_close(linear(given), theirs(given), rtol=0.02, atol=0.1)
    assert calls == [(5, 64)]
