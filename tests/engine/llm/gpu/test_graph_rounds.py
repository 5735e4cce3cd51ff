"""The engine with graphs: rounds of every kind are replays, and say bit for bit what the same rounds say computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.engine.llm import tiny, tiny_adapters
from weftline.engine.llm import attention
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.fusion import layer as fuse_layer
from weftline.engine.llm.fusion import rows as fuse_rows
from weftline.engine.llm.gpu.fake_capture import FakeCapture
from weftline.engine.llm.model_loader import RunnerOptions
from weftline.engine.llm.node import Llm
from weftline.engine.llm.options import LlmConfig
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.request import LlmRequestOptions
from weftline.engine.llm.request_grammars import RequestGrammars
from weftline.engine.llm.runner import Runner
from weftline.engine.llm.sampling.sampler import Sampler
from weftline.engine.llm.schedule import RoundLimits
from weftline.engine.llm.speculation import DraftModelProposer, NgramProposer, Proposer, Speculation
from weftline.engine.llm.tokens import Tokens
from weftline.nodes.cuda_capture import Capture

SIZES = (1, 2, 4, 8, 16, 32, 48)


class Computed:
    """A capture that records nothing: rounds are padded as for a graph, and computed each time."""

    def record(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        def again() -> None:
            compute()

        return again, compute()

    def forget(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _dispatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what a CPU does outside of torch's dispatcher out of fused models, since fakes cannot record it."""
    monkeypatch.setattr(fuse_rows, "_compiled", lambda: None)
    monkeypatch.setattr(fuse_layer, "_STEADY_ROPES", frozenset())


def _runner(capture: Capture | None, family: str = "llama", pages: int = 90) -> Runner:
    attention.register()
    ours = AutoModelForCausalLM.from_config(tiny.config(family), attn_implementation=attention.NAME)
    ours.load_state_dict(tiny.reference(family).state_dict())
    form = "gpu" if capture is not None else "cpu"
    runner = Runner(ours, RunnerOptions(page_tokens=8, context_max=96, form=form))
    runner.resize(pages)
    if capture is not None:
        assert runner.graphs is not None
        runner.graphs.capture, runner.graphs.sizes = capture, SIZES
    return runner


def _eager(runner: Runner) -> list[int]:
    """Return a list that gets the tokens of every round computed without a graph from now on."""
    rounds: list[int] = []
    forward = runner._forward

    def counted(tokens: list[int], places: list[int], keep: list[int]) -> Tensor:
        rounds.append(len(tokens))
        return forward(tokens, places, keep)

    runner._forward = counted  # type: ignore[method-assign]
    return rounds


def _said(engine: Engine, asks: list[tuple[list[int], SamplingParams, LlmRequestOptions]]) -> dict[Any, list[Any]]:
    """Return all that is said of the requests: tokens, and log-probabilities to the last bit."""
    found: dict[Any, list[Any]] = {}
    for at, (prompt, params, wish) in enumerate(asks):
        engine.add(at, prompt, params, wish)
    while engine.busy:
        for update in engine.step():
            assert update.error is None, update.error
            found.setdefault((update.id, update.index), []).extend(update.tokens)
            found.setdefault((update.id, update.index, "log"), []).extend(update.logprobs)
            found.setdefault((update.id, "prompt"), []).extend(update.prompt_logprobs)
        engine.check()
    return found


def _tokens(said: dict[Any, list[Any]]) -> dict[Any, list[Any]]:
    return {key: tokens for key, tokens in said.items() if len(key) == 2 and key[1] != "prompt"}


KINDS: list[dict[str, Any]] = [
    {}, {"repetition_penalty": 1.3}, {"logprobs": 2}, {"logit_bias": {"7": 3.0, "9": -100.0}},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9}, {"allowed_token_ids": tuple(range(20, 60))},
    {"temperature": 1.0, "n": 2, "frequency_penalty": 0.5}, {"prompt_logprobs": 1, "presence_penalty": 0.3},
]  # fmt: skip


def _asks(tokens: int) -> list[tuple[list[int], SamplingParams, LlmRequestOptions]]:
    prompts = tiny.prompts(len(KINDS), seed=12, longest=70)
    usual = SamplingParams(tokens_max=tokens, ignore_eos=True)
    return [
        (prompt, dataclasses.replace(usual, seed=at, **kind), LlmRequestOptions())
        for at, (prompt, kind) in enumerate(zip(prompts, KINDS, strict=True))
    ]


def test_host_sampled_requests_and_mixed_prompts_replay_graphs() -> None:
    said = []
    for capture in (FakeCapture(), Computed(), None):
        runner = _runner(capture)
        rounds = _eager(runner)
        said.append(_said(Engine(runner, None, RoundLimits(48, 6)), _asks(5)))
        assert bool(rounds) == (capture is None)
    assert said[0] == said[1]
    assert _tokens(said[0]) == _tokens(said[2])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "gemma2", "qwen3"])
def test_windows_soft_caps_and_norms_of_heads_are_no_different(family: str) -> None:
    said = []
    for capture in (FakeCapture(), Computed()):
        runner = _runner(capture, family)
        said.append(_said(Engine(runner, None, RoundLimits(48, 6)), _asks(5)[:5]))
    assert said[0] == said[1]


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("kind", ["ngram", "draft"])
def test_draft_tokens_are_verified_by_graphs(kind: str) -> None:
    said, stats = [], []
    asks = [
        ([7, 8, 9] * 6 + [at], SamplingParams(tokens_max=10, ignore_eos=True), LlmRequestOptions())
        for at in range(3, 6)
    ]
    for capture in (FakeCapture(), Computed()):
        proposer: Proposer = NgramProposer()
        runner = _runner(capture)
        rounds = [_eager(runner)]
        if kind == "draft":
            small = _runner(type(capture)(), pages=60)
            proposer = DraftModelProposer(small, Sampler(small.ends, small.vocabulary), 48)
            rounds.append(_eager(small))
        engine = Engine(runner, None, RoundLimits(48, 6), speculation=Speculation(proposer))
        said.append(_said(engine, asks))
        stats.append(engine.stats())
        assert not any(rounds)
    assert said[0] == said[1]
    assert stats[0] == stats[1] and stats[0].drafted > 0 and stats[0].graphs > 0
    assert kind == "ngram" or stats[0].accepted > 0


@pytest.mark.slow
def test_a_grammar_in_the_round_is_no_different(tmp_path: Path) -> None:
    folder, said = tiny.save(tmp_path / "tiny"), []
    for capture in (FakeCapture(), Computed()):
        runner = Runner.open(folder, RunnerOptions(kv_bytes=60 * 16 * 512, form="gpu"))
        assert runner.graphs is not None
        runner.graphs.capture, runner.graphs.sizes = capture, SIZES
        rounds, tokens = _eager(runner), Tokens.open(folder, runner.context_max)
        grammars = RequestGrammars(tokens, runner.vocabulary, runner.ends)
        engine = Engine(runner, tokens, RoundLimits(48, 8), grammars=grammars)
        free = SamplingParams(tokens_max=40, temperature=1.0, seed=4)
        forms: list[dict[str, Any]] = [{"regex": "(ab|cd){3,5}x"}, {}, {"choice": ["yes", "no"]}]
        asks = [
            ([5, 6, 7 + at], dataclasses.replace(free, **form), LlmRequestOptions()) for at, form in enumerate(forms)
        ]
        said.append(_said(engine, asks))
        engine.close()
        assert not rounds
    assert said[0] == said[1]


def test_each_row_of_a_prompt_has_its_requests_adapter(tmp_path: Path) -> None:
    folder, said = tiny_adapters.write(tmp_path / "poems"), []
    asks = [
        (prompt, SamplingParams(tokens_max=3, ignore_eos=True), LlmRequestOptions(adapter="poems" if at % 2 else ""))
        for at, prompt in enumerate(tiny.prompts(3, seed=8, longest=30))
    ]
    for capture in (FakeCapture(), None):
        runner = _runner(capture)
        runner.load_adapter("poems", folder)
        rounds = _eager(runner)
        said.append(_said(Engine(runner, None, RoundLimits(48, 6)), asks))
        assert bool(rounds) == (capture is None)
    assert said[0] == said[1]


def test_all_graphs_are_recorded_first_largest_first_and_write_to_no_page() -> None:
    capture, reported = FakeCapture(), []
    runner = _runner(capture)
    engine = Engine(runner, None, RoundLimits(48, 6))
    assert runner.graphs is not None and not engine.recorded
    keys = runner._layers[0].keys
    assert keys is not None
    with torch.inference_mode():
        keys.fill_(0.5)
    sizes: list[int] = []
    forward = runner.graphs.forward
    runner.graphs.forward = lambda tokens, places, view: sizes.append(len(tokens)) or forward(tokens, places, view)
    assert not engine.record(lambda done, all: reported.append((done, all)))
    assert list(dict.fromkeys(sizes)) == sorted(SIZES, reverse=True)
    assert reported == [(done, len(SIZES)) for done in range(len(SIZES))]
    assert engine.recorded and runner.graphs.recorded == SIZES and bool((keys == 0.5).all())
    rounds = _eager(runner)
    _said(engine, _asks(2)[:4])
    assert capture.recorded == len(SIZES) and not rounds


def test_after_a_resize_an_idle_node_records_one_graph_per_round() -> None:
    runner, sizes = _runner(FakeCapture()), (1, 4, 8, 16)
    assert runner.graphs is not None
    runner.graphs.sizes = sizes
    node = Llm(LlmConfig(model="none"))
    engine = node._engine = Engine(runner, None, RoundLimits(48, 6))
    node._tokens = object()  # type: ignore[assignment]
    node.warm_up()
    assert not node.busy and runner.graphs.recorded == sizes
    engine.resize(120)
    assert node.busy and runner.graphs.recorded == ()
    assert node.round() == []
    assert runner.graphs.recorded == sizes[-1:]
    engine.generate([[5, 6, 7]], SamplingParams(tokens_max=2, ignore_eos=True))  # what it needs is recorded for it
    assert runner.graphs.recorded == (1, 4, 16)
    rounds = 0
    while node.busy:
        node.round()
        rounds += 1
    assert runner.graphs.recorded == sizes and rounds == 1


def test_the_first_graph_that_a_round_records_is_the_largest() -> None:
    runner = _runner(FakeCapture())
    engine, graphs = Engine(runner, None, RoundLimits(48, 6)), runner.graphs
    assert graphs is not None
    said = _said(engine, _asks(3)[:4])
    assert _tokens(said) == _tokens(_said(Engine(_runner(None), None, RoundLimits(48, 6)), _asks(3)[:4]))
    assert next(iter(graphs._graphs)) == SIZES[-1] and len(graphs._graphs) > 2
    engine.resize(120)
    assert graphs.recorded == ()
    engine.generate([[5]], SamplingParams(tokens_max=2, ignore_eos=True))
    assert list(graphs._graphs) == [SIZES[-1], 1]


class Short(FakeCapture):
    """A device without memory for graphs of more than `most` tokens."""

    most = 16

    def __init__(self, runner: Runner) -> None:
        super().__init__()
        self._runner = runner

    def record(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        assert self._runner.graphs is not None and self._runner.graphs.form.view is not None
        if len(self._runner.graphs.form.view.tokens) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 MiB")
        return super().record(compute)


def test_sizes_without_memory_are_computed_and_smaller_ones_have_graphs(caplog: pytest.LogCaptureFixture) -> None:
    runner = _runner(Computed())
    assert runner.graphs is not None
    runner.graphs.capture = Short(runner)
    engine, rounds = Engine(runner, None, RoundLimits(48, 6)), _eager(runner)
    engine.record()
    assert (engine.stats().graphs, engine.stats().ungraphed) == (5, 2) and engine.recorded
    assert [record.getMessage() for record in caplog.records] == [
        "rounds of 48 tokens are computed without a CUDA graph, and take longer; recording one of 48 failed: "
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 7 MiB"
    ]
    said = _said(engine, _asks(2)[:4])
    assert rounds and min(rounds) > Short.most
    assert _tokens(said) == _tokens(_said(Engine(_runner(None), None, RoundLimits(48, 6)), _asks(2)[:4]))


def test_without_device_memory_for_sampling_the_host_samples() -> None:
    runner = _runner(FakeCapture())
    assert runner.graphs is not None
    asks = [([5, 6, 7 + at], SamplingParams(tokens_max=4, ignore_eos=True), LlmRequestOptions()) for at in range(2)]
    engine, capture = Engine(runner, None, RoundLimits(48, 6)), runner.graphs.capture

    def short(*given: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 MiB")

    runner.graphs.draw = short
    assert _said(engine, asks) == _said(Engine(_runner(Computed()), None, RoundLimits(48, 6)), asks)
    assert isinstance(capture, FakeCapture) and capture.forgotten == 0


@pytest.mark.parametrize("short", [True, False], ids=["out of memory", "another error"])
def test_a_round_that_could_not_be_launched_is_logged_once(short: bool, caplog: pytest.LogCaptureFixture) -> None:
    runner = _runner(FakeCapture())
    assert runner.graphs is not None
    engine = Engine(runner, None, RoundLimits(48, 6))

    def fails(*given: Any) -> Tensor:
        raise torch.OutOfMemoryError("Tried to allocate 7 MiB") if short else ValueError("no such kernel\nat all")

    runner.graphs.draw = fails
    engine.generate([[5, 6, 7]], SamplingParams(tokens_max=6, ignore_eos=True))
    found = [record.getMessage() for record in caplog.records]
    reason = "OutOfMemoryError: Tried to allocate 7 MiB" if short else "ValueError: no such kernel"
    graphs = "graphs are kept" if short else "graphs are recorded again"
    assert found == [f"a round could not be launched ahead, and its tokens are drawn by the host; {graphs}: {reason}"]
    assert (caplog.records[0].exc_info is None) is short


def test_a_round_that_no_graph_holds_is_computed_as_it_is() -> None:
    runner = _runner(FakeCapture())
    assert runner.graphs is not None
    runner.graphs.sizes = SIZES[:-1]
    rounds = _eager(runner)
    said = _said(Engine(runner, None, RoundLimits(48, 6)), _asks(2)[:4])
    assert rounds and min(rounds) > 32
    assert _tokens(said) == _tokens(_said(Engine(_runner(None), None, RoundLimits(48, 6)), _asks(2)[:4]))
