"""The fake graph repeats what a CUDA graph would: the same operations with the numbers they were given."""

from __future__ import annotations

import pytest
import torch

from weftline.engine.llm.gpu.capture import FakeCapture


def nothing() -> None:
    pass


@torch.inference_mode()
def test_a_replay_reads_its_tensors_anew_and_writes_the_same_result() -> None:
    given, memory = torch.arange(6.0), torch.zeros(8)

    def compute() -> torch.Tensor:
        doubled = given.view(2, 3).transpose(0, 1).reshape(6) * 2
        memory[torch.tensor([1, 3])] = doubled[:2]
        memory[4:6].copy_(doubled[2:4])
        return torch.cat((doubled, memory)).softmax(-1).topk(3).indices

    capture = FakeCapture()
    replay, result = capture.record(compute, nothing)
    for seed in range(3):
        given.copy_(torch.rand(6, generator=torch.Generator().manual_seed(seed)))
        before = memory.clone()
        replay()
        ours, ours_memory = result.clone(), memory.clone()
        memory.copy_(before)
        assert torch.equal(compute(), ours)
        assert torch.equal(memory, ours_memory)
    assert capture.recorded == 1


@torch.inference_mode()
def test_a_python_number_stays_what_it_was() -> None:
    given, numbers = torch.ones(4), {"stop": 2}
    replay, result = FakeCapture().record(lambda: given[: numbers["stop"]].sum() + numbers["stop"], nothing)
    numbers["stop"] = 4
    given.fill_(5)
    replay()
    assert result.item() == 5 + 5 + 2


@torch.inference_mode()
def test_reading_a_value_while_recording_raises() -> None:
    given = torch.ones(4)
    with pytest.raises(RuntimeError, match="read off the device"):
        FakeCapture().record(lambda: given[: int(given.sum())], nothing)


@torch.inference_mode()
def test_prepare_comes_before_every_run_and_after_the_last() -> None:
    state = torch.zeros(1)
    seen = []

    def compute() -> torch.Tensor:
        seen.append(state.clone())
        state.add_(1)
        return state * 10

    replay, result = FakeCapture().record(compute, lambda: state.zero_() and None)
    assert state.item() == 0
    replay()
    replay()
    assert (state.item(), result.item()) == (2, 20)
    assert len(seen) == 2


def test_a_fake_can_be_told_to_fail() -> None:
    capture = FakeCapture()
    capture.fail = True
    with pytest.raises(RuntimeError, match="told to fail"):
        capture.record(lambda: torch.ones(1), nothing)
