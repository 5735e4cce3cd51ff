"""KV memory of a step alone on its GPU: what is left after the largest round. The GPU is made up, the model is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.engine.llm import tiny
from weftline.engine.llm import kv_sizing
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.kv_sizing import BLOCK_BYTES, WORK_BYTES, compute_largest, fill_device, keep_room
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.runner import Runner
from weftline.engine.llm.schedule import RoundLimits
from weftline.errors import ModelError
from weftline.nodes.contract import DeviceMemoryLimit

MIB, GIB = 1 << 20, 1 << 30
LIMITS = RoundLimits(60, 7)


class Gpu:
    """A device of `total` bytes: others have some, weights some, pages what runners have; a round takes `work`."""

    def __init__(self, runners: list[Runner], total: int, others: int = 0, weights: int = GIB, work: int = 0) -> None:
        self.runners, self.total, self.others, self.weights, self.work = runners, total, others, weights, work

    def free(self) -> int:
        return self.total - self.others - self.held()

    def held(self) -> int:
        has = (runner for runner in self.runners if runner._layers[0].keys is not None)
        return self.weights + sum(runner.pages * runner.page_bytes for runner in has)

    def peak(self, compute: Callable[[], None]) -> int:
        compute()
        return self.work


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr(kv_sizing, "USES", 1 << 30)
    return tiny.fresh_runner("llama", 4, form="gpu")


def test_kv_memory_leaves_the_reserve_and_the_work_of_two_rounds_free(small):
    work, spared = 50 * MIB, WORK_BYTES + 2 * 2 * BLOCK_BYTES
    gpu = Gpu([small], 2 * GIB, work=work)
    fill_device([small], LIMITS, DeviceMemoryLimit(2 * GIB - 300 * MIB, 300 * MIB), gpu)
    left = GIB - 300 * MIB - 2 * work - spared
    assert left - small.page_bytes < small.pages * small.page_bytes <= left
    assert gpu.free() >= 300 * MIB + 2 * work


@pytest.mark.parametrize("bound", ["its room", "what is free"])
def test_the_lesser_of_its_room_and_what_is_free_counts(small, bound):
    room = 2 * GIB - 500 * MIB if bound == "its room" else 1 << 40
    gpu = Gpu([small], 2 * GIB, others=500 * MIB if bound == "what is free" else 0)
    fill_device([small], LIMITS, DeviceMemoryLimit(room, 0), gpu)
    left = GIB - 500 * MIB - WORK_BYTES - 4 * BLOCK_BYTES
    assert left - small.page_bytes < small.pages * small.page_bytes <= left


def test_prompts_that_the_first_memory_would_have_refused_are_answered(small):
    before = small.pages * small.page_tokens
    fill_device([small], LIMITS, DeviceMemoryLimit(2 * GIB, 0), Gpu([small], 2 * GIB, others=700 * MIB))
    engine = Engine(small, None, LIMITS)
    prompt = [3 + at % 90 for at in range(3 * before)]
    (answer,) = engine.generate([prompt], SamplingParams(tokens_max=4, ignore_eos=True))
    assert tiny.continues("llama", prompt, answer, 4) is not False


def test_a_draft_model_gets_its_part(small):
    draft = tiny.fresh_runner("llama", 1, form="gpu")
    fill_device([small, draft], LIMITS, DeviceMemoryLimit(2 * GIB, 0), Gpu([small, draft], 2 * GIB, others=500 * MIB))
    assert abs(small.pages / draft.pages - 4) < 0.01


def test_a_small_model_takes_no_more_than_it_can_use():
    runner = tiny.fresh_runner("llama", 4, form="gpu")
    fill_device([runner], LIMITS, DeviceMemoryLimit(1 << 40, 0), Gpu([runner], 1 << 40))
    assert runner.pages == 2 * 7 * 64


def test_where_nothing_is_left_it_keeps_what_it_opened_with(small):
    fill_device([small], LIMITS, DeviceMemoryLimit(GIB, 0), Gpu([small], 2 * GIB))
    assert small.pages == 4


def test_memory_in_pieces_gives_a_little_less_and_none_at_all_is_an_error(small, monkeypatch):
    bind, tried = small._bind, []

    def refuses() -> None:
        tried.append(small.pages)
        if len(tried) < 3:
            raise ModelError("no memory")
        bind()

    monkeypatch.setattr(small, "_bind", refuses)
    room, gpu = DeviceMemoryLimit(2 * GIB, 0), Gpu([small], 2 * GIB, others=700 * MIB)
    fill_device([small], LIMITS, room, gpu)
    assert len(tried) == 3 and tried[2] == small.pages < tried[0]

    def never() -> None:
        raise ModelError("no memory")

    monkeypatch.setattr(small, "_bind", never)
    with pytest.raises(ModelError, match="has no room for KV memory"):
        fill_device([small], LIMITS, room, gpu)


@pytest.mark.parametrize("limits", [LIMITS, RoundLimits(3, 9), RoundLimits(900, 1), RoundLimits(2000, 300)])
def test_the_largest_round_has_all_tokens_and_all_sequences(small, monkeypatch, limits):
    seen = []
    run = Runner.run

    def noted(self, chunks, copies=()):
        seen.append([chunk.count for chunk in chunks])
        assert self.graphs is None, "a graph is made for rounds that come again"
        return run(self, chunks[:2], copies)

    monkeypatch.setattr(Runner, "run", noted)
    monkeypatch.setattr(kv_sizing.Sampler, "pick", lambda self, logits, rows: seen.append(len(rows)))
    compute_largest(small, limits)
    counts, rows = seen
    assert sum(counts) == min(limits.tokens_max, 512 * limits.sequences_max)
    assert len(counts) == rows == min(limits.tokens_max, limits.sequences_max)
    assert small.graphs is not None


def test_the_largest_round_is_computed_and_drawn_from_for_real(small):
    compute_largest(small, RoundLimits(40, 5))


def test_a_round_for_which_there_is_no_memory_ends_nothing(small, monkeypatch, caplog):
    def short(chunks, copies=()):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(small, "run", short)
    compute_largest(small, LIMITS)
    assert "no memory for a round of 60 tokens" in caplog.text


def test_graphs_that_took_more_than_foreseen_are_paid_for_with_pages(small):
    fill_device([small], LIMITS, DeviceMemoryLimit(2 * GIB, 100 * MIB), Gpu([small], 2 * GIB, others=600 * MIB))
    engine, before = Engine(small, None, LIMITS), small.pages
    room, gpu = DeviceMemoryLimit(2 * GIB, 100 * MIB), Gpu([small], 2 * GIB, others=600 * MIB)
    assert not keep_room(engine, room, gpu) and small.pages == before
    gpu.weights += WORK_BYTES + 30 * MIB
    assert gpu.free() < 100 * MIB and keep_room(engine, room, gpu)
    assert gpu.free() >= 100 * MIB and engine.stats().pages_free == small.pages
