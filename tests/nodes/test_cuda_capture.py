"""The fake graph repeats what a CUDA graph would, and real ones are recorded by calls in the right order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from weftline.engine.llm.gpu.fake_capture import FakeCapture
from weftline.nodes.cuda_capture import WARM_UPS, CudaCapture


@torch.inference_mode()
def test_a_replay_reads_its_tensors_anew_and_writes_the_same_result() -> None:
    given, memory = torch.arange(6.0), torch.zeros(8)

    def compute() -> torch.Tensor:
        doubled = given.view(2, 3).transpose(0, 1).reshape(6) * 2
        memory[torch.tensor([1, 3])] = doubled[:2]
        memory[4:6].copy_(doubled[2:4])
        return torch.cat((doubled, memory)).softmax(-1).topk(3).indices

    capture = FakeCapture()
    replay, result = capture.record(compute)
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
    replay, result = FakeCapture().record(lambda: given[: numbers["stop"]].sum() + numbers["stop"])
    numbers["stop"] = 4
    given.fill_(5)
    replay()
    assert result.item() == 5 + 5 + 2


@torch.inference_mode()
def test_reading_a_value_while_recording_raises() -> None:
    given = torch.ones(4)
    with pytest.raises(RuntimeError, match="read off the device"):
        FakeCapture().record(lambda: given[: int(given.sum())])


def test_a_fake_can_be_set_to_fail() -> None:
    capture = FakeCapture()
    capture.fail = True
    with pytest.raises(RuntimeError, match="set to fail"):
        capture.record(lambda: torch.ones(1))


class _Generator:
    """A device's random numbers, stuck in a capture or not."""

    def __init__(self, stuck: bool = False) -> None:
        self.stuck = stuck

    def clone_state(self) -> _Generator:
        return _Generator()

    def graphsafe_set_state(self, other: _Generator) -> None:
        self.stuck = other.stuck


class _Graph:
    """A CUDAGraph of torch 2.11: when the capture's end raises, the allocator stays in the pool."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local" and self._cuda.recording is None
        if pool in self._cuda.dead:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self._cuda.calls.append(f"begin in pool {pool} on {self._cuda.current}")
        self._cuda.recording, self._cuda.default_generators[0].stuck = pool, True

    def capture_end(self) -> None:
        self._cuda.calls.append("end")
        if self._cuda.invalid:
            raise RuntimeError("operation failed due to a previous error during capture")
        self._cuda.recording, self._cuda.default_generators[0].stuck = None, False

    def replay(self) -> None: ...


class Cuda:
    """What of `torch.cuda` recording uses.

    recording: the pool that the allocator is in.   invalid: the next captures cannot be ended.   dead: emptied pools.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.current, self.recording, self.invalid = "main", None, False
        self.default_generators = [_Generator()]
        self.dead: set[int] = set()
        self._streams = self._pools = 0

    def Stream(self) -> _Stream:
        self._streams += 1
        return _Stream(f"side {self._streams}")

    def CUDAGraph(self) -> _Graph:
        return _Graph(self)

    def current_stream(self) -> str:
        return self.current

    def current_device(self) -> int:
        return 0

    def graph_pool_handle(self) -> int:
        self._pools += 1
        return self._pools

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def empty_cache(self) -> None:
        assert self.recording is None, "captures_underway.empty() INTERNAL ASSERT FAILED"

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        yield

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    def leave_pool(self, index: int, pool: int) -> None:
        self.recording = None


class _Stream:
    def __init__(self, name: str) -> None:
        self.name = name

    def wait_stream(self, other: str) -> None: ...


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    monkeypatch.setattr(torch, "cuda", made)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.leave_pool, raising=False)
    return made


def _records(cuda: Cuda, recording: CudaCapture) -> list[str]:
    """Return the streams on which a computation ran while it was recorded."""
    streams: list[str] = []

    def compute() -> torch.Tensor:
        streams.append(cuda.current)
        return torch.ones(1)

    recording.record(compute)
    return streams


def test_graphs_share_one_stream_and_pool_and_get_a_new_pool_after_a_drop(
    cuda: Cuda,
) -> None:
    recording = CudaCapture(torch.device("cuda:0"))
    for _ in range(2):
        assert _records(cuda, recording) == ["side 1"] * (WARM_UPS + 1)
    recording.forget()
    cuda.dead.add(1)
    _records(cuda, recording)
    begun = [call for call in cuda.calls if call.startswith("begin")]
    assert begun == ["begin in pool 1 on side 1"] * 2 + ["begin in pool 2 on side 1"]
    assert cuda.current == "main"
    _records(cuda, CudaCapture(torch.device("cuda:0")))
    assert cuda.calls[-2] == "begin in pool 3 on side 2", "graphs of two models may run at the same time"


@pytest.mark.parametrize("where", ["in the computation", "at its end"])
def test_a_failed_capture_restores_stream_allocator_and_random_numbers(cuda: Cuda, where: str) -> None:
    recording = CudaCapture(torch.device("cuda:0"))
    cuda.invalid = True

    def compute() -> torch.Tensor:
        if where == "in the computation" and cuda.recording is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.ones(1)

    with pytest.raises(RuntimeError, match="not permitted" if where == "in the computation" else "previous error"):
        recording.record(compute)
    assert (cuda.current, cuda.recording, cuda.default_generators[0].stuck) == ("main", None, False)
    cuda.empty_cache()
    cuda.invalid = False
    _records(cuda, recording)
