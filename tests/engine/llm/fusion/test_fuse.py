"""Fused models say what unfused ones say, whatever the family; what does not fit is put back and reported."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.engine.llm import tiny
from weftline.engine.llm import attention
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.fusion import layer as fuse_layer
from weftline.engine.llm.fusion import linear as fuse_linear
from weftline.engine.llm.fusion.fuse import FusionReport, fuse
from weftline.engine.llm.fusion.linear import MergedLinear
from weftline.engine.llm.fusion.probe import ProbeForm, probe_inputs, probing
from weftline.engine.llm.model_loader import RunnerOptions
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.runner import Runner

LAYERS = 3
SIZES: dict[str, Any] = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TURNS = ["sliding_attention", "full_attention", "sliding_attention"]
WHOLE = {"norm": 7, "qkv": 3, "gate_up": 3, "attention": 3, "mlp": 3, "layer": 3, "model": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "llama": ("Llama", {}, WHOLE),
    "llama with biases and tied embeddings": (
        "Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, WHOLE,
    ),
    "mistral with a window": ("Mistral", {"head_dim": 16, "sliding_window": 4}, WHOLE),
    "qwen2 with biases": ("Qwen2", {}, WHOLE),
    "qwen3 with norms of heads": ("Qwen3", {"head_dim": 16}, {**WHOLE, "norm": 13}),
    "gemma": ("Gemma", {"head_dim": 16}, WHOLE),
    "gemma2 with sandwich norms and soft caps": (
        "Gemma2", {"head_dim": 16, "sliding_window": 4, "layer_types": TURNS}, {**WHOLE, "norm": 13},
    ),
    "gemma3 with two rotary embeddings": (
        "Gemma3Text", {"head_dim": 16, "sliding_window": 4, "layer_types": TURNS},
        {**{k: v for k, v in WHOLE.items() if k != "model"}, "norm": 19},
    ),
    "phi3, merged as it comes": ("Phi3", {}, {k: v for k, v in WHOLE.items() if k not in ("qkv", "gate_up")}),
    "phi with parallel blocks": ("Phi", {}, {"qkv": 3}),
    "olmo that clips its queries": (
        "Olmo", {"clip_qkv": 2.0}, {k: v for k, v in WHOLE.items() if k not in ("norm", "attention")},
    ),
    "olmo2 with norms after": ("Olmo2", {}, {**WHOLE, "norm": 13}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}, {k: v for k, v in WHOLE.items() if k not in ("gate_up", "mlp")}),
    "qwen3 with experts": (
        "Qwen3Moe", {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        {**{k: v for k, v in WHOLE.items() if k not in ("gate_up", "mlp")}, "norm": 13},
    ),
    "granite that scales its residual": (
        "Granite", {"residual_multiplier": 0.5, "embedding_multiplier": 2.0},
        {k: v for k, v in WHOLE.items() if k not in ("layer", "model")},
    ),
    "ernie that pairs neighbours": ("Ernie4_5", {}, {k: v for k, v in WHOLE.items() if k != "attention"}),
}  # fmt: skip
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def build(name: str, options: dict[str, Any], dtype: torch.dtype = torch.float32, seed: int = 3) -> Any:
    torch.set_num_threads(1)
    attention.register()
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=dtype).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:  # norms and biases would else be ones and zeros
                weight.add_(torch.randn_like(weight) * 0.1)
    return model


@torch.inference_mode()
def logits(model: Any, rows: int = 0) -> torch.Tensor:
    """Return the logits of the probe's tokens, or of `rows` others."""
    given = probe_inputs(model)
    if rows:
        given["input_ids"] = torch.arange(rows)[None] * 5 % 199
        given["position_ids"] = torch.arange(rows)[None]
    with probing(model, ProbeForm()):
        found: torch.Tensor = model(**given).logits[0].float()
    return found


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_model_says_the_same_and_the_report_counts_what_was_fused(family: str, dtype: torch.dtype) -> None:
    name, options, expected = FAMILIES[family]
    model = build(name, options, dtype)
    before, others = logits(model), logits(model, 30)
    report = fuse(model)
    for now, then in ((logits(model), before), (logits(model, 30), others)):
        assert float((now - then).abs().max() / then.abs().max()) < ALLOWED[dtype]
    assert report.counts == expected, str(report)


def test_what_is_left_has_a_path_and_a_reason() -> None:
    report = fuse(build(*FAMILIES["granite that scales its residual"][:2]))
    assert [(left.path, left.pattern) for left in report.left] == [
        ("model.layers.0", "layer"), ("model.layers.1", "layer"), ("model.layers.2", "layer"), ("model", "model"),
    ]  # fmt: skip
    assert report.left[0].reason == "its code also uses residual_multiplier"
    assert "left: 3 layer: its code also uses residual_multiplier" in str(report)


def test_a_layer_that_fails_the_probe_is_restored_and_others_stay_fused() -> None:
    model = build("SmolLM3", {"num_hidden_layers": 4})  # its fourth layer does not turn queries and keys
    before = logits(model)
    report = fuse(model)
    assert report.counts["attention"] == 3
    assert [(left.path, left.pattern) for left in report.left] == [("model.layers.3.self_attn", "attention")]
    assert "differs by" in report.left[0].reason
    assert "forward" not in model.model.layers[3].self_attn.__dict__
    assert torch.allclose(logits(model), before, atol=1e-4)


def test_a_merged_linear_that_disagrees_is_split_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Llama", {})
    before, merge = logits(model), fuse_linear.merge

    def spoil(owner: Any, names: Any, merged: str) -> None:
        merge(owner, names, merged)
        if merged == "qkv_proj" and owner is model.model.layers[1].self_attn:
            owner.qkv_proj.parts = (("q_proj", 0, 32), ("k_proj", 32, 96), ("v_proj", 96, 128))

    monkeypatch.setattr(fuse_linear, "merge", spoil)
    monkeypatch.setattr(fuse_linear, "split", _split_as_written(fuse_linear.split))
    report = fuse(model)
    assert report.counts["qkv"] == LAYERS - 1
    assert any(left.path == "model.layers.1.self_attn" and left.pattern == "qkv" for left in report.left)
    assert isinstance(model.model.layers[1].self_attn.q_proj, torch.nn.Linear)
    assert torch.allclose(logits(model), before, atol=1e-4)


def _split_as_written(split: Any) -> Any:
    def undo(owner: Any, merged: str) -> None:
        owner.qkv_proj.parts = (("q_proj", 0, 64), ("k_proj", 64, 96), ("v_proj", 96, 128))
        split(owner, merged)

    return undo


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_the_engine_answers_with_the_same_tokens_from_a_fused_model(family: str) -> None:
    prompts = tiny.prompts(6, seed=4)
    params = SamplingParams(tokens_max=12, ignore_eos=True)
    attention.register()
    answers = []
    for fused in (False, True):
        ours = AutoModelForCausalLM.from_config(tiny.config(family), attn_implementation=attention.NAME)
        ours.load_state_dict(tiny.reference(family).state_dict())
        runner = Runner(ours, RunnerOptions(page_tokens=8, kv_bytes=1 << 20, fuse=fused))
        assert ("forward" in ours.model.__dict__) is fused
        answers.append(Engine(runner).generate(prompts, params))
    assert answers[0] == answers[1]


def test_a_model_can_be_fused_after_it_has_its_pages() -> None:
    runner = Runner(build("Llama", {}), RunnerOptions(page_tokens=8, kv_bytes=1 << 20, fuse=False))
    engine = Engine(runner, prefix_cache=False)
    prompts, params = tiny.prompts(3, seed=8), SamplingParams(tokens_max=8, ignore_eos=True)
    before = engine.generate(prompts, params)
    assert fuse(runner.model).counts["model"] == 1
    assert engine.generate(prompts, params) == before


def test_old_weights_are_freed_as_they_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Llama", {})
    bytes_before = sum(weight.nbytes for weight in model.parameters())
    linears = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    old = [weakref.ref(m.weight) for path, m in model.named_modules() if path.rpartition(".")[2] in linears]
    alive, merge = [], fuse_linear.merge

    def count(owner: Any, names: Any, merged: str) -> None:
        merge(owner, names, merged)
        alive.append(sum(weight() is not None for weight in old))

    monkeypatch.setattr(fuse_linear, "merge", count)
    fuse(model)
    # attention and MLP in turns: three, then two weights fewer at once, while nothing else was made
    assert alive == [12, 10, 7, 5, 2, 0]
    assert sum(weight.nbytes for weight in model.parameters()) == bytes_before


DEEP: dict[str, Any] = {"num_hidden_layers": 32, "hidden_size": 32, "intermediate_size": 48}


def rounds_once(product: Tensor, activate: Callable[[Tensor], Tensor], name: str = "") -> Tensor:
    """Return what a GPU's kernel does: it rounds after the activation was multiplied, and not before as well."""
    gate, up = product.float().chunk(2, dim=-1)
    return (activate(gate) * up).to(product.dtype)


def test_a_deep_bfloat16_model_is_fused_whole_despite_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against the original layers the stack's difference grows with the depth, to more than any tolerance."""
    monkeypatch.setattr(fuse_layer, "gated", rounds_once)
    report = fuse(build("Llama", DEEP, torch.bfloat16))
    assert (report.counts["layer"], report.counts.get("model")) == (32, 1), str(report)


def skips(steps: list[Any]) -> list[Any]:
    return [*steps[:17], *steps[18:]]


def swaps(steps: list[Any]) -> list[Any]:
    return [*steps[:3], steps[4], steps[3], *steps[5:]]


def repeats(steps: list[Any]) -> list[Any]:
    return [*steps, steps[-1]]


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("bug", [skips, swaps, repeats])
@pytest.mark.parametrize("spread", [0.02, 0.3])
def test_a_deep_stack_that_computes_something_else_is_put_back(
    bug: Callable[[list[Any]], list[Any]], spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = fuse_layer.stack_forward
    monkeypatch.setattr(fuse_layer, "gated", rounds_once)
    monkeypatch.setattr(fuse_layer, "stack_forward", lambda base, steps, *rest: stack(base, bug(steps), *rest))
    model = build("Llama", {**DEEP, "initializer_range": spread}, torch.bfloat16)
    report = fuse(model)
    assert report.counts["layer"] == 32 and "model" not in report.counts
    assert [(left.pattern, left.path) for left in report.left] == [("model", "model")]
    assert "forward" not in model.model.__dict__


def test_each_layer_is_brought_before_its_turn_and_handed_on_after_it() -> None:
    model = build("Llama", {})
    layers = list(model.model.layers)
    weights = [{name: w.clone() for name, w in layer.state_dict().items()} for layer in layers]
    for layer in layers:
        layer.to_empty(device="meta")
    calls: list[str] = []

    def ready(layer: Any) -> None:
        calls.append(f"ready {layers.index(layer)}")
        layer.load_state_dict(weights[layers.index(layer)], assign=True)

    def done(layer: Any) -> None:
        calls.append(f"done {layers.index(layer)}")
        assert "forward" in layer.__dict__
        assert all(weight.is_meta for later in layers[layers.index(layer) + 1 :] for weight in later.parameters())

    assert fuse(model, ready, done).counts == WHOLE
    assert calls == [f"{what} {at}" for at in range(LAYERS) for what in ("ready", "done")]


def test_what_bringing_a_layer_raises_is_not_taken_for_a_model_that_fails() -> None:
    def ready(layer: Any) -> None:
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"):
        fuse(build("Llama", {}), ready)


def test_merged_linears_say_which_outputs_are_whose() -> None:
    model = build("Llama", {})
    wanted = model.model.layers[0].self_attn.k_proj.weight.clone()
    fuse(model)
    named = model.named_modules()
    merged = {path.rpartition(".")[0]: module for path, module in named if isinstance(module, MergedLinear)}
    assert set(merged) == {f"model.layers.{at}.{part}" for at in range(LAYERS) for part in ("self_attn", "mlp")}
    linear = merged["model.layers.0.self_attn"]
    assert linear.parts == (("q_proj", 0, 64), ("k_proj", 64, 96), ("v_proj", 96, 128))
    assert torch.equal(linear.weight[64:96], wanted)
    assert torch.equal(model.model.layers[0].self_attn.k_proj.weight, wanted)


def test_a_linear_put_in_the_place_of_a_merged_one_is_used() -> None:
    model = build("Llama", {})
    fuse(model)
    before = logits(model)
    owner = model.model.layers[1].self_attn
    merged, calls = owner.qkv_proj, []

    class Adapted(torch.nn.Module):
        parts = merged.parts

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            calls.append(given.shape)
            product: torch.Tensor = merged(given)
            return product * 2

    owner.qkv_proj = Adapted()
    assert not torch.allclose(logits(model), before, atol=1e-3)
    assert len(calls) == 1


def test_fusing_twice_changes_nothing_more() -> None:
    model = build("Qwen3", {"head_dim": 16})
    fuse(model)
    before = logits(model)
    assert fuse(model).counts == {}
    assert torch.equal(logits(model), before)


def test_with_another_attention_only_its_linears_norms_and_mlps_are_fused() -> None:
    model = AutoModelForCausalLM.from_config(tiny.config("llama"), attn_implementation="eager").eval()
    ids = torch.arange(9)[None] + 5
    before = model(ids).logits
    report = fuse(model)
    assert set(report.counts) == {"norm", "qkv", "gate_up", "mlp", "layer"} or "attention" not in report.counts
    assert torch.allclose(model(ids).logits, before, atol=1e-3)


def test_a_model_without_decoder_layers_or_where_it_fails_is_left_alone() -> None:
    model, calls = build("Llama", {}), []
    model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    report = fuse(model, calls.append, calls.append)
    assert report.counts["layer"] == 1 and "model" not in report.counts  # layer 0 was compared before layer 1 failed
    assert "ZeroDivisionError" in report.left[0].reason
    assert sorted(map(id, calls)) == sorted(2 * [id(layer) for layer in model.model.layers])  # brought all the same
    model.config.num_hidden_layers = 77
    assert fuse(model).left[0].reason == "no list of decoder layers was found"


def test_a_report_reads_well() -> None:
    assert str(FusionReport({}, ())) == "fused: nothing"
    assert str(fuse(build("Llama", {}))) == "fused: 7 norm, 3 qkv, 3 gate_up, 3 attention, 3 mlp, 3 layer, 1 model"
