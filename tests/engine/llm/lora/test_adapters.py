"""Adapters on a loaded model: the same answers as merged weights, whatever else is in the round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.llm import tiny, tiny_adapters
from weftline.engine.llm import attention
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.lora.adapters import Adapters
from weftline.engine.llm.model_loader import RunnerOptions
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.request import LlmRequestOptions
from weftline.engine.llm.runner import Runner
from weftline.errors import InputError, LimitReached, ModelError

LENGTH = 12
Rows = list[tuple[int, int, int]] | torch.Tensor


@torch.inference_mode()
def logits(model: Any, seeds: list[int]) -> torch.Tensor:
    """Return what the model says about one random text for each seed, [texts, LENGTH, vocabulary]."""
    texts = [torch.randint(3, tiny.VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(s)) for s in seeds]
    found: torch.Tensor = model(input_ids=torch.stack(texts), use_cache=False).logits
    return found


def spans(slots: list[int]) -> list[tuple[int, int, int]]:
    return [(at * LENGTH, (at + 1) * LENGTH, slot) for at, slot in enumerate(slots)]


def by_slots(slots: list[int]) -> torch.Tensor:
    return torch.tensor(slots).repeat_interleave(LENGTH)


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.allclose(one, other, rtol=1e-4, atol=1e-3 * float(other.abs().max())))


@pytest.fixture
def three(tmp_path: Path) -> tuple[Any, Adapters]:
    """A model with adapters of ranks 4, 2 and 8, of which the second changes queries and values only."""
    model = tiny_adapters.model()
    adapters = Adapters(model, slots_max=4)
    adapters.load("a", tiny_adapters.write(tmp_path / "a", seed=1, rank=4))
    adapters.load("b", tiny_adapters.write(tmp_path / "b", seed=2, rank=2, targets=tiny_adapters.SOME))
    adapters.load("c", tiny_adapters.write(tmp_path / "c", seed=3, rank=8))
    return model, adapters


def merged_three() -> list[Any]:
    return [
        tiny.reference("llama"),
        tiny_adapters.merged(1, 4),
        tiny_adapters.merged(2, 2, tiny_adapters.SOME),
        tiny_adapters.merged(3, 8),
    ]


@pytest.mark.parametrize("tell", [spans, by_slots])
def test_three_adapters_and_none_in_one_round_equal_merged_weights(three: Any, tell: Any) -> None:
    model, adapters = three
    slots = [1, 0, 3, 1, 2, 0, 2]
    adapters.choose(tell(slots))
    together = logits(model, list(range(len(slots))))
    whole = merged_three()
    for seed, slot in enumerate(slots):
        assert close(together[seed], logits(whole[slot], [seed])[0]), (seed, slot)
        assert slot == 0 or not close(together[seed], logits(whole[0], [seed])[0])


def test_few_rows_gather_and_many_are_masked_with_the_same_result(three: Any) -> None:
    model, adapters = three
    one = torch.tensor([[5, 6, 7]])
    for slots in ([1, 2, 3], [3, 3, 0]):
        adapters.choose(torch.tensor(slots))  # 3 rows, 4 slots: gathered
        with torch.inference_mode():
            few = model(input_ids=one, use_cache=False).logits
            adapters.choose(torch.tensor(slots * 2))  # 6 rows: masked
            many = model(input_ids=one.repeat(2, 1), use_cache=False).logits
            adapters.choose([(at, at + 1, slot) for at, slot in enumerate(slots)])
            expected = model(input_ids=one, use_cache=False).logits
        assert close(few, many[:1]) and close(few, expected)


def test_a_tensor_of_slots_is_read_when_the_pass_runs_again(three: Any) -> None:
    model, adapters = three
    slots = by_slots([0, 0])
    for chosen in ([1, 2], [3, 0]):
        slots.copy_(by_slots(chosen))
        adapters.choose(slots)
        found = logits(model, [0, 1])
        for seed, slot in enumerate(chosen):
            assert close(found[seed], logits(merged_three()[slot], [seed])[0])


def test_infinities_of_one_adapter_stay_with_its_rows(three: Any) -> None:
    model, adapters = three
    for layer in adapters._layers.values():
        layer.down[1] = torch.inf
    adapters.choose(by_slots([1, 2]))
    found = logits(model, [0, 1])
    assert not found[0].isfinite().all()
    assert close(found[1], logits(merged_three()[2], [1])[0])


def test_a_round_without_adapters_is_the_bare_model_to_the_bit(three: Any) -> None:
    model, adapters = three
    adapters.choose(spans([0, 0]))
    assert torch.equal(logits(model, [0, 1]), logits(tiny.reference("llama"), [0, 1]))
    adapters.choose([])
    assert torch.equal(logits(model, [0]), logits(tiny.reference("llama"), [0]))


def test_a_layer_without_a_user_in_the_round_is_not_multiplied(three: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, adapters = three
    touched: list[int] = []
    plain = torch.Tensor.addmm_
    monkeypatch.setattr(torch.Tensor, "addmm_", lambda out, *args, **k: touched.append(1) or plain(out, *args, **k))
    adapters.choose(spans([2]))
    logits(model, [0])
    assert len(touched) == 2 * len(tiny_adapters.SOME)  # two layers


def test_loading_and_dropping_while_others_are_served(three: Any, tmp_path: Path) -> None:
    model, adapters = three
    adapters.choose(spans([3]))
    before = logits(model, [9])
    assert adapters.drop("a")
    assert adapters.names() == ["b", "c"]
    version = adapters.version
    assert adapters.load("d", tiny_adapters.write(tmp_path / "d", seed=4)) == 1
    assert adapters.version == version  # nothing moved: the rank had room
    adapters.choose(spans([3, 1]))
    found = logits(model, [9, 10])
    assert close(found[:1], before)
    assert close(found[1], logits(tiny_adapters.merged(4), [10])[0])
    adapters.load("e", tiny_adapters.write(tmp_path / "e", seed=5, rank=16))
    assert adapters.version > version
    adapters.choose(spans([3, 4]))
    found = logits(model, [9, 10])
    assert close(found[:1], before)
    assert close(found[1], logits(tiny_adapters.merged(5, 16), [10])[0])


def test_adapters_can_be_loaded_and_dropped_in_inference_mode_and_outside(tmp_path: Path) -> None:
    model = tiny_adapters.model()
    adapters = Adapters(model)
    with torch.inference_mode():
        adapters.load("a", tiny_adapters.write(tmp_path / "a"))
    adapters.drop("a")
    adapters.load("a", tmp_path / "a")
    adapters.choose(spans([1]))
    assert close(logits(model, [0]), logits(tiny_adapters.merged(1), [0]))
    with torch.inference_mode():
        adapters.drop("a")
    assert torch.equal(logits(model, [0]), logits(tiny.reference("llama"), [0]))


def test_an_adapter_in_use_goes_with_its_last_request(three: Any, tmp_path: Path) -> None:
    model, adapters = three
    adapters.hold("a")
    adapters.hold("a")
    assert not adapters.drop("a")
    with pytest.raises(InputError, match="expected one of: b, c"):
        adapters.slot("a")
    with pytest.raises(LimitReached, match="2 requests still run"):
        adapters.load("a", tmp_path / "a")
    adapters.choose(spans([1]))
    assert close(logits(model, [0]), logits(tiny_adapters.merged(1), [0]))
    adapters.release("a")
    with pytest.raises(LimitReached, match="1 requests still run"):
        adapters.load("a", tmp_path / "a")
    adapters.release("a")
    assert torch.equal(logits(model, [0]), logits(tiny.reference("llama"), [0]))  # its slot is empty
    assert adapters.load("a", tmp_path / "a") == 1
    with pytest.raises(RuntimeError, match="more often"):
        adapters.release("a")


def test_each_load_has_a_salt_of_its_own(three: Any, tmp_path: Path) -> None:
    _, adapters = three
    salts = {adapters.salt(name) for name in adapters.names()}
    adapters.drop("a")
    adapters.load("a", tmp_path / "a")
    salts.add(adapters.salt("a"))
    assert len(salts) == 4


def test_slots_and_names_have_limits(three: Any, tmp_path: Path) -> None:
    _, adapters = three
    with pytest.raises(InputError, match="loaded already"):
        adapters.load("a", tmp_path / "a")
    with pytest.raises(InputError, match="letters, digits"):
        adapters.load("no spaces", tmp_path / "a")
    adapters.load("d", tmp_path / "a")
    with pytest.raises(LimitReached, match="all 4 slots"):
        adapters.load("e", tmp_path / "a")
    with pytest.raises(InputError, match="expected one of: a, b, c, d"):
        adapters.hold("e")


def test_memory_is_counted_and_only_touched_layers_have_some(tmp_path: Path) -> None:
    adapters = Adapters(tiny_adapters.model(), slots_max=2)
    assert sum(tensor.nbytes for tensor in adapters.tensors) == 0
    adapters.load("b", tiny_adapters.write(tmp_path / "b", rank=2, targets=("q_proj",)))
    assert (
        sum(tensor.nbytes for tensor in adapters.tensors) == 2 * 3 * 2 * (64 + 64) * 4
    )  # layers, slots with 0, rank, in and out, bytes


def test_an_adapter_of_another_model_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    model = tiny_adapters.model()
    adapters = Adapters(model)
    wide = tiny_adapters.write(tmp_path / "phi", family="phi", targets=("k_proj",))
    with pytest.raises(ModelError, match="found 64 inputs and 64 outputs, expected 64 and 32"):
        adapters.load("phi", wide)
    deep = tiny_adapters.write(tmp_path / "gemma3", family="gemma3", targets=("o_proj",))
    with pytest.raises(ModelError, match=r"layers\.2\.self_attn\.o_proj is no linear layer"):
        adapters.load("gemma3", deep)
    head = tiny_adapters.write(tmp_path / "head", targets=("lm_head",))
    with pytest.raises(ModelError, match="lm_head is no linear layer of this model that adapters can change"):
        adapters.load("head", head)
    assert adapters.names() == [] and sum(tensor.nbytes for tensor in adapters.tensors) == 0
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_layer_that_sees_other_rows_than_the_rounds_says_so(three: Any) -> None:
    model, adapters = three
    adapters.choose(spans([1]))
    with pytest.raises(ModelError, match="24 rows of a round of 12"):
        logits(model, [0, 1])


def test_parts_of_a_merged_layer_have_matrices_of_their_own(tmp_path: Path) -> None:
    fuse_linear = pytest.importorskip("weftline.engine.llm.fusion.linear")
    model = tiny_adapters.model("qwen2")
    for layer in model.model.layers:
        fuse_linear.merge(layer.self_attn, ("q_proj", "k_proj", "v_proj"), "qkv_proj")
        fuse_linear.merge(layer.mlp, ("gate_proj", "up_proj"), "gate_up_proj")
    adapters = Adapters(model, slots_max=3)
    adapters.load("all", tiny_adapters.write(tmp_path / "all", seed=1, family="qwen2"))
    adapters.load("kv", tiny_adapters.write(tmp_path / "kv", seed=2, targets=("k_proj", "v_proj"), family="qwen2"))
    whole = [
        tiny.reference("qwen2"),
        tiny_adapters.merged(1, family="qwen2"),
        tiny_adapters.merged(2, targets=("k_proj", "v_proj"), family="qwen2"),
    ]
    slots = [2, 1, 0]
    for tell in (spans, by_slots):
        adapters.choose(tell(slots))
        together = logits(model, [0, 1, 2])
        for seed, slot in enumerate(slots):
            assert close(together[seed], logits(whole[slot], [seed])[0]), (tell, slot)
    for tell in ([(0, 1, 1), (1, 2, 0), (2, 3, 2)], torch.tensor([1, 0, 2])):  # one row each: gathered
        adapters.choose(tell)
        with torch.inference_mode():
            found = model(input_ids=torch.tensor([[5], [6], [7]]), use_cache=False).logits
            for row, (slot, token) in enumerate(zip((1, 0, 2), (5, 6, 7), strict=True)):
                assert close(found[row], whole[slot](input_ids=torch.tensor([[token]])).logits[0]), (tell, slot)


def test_gpt2s_transposed_layers_are_linear_layers_too(tmp_path: Path) -> None:
    model = tiny_adapters.model("gpt2")
    target = model.transformer.h[0].attn.c_attn
    a, b = torch.randn(2, 64), torch.randn(192, 2)
    folder = tiny_adapters.write(tmp_path / "x", rank=2, targets=("c_attn",), fan_in_fan_out=True)
    from safetensors.torch import save_file

    path = "base_model.model.transformer.h.0.attn.c_attn"
    save_file({f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}, folder / "adapter_model.safetensors")
    adapters = Adapters(model)
    adapters.choose(spans([adapters.load("x", folder)]))
    found = logits(model, [0])
    adapters.drop("x")
    assert close(logits(model, [0]), logits(tiny.reference("gpt2"), [0]))
    target.weight.data += 2.0 * (b @ a).T
    assert close(found, logits(model, [0]))


@pytest.mark.parametrize("rslora", [False, True])
def test_the_result_is_pefts(tmp_path: Path, rslora: bool) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(4)
    config = peft.LoraConfig(
        r=4, lora_alpha=7, use_rslora=rslora, target_modules="all-linear", init_lora_weights=False,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    theirs = peft.get_peft_model(tiny_adapters.model(), config).eval()
    theirs.save_pretrained(tmp_path / "saved")
    model = tiny_adapters.model()
    adapters = Adapters(model)
    adapters.choose(spans([adapters.load("x", tmp_path / "saved")] * 2))
    found, expected = logits(model, [0, 1]), logits(theirs, [0, 1])
    assert close(found, expected)
    assert not close(expected, logits(tiny.reference("llama"), [0, 1]))


def engine(model: Any, fuse: bool) -> Engine:
    attention.register()
    ours = AutoModelForCausalLM.from_config(tiny.config("llama"), attn_implementation=attention.NAME)
    ours.load_state_dict(model.state_dict())
    return Engine(Runner(ours, RunnerOptions(page_tokens=8, kv_bytes=1 << 20, fuse=fuse)))


def answers(engine: Engine, asked: list[tuple[list[int], str]], tokens: int = 8) -> list[list[int]]:
    """Return the greedy answers to prompts, each with the adapter of that name, all computed together."""
    found: list[list[int]] = [[] for _ in asked]
    for at, (prompt, name) in enumerate(asked):
        engine.add(at, prompt, SamplingParams(tokens_max=tokens, ignore_eos=True), LlmRequestOptions(adapter=name))
    while engine.busy:
        for update in engine.step():
            assert update.error is None
            found[update.id] += update.tokens
    engine.check()
    return found


@pytest.mark.parametrize("fuse", [False, True])
def test_requests_of_three_adapters_share_rounds_and_keep_their_answers(tmp_path: Path, fuse: bool) -> None:
    serving = engine(tiny_adapters.model(), fuse)
    for name, seed, targets in (("a", 1, tiny_adapters.ALL), ("b", 2, tiny_adapters.SOME), ("c", 3, ("down_proj",))):
        serving.runner.load_adapter(name, tiny_adapters.write(tmp_path / name, seed, targets=targets))
    prompts = tiny.prompts(8, seed=5, longest=40)
    prompts[4:] = prompts[:4]  # the same beginnings under another adapter: nothing may be taken from the cache
    names = ["a", "b", "c", "", "b", "", "a", "c"]
    together = answers(serving, list(zip(prompts, names, strict=True)))
    alone = {
        "": tiny_adapters.model(),
        "a": tiny_adapters.merged(1),
        "b": tiny_adapters.merged(2, targets=tiny_adapters.SOME),
        "c": tiny_adapters.merged(3, targets=("down_proj",)),
    }
    for name, model in alone.items():
        ours = [at for at, other in enumerate(names) if other == name]
        assert [together[at] for at in ours] == answers(engine(model, fuse), [(prompts[at], "") for at in ours]), name
    assert len({tuple(answer) for answer in together}) == len(together)


def test_an_adapter_replaced_under_its_name_answers_anew(tmp_path: Path) -> None:
    serving, prompt = engine(tiny_adapters.model(), fuse=True), list(range(3, 40))
    serving.runner.load_adapter("a", tiny_adapters.write(tmp_path / "1", seed=1))
    first = answers(serving, [(prompt, "a")])
    adapters = serving.runner.adapters
    assert adapters is not None and adapters.drop("a")
    serving.runner.load_adapter("a", tiny_adapters.write(tmp_path / "2", seed=2))
    second = answers(serving, [(prompt, "a")])
    assert first == answers(engine(tiny_adapters.merged(1), True), [(prompt, "")])
    assert second == answers(engine(tiny_adapters.merged(2), True), [(prompt, "")]) != first


def test_a_dropped_adapter_answers_what_had_begun_and_nothing_new(tmp_path: Path) -> None:
    serving, prompt = engine(tiny_adapters.model(), fuse=False), [5, 6, 7]
    serving.runner.load_adapter("a", tiny_adapters.write(tmp_path / "a"))
    adapters = serving.runner.adapters
    assert adapters is not None
    serving.add(1, prompt, SamplingParams(tokens_max=8, ignore_eos=True), LlmRequestOptions(adapter="a"))
    found = [token for update in serving.step() for token in update.tokens]
    assert not adapters.drop("a")
    with pytest.raises(InputError, match="none is loaded"):
        serving.add(2, prompt, SamplingParams(tokens_max=8), LlmRequestOptions(adapter="a"))
    while serving.busy:
        found += [token for update in serving.step() for token in update.tokens]
    serving.runner.load_adapter("a", tiny_adapters.write(tmp_path / "b", seed=2))  # the slot is free
    assert [found] == answers(engine(tiny_adapters.merged(1), False), [(prompt, "")])
