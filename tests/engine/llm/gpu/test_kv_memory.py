"""KV memory that changes its size under requests: in place on a (fake) device, by new tensors elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from tests.engine.llm import tiny
from weftline.engine.llm import attention
from weftline.engine.llm import runner as runner_module
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.fusion import layer as fuse_layer
from weftline.engine.llm.fusion import rows as fuse_rows
from weftline.engine.llm.gpu.fake_capture import FakeCapture
from weftline.engine.llm.kv_memory import TorchKvMemory
from weftline.engine.llm.model_loader import RunnerOptions
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.runner import Runner
from weftline.engine.llm.schedule import RoundLimits
from weftline.errors import ModelError
from weftline.shm.device.driver import DeviceOutOfMemory
from weftline.testing.fake_gpu.gpu import FakeGpu

MIB = 1 << 20
PAGES, MORE, FEWER = 1000, 5000, 90
"""One chunk of 2 MiB for each of the tensors, then three, then one again."""
TENSORS = 4


@pytest.fixture(autouse=True)
def _dispatched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse_rows, "_compiled", lambda: None)
    monkeypatch.setattr(fuse_layer, "_STEADY_ROPES", frozenset())


def _engine(monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu | None) -> Engine:
    """Return an engine of the GPU's form; gpu: device of its KV memory, None for torch's allocator."""
    attention.register()
    monkeypatch.setattr(runner_module, "kv_driver", lambda device: gpu)
    model = AutoModelForCausalLM.from_config(tiny.config("llama"), attn_implementation=attention.NAME)
    model.load_state_dict(tiny.reference("llama").state_dict())
    runner = Runner(model, RunnerOptions(page_tokens=8, context_max=96, form="gpu", kv_bytes=PAGES * 8 * 512))
    assert runner.graphs is not None and len(runner._layers) * 2 == TENSORS
    runner.graphs.capture, runner.graphs.sizes = FakeCapture(), (1, 4, 8, 16, 48)
    return Engine(runner, None, RoundLimits(48, 6))


def _answers(engine: Engine, at_step: Callable[[int], None] = lambda step: None) -> list[list[int]]:
    prompts = tiny.prompts(8, seed=12, longest=60)
    answers: list[list[int]] = [[] for _ in prompts]
    for at, prompt in enumerate(prompts):
        engine.add(at, prompt, SamplingParams(tokens_max=12, ignore_eos=True, temperature=0.8, seed=at))
    step = 0
    while engine.busy:
        at_step(step)
        for update in engine.step():
            assert update.error is None
            answers[update.id] += update.tokens
        engine.check()
        step += 1
    return answers


def _addresses(engine: Engine) -> list[int]:
    return [tensor.data_ptr() for layer in engine.runner._layers for tensor in (layer.keys, layer.values)]


def _sizes(engine: Engine) -> set[int]:
    return {tensor.shape[1] for layer in engine.runner._layers for tensor in (layer.keys, layer.values)}


def test_graphs_and_addresses_survive_a_resize_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    plain, engine = _answers(_engine(monkeypatch, None)), _engine(monkeypatch, gpu)
    addresses, free = _addresses(engine), gpu.memory()[0]
    recorded: list[tuple[int, ...]] = []

    def resize(step: int) -> None:
        assert engine.runner.graphs is not None
        if step in (4, 8, 12):
            before = engine.runner.graphs.recorded
            assert before
            engine.resize({4: MORE, 8: FEWER, 12: PAGES}[step])
            recorded.append(before)
            assert engine.runner.graphs.recorded == before
            assert free - gpu.memory()[0] == (2 * 2 * MIB * TENSORS if step == 4 else 0)

    assert _answers(engine, resize) == plain
    assert len(recorded) == 3 and _addresses(engine) == addresses


@pytest.mark.parametrize("chunks_free", range(2 * TENSORS))
def test_a_growth_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch, chunks_free: int) -> None:
    plain = _answers(_engine(monkeypatch, None))
    gpu = FakeGpu(total_bytes=(TENSORS + chunks_free) * 2 * MIB)
    engine = _engine(monkeypatch, gpu)

    def grow(step: int) -> None:
        if step == 5:
            with pytest.raises(DeviceOutOfMemory):
                engine.resize(MORE)
            assert gpu.memory()[0] == chunks_free * 2 * MIB
            assert engine.runner.graphs is not None and engine.runner.graphs.recorded

    assert _answers(engine, grow) == plain
    assert (engine.runner.pages, _sizes(engine)) == (PAGES, {PAGES * 8})


@pytest.mark.parametrize("failing", range(TENSORS))
@pytest.mark.parametrize("pages", [MORE, FEWER])
def test_tensors_that_cannot_move_stay_usable(monkeypatch: pytest.MonkeyPatch, pages: int, failing: int) -> None:
    plain, engine = _answers(_engine(monkeypatch, None)), _engine(monkeypatch, None)
    resize, calls = TorchKvMemory.resize, []

    def short(memory: TorchKvMemory, slots: int) -> torch.Tensor:
        calls.append(slots)
        if len(calls) == failing + 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 MiB")
        return resize(memory, slots)

    def change(step: int) -> None:
        if step != 5:
            return
        with monkeypatch.context() as patched:
            patched.setattr(TorchKvMemory, "resize", short)
            if pages == MORE:
                with pytest.raises(torch.OutOfMemoryError):
                    engine.resize(pages)
            else:
                engine.resize(pages)

    assert _answers(engine, change) == plain
    expected = PAGES if pages == MORE else FEWER
    assert (engine.runner.pages, _sizes(engine)) == (expected, {expected * 8})


class FailAt(TorchDispatchMode):
    """Fail at the n-th operation of torch or call of the driver inside; `calls`: how many there were."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.calls, self._at = 0, at

    def count(self, error: Exception) -> None:
        self.calls += 1
        if self.calls == self._at:
            raise error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:  # views take no memory and run nothing
            self.count(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 MiB"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("in_place", [True, False], ids=["virtual", "moved"])
@pytest.mark.parametrize("pages", [MORE, FEWER])
def test_a_resize_that_fails_anywhere_leaves_answers_slots_and_graphs(
    monkeypatch: pytest.MonkeyPatch, pages: int, in_place: bool
) -> None:
    plain, gpu = _answers(_engine(monkeypatch, None)), FakeGpu()
    engine = _engine(monkeypatch, gpu if in_place else None)
    create, map, failing = gpu.create, gpu.map, FailAt(0)
    full = DeviceOutOfMemory("cuMemCreate", 2, "out of memory")
    monkeypatch.setattr(gpu, "create", lambda *given: failing.count(full) or create(*given))
    monkeypatch.setattr(gpu, "map", lambda *given: failing.count(full) or map(*given))
    free, failed, runner_resize = gpu.memory()[0], [], engine.runner.resize

    def failing_resize(pages: int) -> None:
        with failing:
            runner_resize(pages)

    monkeypatch.setattr(engine.runner, "resize", failing_resize)

    def resize(step: int) -> None:  # each step of the answers tries it with one more operation that works
        nonlocal failing
        graphs = engine.runner.graphs
        assert graphs is not None
        if engine.runner.pages != PAGES:
            engine.resize(PAGES)  # rounds were computed since
            return
        before = graphs.recorded
        failing = FailAt(len(failed) + 1)
        try:
            engine.resize(pages)
            done = pages
        except (torch.OutOfMemoryError, DeviceOutOfMemory):
            done = PAGES
        failing = FailAt(0)
        failed.append(done == PAGES)
        assert (engine.runner.pages, _sizes(engine)) == (done, {done * 8})
        assert gpu.memory()[0] == free or done == MORE
        assert graphs.recorded == (before if in_place else ())

    assert _answers(engine, resize) == plain
    if pages == MORE:  # all of its operations have failed once, and it worked with none that does
        assert failed[0] and not failed[-1] and failed == sorted(failed, reverse=True)
    else:
        assert not any(failed)  # what cannot be given back is kept, and not used


def test_pages_that_cannot_be_bound_when_it_wakes_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    engine = _engine(monkeypatch, gpu)
    plain, free = _answers(engine), gpu.memory()[0]
    engine.sleep()
    empty = gpu.memory()[0]
    create, calls = gpu.create, []

    def short(size_bytes: int) -> int:
        calls.append(size_bytes)
        if len(calls) == TENSORS:
            raise DeviceOutOfMemory("cuMemCreate", 2, "out of memory")
        return create(size_bytes)

    monkeypatch.setattr(gpu, "create", short)
    with pytest.raises(ModelError, match="cannot be reserved"):
        engine.wake()
    assert gpu.memory()[0] == empty and empty > free
    engine.runner.bind_pages(engine.runner.pages)
    assert gpu.memory()[0] == free and _answers(engine) == plain


def test_memory_that_was_released_is_bound_again_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    engine = _engine(monkeypatch, gpu)
    free = gpu.memory()[0]
    plain = _answers(engine)
    engine.clear_prefixes()
    engine.runner.release_pages()
    assert gpu.memory()[0] - free == TENSORS * 2 * MIB
    engine.runner.bind_pages(PAGES)
    assert _answers(engine) == plain
