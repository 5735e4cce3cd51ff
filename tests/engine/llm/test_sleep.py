"""Models that rest: nothing of the device is left to them, and awake they say what they said before.

Weights are moved here although the device is the CPU: what is emptied and filled is its memory then.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from tests.engine.llm import tiny, tiny_adapters
from weftline.engine.llm import attention, sleep
from weftline.engine.llm.cpu.attention import CpuAttention
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.fusion import layer as fuse_layer
from weftline.engine.llm.fusion import rows as fuse_rows
from weftline.engine.llm.gpu.attention import GpuAttention
from weftline.engine.llm.gpu.fake_capture import FakeCapture
from weftline.engine.llm.heads import Embedding, _HeadModel
from weftline.engine.llm.model_loader import RunnerOptions
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.quantised import weight_bytes
from weftline.engine.llm.request import LlmRequestOptions
from weftline.engine.llm.runner import Runner
from weftline.engine.llm.sampling.sampler import Sampler
from weftline.engine.llm.schedule import RoundLimits
from weftline.engine.llm.sleep import OffloadedTensors
from weftline.engine.llm.speculation import DraftModelProposer, Speculation
from weftline.errors import ModelError

CPU = torch.device("cpu")
PROMPT = list(range(3, 60))


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are moved, and computed with as on a GPU: code compiled for CPUs sees them as arrays, which pins them."""
    monkeypatch.setattr(fuse_rows, "_compiled", lambda: None)
    monkeypatch.setattr(fuse_layer, "_STEADY_ROPES", frozenset())
    monkeypatch.setattr("weftline.engine.llm.runner.has_own_memory", lambda device: True)
    monkeypatch.setattr(sleep, "HOST_BUFFER_BYTES", 10_000)  # so that tensors lie across pieces


def answer(engine: Engine, adapter: str = "") -> list[int]:
    engine.add(1, PROMPT, SamplingParams(tokens_max=12, ignore_eos=True), LlmRequestOptions(adapter=adapter))
    found: list[int] = []
    while engine.busy:
        for update in engine.step():
            assert update.error is None
            found += update.tokens
    return found


def left_bytes(engine: Engine) -> int:
    """Return what tensors take that can be reached from an engine, each memory once; those on the host's side apart."""
    form, graphs = engine.runner._backend, engine.runner.graphs
    host = [*form.buffers._hosts] if isinstance(form, GpuAttention) else []
    host += [piece for piece, _ in graphs._results] if graphs is not None else []
    known = {one.data_ptr() for one in host}
    seen, found, todo = set[int](), dict[int, int](), [engine]
    while todo:
        one: Any = todo.pop()
        if id(one) in seen or isinstance(one, type | types.ModuleType | OffloadedTensors | CpuAttention):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor) and not hasattr(one, "__tensor_flatten__"):
            memory = one.untyped_storage()
            if memory.nbytes() and one.device.type == "cpu" and memory.data_ptr() not in known:
                found[memory.data_ptr()] = memory.nbytes()
        held = [*(one.__closure__ or ()), one.__defaults__] if isinstance(one, types.FunctionType) else None
        todo += gc.get_referents(one) if held is None else held
    return sum(found.values())


def test_tensors_stay_who_they_are_and_have_their_bytes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleep, "HOST_BUFFER_BYTES", 1000)
    whole = torch.randn(37, 41)
    kept = [whole, whole[3:9], whole.T, torch.arange(300).to(torch.int8), torch.randn(5).bfloat16(), torch.tensor(2.5)]
    buffer = torch.ones(77, dtype=torch.int32)
    before = [tensor.clone() for tensor in kept]
    offloaded = OffloadedTensors.offload(CPU, kept, [buffer])
    assert offloaded.host_bytes == 37 * 41 * 4 + 300 + 10 + 4 == sum(piece.numel() for piece in offloaded.buffers)
    assert not any(tensor.untyped_storage().nbytes() for tensor in (*kept, buffer))
    offloaded.restore()
    assert all(torch.equal(*pair) for pair in zip(kept, before, strict=True))
    assert torch.equal(buffer, torch.zeros(77, dtype=torch.int32))
    whole[3, 0] = 7.0
    assert kept[1][0, 0] == 7.0, "a slice lies where it lay"
    assert offloaded.buffers == []


def test_a_host_without_memory_for_all_of_it_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def host_piece(size: int, locked: bool) -> torch.Tensor:
        made.append(size)
        if len(made) == 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(sleep, "HOST_BUFFER_BYTES", 1000)
    monkeypatch.setattr(sleep, "_host_buffer", host_piece)
    tensor = torch.arange(1000.0)
    with pytest.raises(RuntimeError, match="allocate"):
        OffloadedTensors.offload(CPU, [tensor])
    assert torch.equal(tensor, torch.arange(1000.0))


def _plain(folder: Path) -> Engine:
    return Engine(tiny.fresh_runner("llama"), None, RoundLimits(32, 4))


def _tied(folder: Path) -> Engine:
    """Gemma's output layer is its embedding, and its norms add one to their weights."""
    return Engine(tiny.fresh_runner("gemma2"), None, RoundLimits(32, 4))


def _graphs(folder: Path) -> Engine:
    runner = tiny.fresh_runner("qwen3", form="gpu")
    assert runner.graphs is not None
    runner.graphs.capture = FakeCapture()
    return Engine(runner, None, RoundLimits(32, 4))


def _adapter(folder: Path) -> Engine:
    engine = _graphs(folder)
    engine.runner.load_adapter("poems", tiny_adapters.write(folder / "poems", family="qwen3"))
    return engine


def _drafting(folder: Path) -> Engine:
    small = tiny.fresh_runner("llama", 40)
    proposer = DraftModelProposer(small, Sampler(small.ends, small.vocabulary))
    return Engine(tiny.fresh_runner("llama"), None, RoundLimits(32, 4), speculation=Speculation(proposer))


def _quantised(form: str) -> Callable[[Path], Engine]:
    def make(folder: Path) -> Engine:
        pytest.importorskip("torchao")
        attention.register()
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(tiny.config("llama"), attn_implementation=attention.NAME)
        model = model.bfloat16() if form == "int4" else model
        return Engine(Runner(model, RunnerOptions(page_tokens=8, kv_bytes=1 << 20, weights=form)), None)

    return make


MODELS = {
    "plain": _plain, "tied": _tied, "graphs": _graphs, "adapter": _adapter, "drafting": _drafting,
    "int8": _quantised("int8"), "int4": _quantised("int4"),
}  # fmt: skip


@pytest.mark.slow(but_first=1)
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("kind", MODELS)
def test_asleep_a_model_has_nothing_left_and_awake_it_answers_as_before(kind: str, tmp_path: Path) -> None:
    engine = MODELS[kind](tmp_path)
    adapter = "poems" if kind == "adapter" else ""
    first, pages = answer(engine, adapter), engine.runner.pages
    recorded = engine.runner.graphs.recorded if engine.runner.graphs is not None else ()
    assert bool(recorded) == (kind in ("graphs", "adapter"))
    awake = left_bytes(engine)
    assert awake > weight_bytes(engine.runner.model)
    for _ in range(2):
        engine.sleep()
        assert engine.runner.asleep
        assert left_bytes(engine) == 0
        assert engine.runner.graphs is None or engine.runner.graphs.recorded == ()
        engine.wake()
        assert engine.runner.pages == pages
        assert answer(engine, adapter) == first
        engine.check()
        assert recorded == (engine.runner.graphs.recorded if engine.runner.graphs is not None else ())
    if kind == "adapter":
        assert answer(engine) != first


@pytest.mark.usefixtures("elsewhere")
def test_a_model_with_a_head_sleeps_and_drops_partly_pooled_prompts() -> None:
    attention.register()
    torch.manual_seed(4)
    decoder = AutoModel.from_config(tiny.config("llama"), attn_implementation=attention.NAME)
    runner = Runner(_HeadModel(decoder, None), RunnerOptions(page_tokens=8, kv_bytes=1 << 18))
    runner.head = Embedding(64, "mean")
    engine = Engine(runner, None, RoundLimits(32, 4))

    def embedded() -> np.ndarray:
        engine.add(1, PROMPT, SamplingParams(), LlmRequestOptions(pool=True))
        return [update.pooled for _ in range(2) for update in engine.step()][-1]

    first = embedded()
    engine.add(2, PROMPT, SamplingParams(), LlmRequestOptions(pool=True))
    engine.step()
    engine.cancel(2)
    engine.sleep()
    assert left_bytes(engine) == 0
    engine.wake()
    assert np.array_equal(embedded(), first)


@pytest.mark.usefixtures("elsewhere")
def test_sleep_clears_the_prefix_cache() -> None:
    engine = _plain(Path())
    answer(engine)
    assert engine.stats().pages_idle > 0
    engine.sleep()
    engine.wake()
    stats = engine.stats()
    assert (stats.pages_idle, stats.pages_used, stats.pages_free) == (0, 0, engine.runner.pages)
    answer(engine)
    assert engine.stats().prefix_hit_tokens == 0


def test_a_memory_that_has_grown_is_as_large_as_at_first_when_it_wakes() -> None:
    engine = _plain(Path())
    first = answer(engine)
    engine.resize(200)
    engine.sleep()
    engine.wake()
    assert engine.runner.pages == engine.stats().pages_free == 64
    assert all(layer.keys is not None and layer.keys.shape[1] == 64 * 8 for layer in engine.runner._layers)
    assert answer(engine) == first


def test_with_requests_inside_it_does_not_sleep_and_asleep_it_takes_none() -> None:
    engine = _plain(Path())
    engine.add(1, PROMPT, SamplingParams(tokens_max=3, ignore_eos=True))
    engine.step()
    engine.pause(1)
    with pytest.raises(RuntimeError, match="1 requests are inside"):
        engine.sleep()
    engine.resume(1)
    while engine.busy:
        engine.step()
    engine.sleep()
    with pytest.raises(RuntimeError, match="sleeps"):
        answer(engine)
    engine.wake()
    with pytest.raises(RuntimeError, match="does not sleep"):
        engine.wake()


@pytest.mark.usefixtures("elsewhere")
def test_sleep_waits_for_a_round_in_flight_of_cancelled_requests() -> None:
    engine = _graphs(Path())
    first = answer(engine)
    engine.add(1, PROMPT, SamplingParams(tokens_max=12, ignore_eos=True))
    while engine._in_flight is None:
        engine.step()
    engine.cancel(1)
    engine.sleep()
    engine.wake()
    assert not engine.busy
    assert answer(engine) == first


@pytest.mark.usefixtures("elsewhere")
def test_a_device_that_others_have_filled_meanwhile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _plain(Path())
    engine.sleep()

    def full(offloaded: OffloadedTensors) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(OffloadedTensors, "restore", full)
    with pytest.raises(ModelError, match="do not fit on cpu any more"):
        engine.wake()
