"""A model on two ranks gives the tokens it gives on one; a rank that is lost ends a round, and nothing is left over."""

from __future__ import annotations

import copy
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.engine.llm import tiny
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.kv_cache import PageTable
from weftline.engine.llm.model_loader import RunnerOptions
from weftline.engine.llm.parallel.followers import Kind, decode_round, encode_round
from weftline.engine.llm.parallel.peers import Peers
from weftline.engine.llm.parallel.runner import ParallelRunner
from weftline.engine.llm.parallel.shards import shard
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.runner import Runner
from weftline.engine.llm.schedule import RoundLimits, ScheduledChunk
from weftline.engine.llm.sequence import Sequence
from weftline.errors import ModelError, WorkerDied

PAGES = 22
"""Of 8 tokens each; too few for all prompts at once."""


def _saved(family: str, folder: Path) -> Path:
    tiny.reference(family).save_pretrained(folder)
    return folder


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _open_both(family: str, folder: Path) -> tuple[Runner, ParallelRunner]:
    _saved(family, folder)
    one = Runner.open(folder, RunnerOptions(page_tokens=8))
    two = ParallelRunner.open_on(["cpu", "cpu"], folder, RunnerOptions(page_tokens=8))
    one.resize(PAGES)
    two.resize(PAGES)
    return one, two


def _check_equal(one: Runner, two: ParallelRunner) -> None:
    prompts, params = tiny.prompts(14, seed=3), SamplingParams(tokens_max=12, ignore_eos=True)
    engine = Engine(two, None, RoundLimits(37, 6))
    assert engine.generate(prompts, params) == Engine(one, None, RoundLimits(37, 6)).generate(prompts, params)
    assert engine.stats().preemptions > 0
    assert engine.stats().prefix_hit_tokens > 0
    assert two.token_bytes * 2 == one.token_bytes  # each rank has the pages of its own key heads only


@pytest.mark.slow
def test_two_ranks_give_the_tokens_of_one_and_closing_leaves_no_process(tmp_path):
    one, two = _open_both("llama", tmp_path)
    pids = two.follower_pids
    try:
        _check_equal(one, two)
        assert len(pids) == 1
        assert all(map(_is_running, pids))
    finally:
        two.close()
    assert not any(map(_is_running, pids))
    with pytest.raises(WorkerDied, match="it is closed"):
        two.resize(4)


@pytest.mark.slow
def test_a_killed_rank_fails_the_round_at_once_and_every_later_one(tmp_path, caplog):
    one, two = _open_both("qwen3", tmp_path)
    try:
        _check_equal(one, two)
        engine = Engine(two, None, RoundLimits(37, 6))
        engine.add(1, [5, 6, 7], SamplingParams(tokens_max=100, ignore_eos=True))
        for _ in range(3):
            assert engine.step()[0].error is None
        os.kill(two.follower_pids[0], signal.SIGKILL)
        began, updates = time.monotonic(), []
        while engine.busy:
            updates += engine.step()
        assert time.monotonic() - began < 30
        assert isinstance(updates[-1].error, WorkerDied)
        assert "signal 9" in str(updates[-1].error)
        assert "signal 9" in str(two.lost)
        assert "the process of rank 1 ended with signal 9; its round fails; then: " in caplog.text
        engine.check()
        engine.add(2, [5, 6, 7], SamplingParams(tokens_max=3))
        assert isinstance(engine.step()[0].error, WorkerDied)
    finally:
        two.close()


@pytest.mark.slow
def test_on_two_ranks_decoding_rounds_are_computed_by_both(tmp_path):
    """A rank that launched a round alone would wait in its first sum for the other, which received none."""
    folder = _saved("llama", tmp_path)
    options = RunnerOptions(page_tokens=8, form="gpu")
    one = Runner.open(folder, options)
    two = ParallelRunner.open_on(["cpu", "cpu"], folder, options, timeout_s=20.0)
    prompts, params = tiny.prompts(4, seed=3, longest=30), SamplingParams(tokens_max=6, ignore_eos=True)
    try:
        assert one.graphs is not None
        assert Engine(two).generate(prompts, params) == Engine(one).generate(prompts, params)
    finally:
        two.close()


def test_a_rank_records_no_graphs():
    alone = tiny.fresh_runner("llama", form="gpu")
    assert alone.graphs is not None
    assert ParallelRunner(alone.model, RunnerOptions(page_tokens=8, form="gpu")).graphs is None


class _Followers:
    """Replaces followers: records the messages sent to them."""

    lost = None

    def __init__(self) -> None:
        self.kinds: list[Kind] = []
        self.closed = 0

    def send(self, kind: Kind, payload: bytes = b"", to: int | None = None) -> None:
        self.kinds.append(kind)

    def gone(self) -> None:
        return None

    def close(self) -> None:
        self.closed += 1


def test_a_round_that_fails_on_the_first_rank_ends_the_other_ranks(monkeypatch):
    alone, followers = tiny.fresh_runner("llama"), _Followers()  # its model is bound anew
    runner = ParallelRunner(alone.model, RunnerOptions(page_tokens=8))
    monkeypatch.setattr(runner, "_followers", followers, raising=False)
    monkeypatch.setattr(runner, "_peers", _Alone(0, 2, torch.device("cpu")), raising=False)
    wrong = ScheduledChunk(Sequence(1, [5], 1, 9, SamplingParams(), 1, table=PageTable([10**6])), 0, 1)
    for _ in range(2):
        with pytest.raises(WorkerDied, match="a round failed on its first rank with IndexError"):
            runner.run([wrong])
    assert followers.kinds == [Kind.ROUND]
    assert followers.closed == 1


def test_a_model_without_a_split_plan_or_with_odd_heads_is_refused(tmp_path):
    with pytest.raises(ModelError, match="does not say how it is split"):
        ParallelRunner.open_on(["cpu", "cpu"], _saved("gpt2", tmp_path / "gpt2"))
    with pytest.raises(ModelError, match="has 4 heads; they cannot be split over 3 ranks"):
        ParallelRunner.open_on(["cpu"] * 3, _saved("llama", tmp_path / "llama"))
    with pytest.raises(ModelError, match="found 1, expected 2 to 16"):
        ParallelRunner.open_on(["cpu"], tmp_path / "llama")


class _Alone(Peers):
    """Rank `rank` of `size`, whose sums are its own part of them."""

    def add(self, part):
        return part

    def join(self, part):
        return part.repeat(1, 1, self.size)


@pytest.mark.parametrize("family", [f for f in tiny.FAMILIES if f not in ("gpt2", "deepseek_v3")])
def test_the_ranks_parts_of_a_matrix_are_the_whole_of_it(family):
    whole = tiny.reference(family)
    parts = []
    for rank in range(2):
        part = copy.deepcopy(whole)
        shard(part, _Alone(rank, 2, torch.device("cpu")))
        parts.append(part)
    smaller = 0
    for name, weight in whole.state_dict().items():
        left, right = (part.state_dict()[name] for part in parts)
        if left.shape == weight.shape:
            assert torch.equal(left, weight) and torch.equal(right, weight)
            continue
        smaller += 1
        dim = next(at for at, (a, b) in enumerate(zip(left.shape, weight.shape)) if a != b)
        rows = torch.cat([left, right], dim)
        if "gate_up_proj" in name and weight.ndim == 3:
            (a, b), (c, d) = left.chunk(2, 1), right.chunk(2, 1)
            rows = torch.cat([a, c, b, d], 1)
        assert torch.equal(rows.narrow(dim, 0, weight.shape[dim]), weight)
    assert smaller >= 7


def test_a_follower_reads_of_a_round_what_was_sent():
    first = Sequence(1, list(range(40, 60)), 20, 30, SamplingParams(), 1, table=PageTable([4, 5, 9], 2))
    second = Sequence(2, [3, 4, 5, 6], 3, 9, SamplingParams(), 2, table=PageTable([7], 0), adapter_slot=2)
    chunks = [ScheduledChunk(first, 16, 4), ScheduledChunk(second, 3, 3, (8, 9))]
    found, copies = decode_round(encode_round(chunks, [(1, 2), (3, 4)]))
    assert copies == [(1, 2), (3, 4)]
    for one, sent in zip(found, chunks, strict=True):
        assert (one.start, one.count, one.rows, one.tokens) == (sent.start, sent.count, sent.rows, sent.tokens)
        assert one.sequence.tokens[one.start] == sent.sequence.tokens[sent.start]
        assert (one.sequence.table.pages, one.sequence.table.run) == (
            sent.sequence.table.pages, sent.sequence.table.run,
        )  # fmt: skip
        assert one.sequence.adapter_slot == sent.sequence.adapter_slot
