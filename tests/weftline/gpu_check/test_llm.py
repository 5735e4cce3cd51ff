"""The parts of the LLM's check on a fake: they are right, and each notices a mistake that is planted in the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from weftline.engine.llm import quantised
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.gpu import models
from weftline.engine.llm.gpu.attention import PlainOps
from weftline.engine.llm.gpu.fake_capture import FakeCapture
from weftline.engine.llm.gpu.models import Setup
from weftline.engine.llm.runner import Runner
from weftline.gpu_check import llm as gpu_check
from weftline.gpu_check import llm_engine, llm_parts
from weftline.gpu_check.outcomes import CheckOutcome, Skipped, Wrong, outcome_from
from weftline.gpu_check.programs import LARGE, LLM_PARTS

CPU = torch.device("cpu")
FAKE = Setup(CPU, fake=True, quick=True)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_without_a_gpu_a_part_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_check, "why_not", lambda device: "torch finds no CUDA device")
    file = tmp_path / "outcome.json"
    assert gpu_check.main(["--only", "graphs", "--json", str(file)]) == 0
    assert outcome_from(json.loads(file.read_text())) == CheckOutcome("graphs", "skipped", "torch finds no CUDA device")
    assert "torch finds no CUDA device" in capsys.readouterr().out


def test_a_part_that_is_wrong_or_skipped_or_raises_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(error: Exception) -> object:
        def part(setup: Setup) -> dict[str, str]:
            raise error

        return part

    found = {
        "good": lambda setup: {"rate": f"{setup.quick}"},
        "wrong": raising(Wrong("3 of 4 differ")),
        "skipped": raising(Skipped("no fp8")),
        "broken": raising(RuntimeError("the driver is gone")),
    }
    monkeypatch.setattr(gpu_check, "parts", lambda: found)
    outcomes = [gpu_check.run_part(name, "fake:0", quick=True) for name in found]
    assert [(outcome.state, outcome.why) for outcome in outcomes] == [
        ("right", ""), ("wrong", "3 of 4 differ"), ("skipped", "no fp8"), ("wrong", "RuntimeError: the driver is gone"),
    ]  # fmt: skip
    assert outcomes[0].figures == {"rate": "True"}


def test_the_check_of_the_whole_gpu_knows_these_parts() -> None:
    assert [*gpu_check.parts()] == [*LLM_PARTS]
    assert set(LLM_PARTS) >= LARGE


def test_what_needs_a_card_is_skipped_on_a_fake() -> None:
    for name in ("kernels", "decode 8b", "profile 8b", "transformers 8b", "together 70b fp8"):
        with pytest.raises(Skipped, match="a fake cannot show it"):
            gpu_check.parts()[name](FAKE)


# parts below the engine


@pytest.mark.slow
def test_fused_and_unfused_models_agree() -> None:
    found = llm_parts.check_fused(FAKE) | llm_parts.check_families(FAKE)
    kinds = ("", "-qwen3", "-gemma2", "-mistral")
    assert set(found) == {f"small{kind} float32 {how}" for kind in kinds for how in ("fused", "unfused")}
    assert "2 layer, 1 model" in found["small float32 fused"]


@pytest.mark.slow
def test_a_rotary_kernel_that_is_off_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    rotate = PlainOps.rotate_and_write
    monkeypatch.setattr(PlainOps, "rotate_and_write", lambda self, query, *rest: rotate(self, query, *rest) * 1.01)
    with pytest.raises(Wrong, match="small float32 fused: logits differ by"):
        llm_parts.check_fused(FAKE)


def test_a_model_that_is_not_fused_or_not_whole_is_found_out() -> None:
    llm_parts.check_fusion("x", "fused: 5 norm, 2 layer, 1 model", {"layer": 2, "model": 1})
    for report in ("", "fused: nothing\nleft: 2 layer: the probe failed"):
        with pytest.raises(Wrong, match="x: fused only 0 of 2 layer"):
            llm_parts.check_fusion("x", report, {"layer": 2})
    with pytest.raises(Wrong, match=r"fused only 0 of 1 model\. left: 1 model: differs by 0.04"):
        llm_parts.check_fusion("x", "fused: 2 layer\nleft: 1 model: differs by 0.04", {"layer": 2, "model": 1})


@pytest.mark.slow
def test_nothing_fused_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "fuse", lambda model: "fused: nothing")
    with pytest.raises(Wrong, match="small float32 fused: fused only 0 of 5 norm"):
        llm_parts.compare_fused(FAKE, ("small",))


@pytest.mark.slow
def test_graphs_and_rounds_without_them_agree() -> None:
    assert llm_parts.check_graphs(FAKE) == {"batch 1": "12 rounds the same", "batch 3": "12 rounds the same"}


def fails_to_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(setup: Setup) -> FakeCapture:
        made = FakeCapture()
        made.fail = True
        return made

    monkeypatch.setattr(Setup, "capture", capture)


def test_a_graph_that_is_not_recorded_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_to_record(monkeypatch)
    with pytest.raises(Wrong, match="batch 1: not recorded"):
        llm_parts.check_graphs(FAKE)


@pytest.mark.slow
def test_decoding_ahead_gives_what_decoding_step_by_step_gives() -> None:
    newest = []
    for chained in (False, True):
        model = FAKE.build("small", torch.float32)
        made = models.Decoding(model, CPU, 3, 64, FakeCapture(), PlainOps(), fused=False)
        made.read([[5, 6, 7], [9] * 12, [3]])
        if chained:
            made.chain(9)
        else:
            made.decode(9)
        newest.append((made.newest, made.lengths))
    assert newest[0] == newest[1]
    assert newest[0][1] == [13, 22, 11]


@pytest.mark.slow
def test_a_model_made_layer_by_layer_is_fused_and_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[torch.nn.Linear] = []
    monkeypatch.setattr(quantised, "quantise_linear", lambda linear, form, device: changed.append(linear))
    made = models.Decoding(models.build_fp8("small", CPU, tiny=True), CPU, 2, 64, None, PlainOps())
    made.model.to(torch.float32)
    made.read([[5, 6, 7], [9] * 12])
    assert len(made.decode(3)[0]) == 3
    assert len(changed) == 2 * 4  # two layers: merged, o_proj, merged, down_proj
    assert made.report == "fused: 5 norm, 2 attention, 2 mlp, 2 layer, 1 model"


# parts that drive the engine

ENGINE_PARTS = {
    "refused prompt": llm_engine.check_refused,
    "KV resize": llm_engine.check_resize,
    "mixed rounds": llm_engine.check_rounds,
    "long prompt": llm_engine.check_long_prompt,
    "closed loop": llm_engine.time_together_8b,
}


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("name", [*ENGINE_PARTS])
def test_the_engine_is_right(name: str) -> None:
    found: Any = ENGINE_PARTS[name](FAKE)
    figures = found.figures if isinstance(found, CheckOutcome) else found
    assert any("answers exactly transformers'" in str(value) for value in figures.values())


def attends_wrongly(monkeypatch: pytest.MonkeyPatch, from_token: int = 0) -> None:
    """Spoil rounds in which a sequence is computed from `from_token` on, or later."""
    attend = PlainOps.attend

    def wrong(self: PlainOps, query: torch.Tensor, *rest: Any) -> torch.Tensor:
        starts = rest[4]
        return attend(self, query, *rest) * torch.where(starts.max() >= from_token, 0.2, 1.0)

    monkeypatch.setattr(PlainOps, "attend", wrong)


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("name", [*ENGINE_PARTS])
def test_attention_that_is_off_is_found_out(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    attends_wrongly(monkeypatch)
    with pytest.raises(Wrong, match=r"transformers' code has|differ from the CPU's"):
        ENGINE_PARTS[name](FAKE)


@pytest.mark.slow
def test_a_long_prompt_read_wrongly_beside_others_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    attends_wrongly(monkeypatch, from_token=100)
    with pytest.raises(Wrong, match="beside a long prompt: token"):
        llm_engine.check_long_prompt(FAKE)


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("name", [*ENGINE_PARTS])
def test_rounds_that_are_not_recorded_are_wrong_in_every_part(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fails_to_record(monkeypatch)
    with pytest.raises(Wrong, match="not recorded"):
        ENGINE_PARTS[name](FAKE)


def test_a_prompt_that_is_not_refused_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    add = Engine.add

    def takes_all(self: Engine, id: int, *given: Any, **options: Any) -> None:
        if id != 99:
            add(self, id, *given, **options)

    monkeypatch.setattr(Engine, "add", takes_all)
    with pytest.raises(Wrong, match="a prompt of 400 tokens was taken where pages hold 320"):
        llm_engine.check_refused(FAKE)


@pytest.mark.slow
def test_pages_that_are_lost_in_a_resize_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    resize = Runner.resize

    def forgets(self: Runner, pages: int) -> None:
        resize(self, pages)
        with torch.inference_mode():
            for layer in self._layers:
                layer.keys.zero_()

    monkeypatch.setattr(Runner, "resize", forgets)
    with pytest.raises(Wrong, match="after two resizes: token"):
        llm_engine.check_resize(FAKE)


@pytest.mark.slow
def test_draws_that_ignore_their_seed_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "weftline.engine.llm.gpu.graphs.draw_tokens", lambda logits, kind, settings: logits.argmax(dim=-1)
    )
    with pytest.raises(Wrong, match=r"drawn answers differ from the CPU's with the same seeds \(warm"):
        llm_engine.check_rounds(FAKE)


def test_a_model_that_says_the_same_after_each_sleep_is_right() -> None:
    found = llm_engine.check_sleep(FAKE)
    assert list(found) == ["small, sleep 1", "small, sleep 2"]
    assert all("given back, asleep in" in line for line in found.values())


def test_a_weight_that_does_not_come_back_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    wake = Runner.wake

    def forgets(self: Runner) -> None:
        wake(self)
        self.model.model.layers[0].mlp.down_proj.weight.data.zero_()

    monkeypatch.setattr(Runner, "wake", forgets)
    with pytest.raises(Wrong, match="small: it answers otherwise after sleep 1"):
        llm_engine.check_sleep(FAKE)


@pytest.mark.slow
def test_answers_are_those_of_transformers_own_generate() -> None:
    engine = llm_engine.open_engine(FAKE, FAKE.build("small", torch.float32), 1024, 4)
    prompts = models.made_prompts(3, 5, 40)
    loop = llm_engine.ClosedLoop(engine, 2).run(prompts, [llm_engine.greedy(9)] * 3)
    reference = FAKE.build("small", torch.float32, "sdpa")
    for prompt, answer in zip(prompts, loop.answers, strict=True):
        ids = torch.tensor([prompt])
        made = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
        assert made[0, len(prompt) :].tolist() == answer
