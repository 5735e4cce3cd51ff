"""The GPU's check says why it skips, keeps its parts apart, and its comparisons hold on a CPU and notice mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from weftline.engine.gpu_check.programs import LLM_PARTS
from weftline.engine.gpu_check.running import Outcome, outcome_from
from weftline.engine.llm import quantised
from weftline.engine.llm.fusion import layer as fuse_layer
from weftline.engine.llm.fusion import rows as fuse_rows
from weftline.engine.llm.gpu import check as gpu_check
from weftline.engine.llm.gpu import models as gpu_models
from weftline.engine.llm.gpu import parts as gpu_parts
from weftline.engine.llm.gpu.capture import FakeCapture
from weftline.engine.llm.gpu.plain import PlainOps

CPU = torch.device("cpu")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller models, and nothing outside of torch's dispatcher, which fakes could not record."""
    torch.set_num_threads(1)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 4096}
    small = {
        name: (family, {**given, **sizes, **({"head_dim": 16} if "head_dim" in given else {})})
        for name, (family, given) in gpu_models.SHAPES.items()
        if name.startswith("small")
    }
    monkeypatch.setattr(gpu_models, "SHAPES", small)
    monkeypatch.setattr(gpu_parts, "SHAPES", small)
    monkeypatch.setattr(fuse_rows, "_compiled", lambda: None)
    monkeypatch.setattr(fuse_layer, "_STEADY_ROPES", frozenset())


def test_without_a_gpu_every_part_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_check, "why_not", lambda: "torch finds no CUDA device")
    assert gpu_check.main(["--json", str(tmp_path / "out.json")]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [part["name"] for part in report["parts"]] == list(gpu_check.parts())
    assert {(part["state"], part["why"]) for part in report["parts"]} == {("skipped", "torch finds no CUDA device")}
    assert json.loads((tmp_path / "out.json").read_text()) == report


def test_a_part_that_is_wrong_or_skipped_or_raises_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(error: Exception) -> object:
        def part(quick: bool) -> dict[str, str]:
            raise error

        return part

    found = {
        "good": lambda quick: {"rate": f"{quick}"},
        "wrong": raising(gpu_parts.Wrong("3 of 4 differ")),
        "skipped": raising(gpu_parts.Skipped("no fp8")),
        "broken": raising(RuntimeError("the driver is gone")),
    }
    monkeypatch.setattr(gpu_check, "parts", lambda: found)
    outcomes = [gpu_check.run_part(name, True) for name in found]
    assert [(outcome.state, outcome.why) for outcome in outcomes] == [
        ("right", ""), ("wrong", "3 of 4 differ"), ("skipped", "no fp8"), ("wrong", "RuntimeError: the driver is gone"),
    ]  # fmt: skip
    assert outcomes[0].figures == {"rate": "True"}


def test_one_wrong_part_hides_none_of_the_others_and_decides_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "why_not", lambda: None)
    monkeypatch.setattr(
        gpu_check, "run_apart",
        lambda name, quick: gpu_check.Outcome(name, "wrong" if name == "fused" else "right", figures={"a": "1 tok/s"}),
    )  # fmt: skip
    assert gpu_check.main(["--only", "kernels", "fused", "graphs"]) == 1
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines() if not line.startswith((" ", "{"))] == [
        ["kernels", "right"], ["fused", "wrong"], ["graphs", "right"],
    ]  # fmt: skip


def test_the_check_of_the_whole_gpu_knows_these_parts_and_takes_their_outcomes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert [*gpu_check.parts()] == [*LLM_PARTS]
    monkeypatch.setattr(gpu_check, "why_not", lambda: "torch finds no CUDA device")
    file = tmp_path / "outcome.json"
    assert gpu_check.main(["--part", "graphs", "--json", str(file)]) == 0
    assert outcome_from(json.loads(file.read_text())) == Outcome("graphs", "skipped", "torch finds no CUDA device")


@pytest.mark.usefixtures("tiny")
def test_fused_and_unfused_models_agree() -> None:
    found = gpu_parts.check_fused(False, CPU, (torch.float32,), PlainOps())
    kinds = ("", "-qwen3", "-gemma2", "-mistral")
    assert set(found) == {f"small{kind} float32 {how}" for kind in kinds for how in ("fused", "unfused")}
    assert "2 layer, 1 model" in found["small float32 fused"]


@pytest.mark.usefixtures("tiny")
def test_a_rotary_kernel_that_is_off_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = PlainOps.turn_and_write
    monkeypatch.setattr(
        PlainOps, "turn_and_write", lambda self, query, *rest: turn(self, query, *rest) * 1.01
    )  # fmt: skip
    with pytest.raises(gpu_parts.Wrong, match="small float32 fused: logits differ by"):
        gpu_parts.check_fused(True, CPU, (torch.float32,), PlainOps())


@pytest.mark.usefixtures("tiny")
def test_graphs_and_rounds_without_them_agree() -> None:
    assert gpu_parts.check_graphs(True, CPU, FakeCapture(), PlainOps()) == {
        "batch 1": "12 rounds the same", "batch 3": "12 rounds the same",
    }  # fmt: skip


@pytest.mark.usefixtures("tiny")
def test_a_graph_that_is_not_recorded_is_wrong() -> None:
    capture = FakeCapture()
    capture.fail = True
    with pytest.raises(gpu_parts.Wrong, match="not recorded"):
        gpu_parts.check_graphs(True, CPU, capture, PlainOps())


@pytest.mark.usefixtures("tiny")
def test_decoding_ahead_gives_what_decoding_step_by_step_gives() -> None:
    newest = []
    for chained in (False, True):
        made = gpu_models.Decoding(gpu_models.build("small", CPU, torch.float32), CPU, 3, 64, FakeCapture(), PlainOps())
        made.read([[5, 6, 7], [9] * 12, [3]])
        if chained:
            made.chain(9)
        else:
            made.decode(9)
        newest.append((made.newest, made.lengths))
    assert newest[0] == newest[1]
    assert newest[0][1] == [13, 22, 11]


@pytest.mark.usefixtures("tiny")
def test_a_model_made_layer_by_layer_is_fused_and_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[torch.nn.Linear] = []
    monkeypatch.setattr(quantised, "quantise_linear", lambda linear, form, device: changed.append(linear))
    made = gpu_models.Decoding(gpu_models.build_fp8("small", CPU), CPU, 2, 64, None, PlainOps())
    made.model.to(torch.float32)
    made.read([[5, 6, 7], [9] * 12])
    assert len(made.decode(3)[0]) == 3
    assert len(changed) == 2 * 4  # two layers: merged, o_proj, merged, down_proj
    assert made.report == "fused: 5 norm, 2 attention, 2 mlp, 2 layer, 1 model"
