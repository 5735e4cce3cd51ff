"""Decoding by graphs gives the tokens that the engine gives, whatever grows, comes, goes or moves between replays."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.engine.llm import tiny
from weftline.engine.llm import attention
from weftline.engine.llm.attention import Span
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.fusion import layer as fuse_layer
from weftline.engine.llm.fusion import rows as fuse_rows
from weftline.engine.llm.fusion.fuse import fuse
from weftline.engine.llm.gpu.attention import GpuAttention, PlainOps
from weftline.engine.llm.gpu.buffers import NOWHERE, Draw, RoundView
from weftline.engine.llm.gpu.fake_capture import FakeCapture
from weftline.engine.llm.gpu.graphs import UNSOUND, DecodeGraphs, Handle, draw_tokens, model_forward
from weftline.engine.llm.kv_cache import PageTable
from weftline.engine.llm.model_loader import RunnerOptions
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.runner import Runner

PAGE, PAGES, CONTEXT = 8, 96, 128


@cache
def expected(family: str, tokens: int) -> list[list[int]]:
    engine = Engine(tiny.runner(family), prefix_cache=False)
    return engine.generate(prompts(), SamplingParams(tokens_max=tokens, ignore_eos=True))


def prompts() -> list[list[int]]:
    return [prompt[:40] for prompt in tiny.prompts(5, seed=21)]


@dataclass
class Answer:
    tokens: list[int]
    table: PageTable

    @property
    def span(self) -> Span:
        """The newest token, whose keys and values are not yet written."""
        return Span(0, len(self.tokens) - 1, 1, self.table)


class Decoder:
    """A model with the GPU's attention, and some answers; each has scattered pages."""

    def __init__(self, family: str, fused: bool = False, capture: FakeCapture | None = None) -> None:
        attention.register()
        ours = AutoModelForCausalLM.from_config(tiny.config(family), attn_implementation=attention.NAME)
        ours.load_state_dict(tiny.reference(family).state_dict())
        self.runner = Runner(ours, RunnerOptions(page_tokens=PAGE, kv_bytes=PAGES * PAGE * 512, fuse=False))
        if fused and fuse(ours).counts["model"] != 1:
            raise AssertionError("the model is not fused")
        self.form = GpuAttention.make(PAGE, CONTEXT, 64, torch.device("cpu"), PlainOps())
        for layer in self.runner._layers:
            layer.form = self.form
        self.forwards: list[int] = []
        forward = model_forward(ours)

        def counted(tokens: Tensor, positions: Tensor, view: RoundView) -> Tensor:
            self.forwards.append(len(tokens))
            return forward(tokens, positions, view)

        self.graphs = DecodeGraphs(self.form, counted, capture=capture)
        free = random.Random(5).sample(range(self.runner.pages), self.runner.pages)
        self.answers = []
        for prompt in prompts():
            pages, free = free[: CONTEXT // PAGE], free[CONTEXT // PAGE :]
            self.answers.append(Answer(list(prompt), PageTable(pages, run=99)))
        for answer in self.answers:
            self.read(answer)

    @torch.inference_mode()
    def read(self, answer: Answer) -> None:
        """Compute a whole prompt and take its first token."""
        count = len(answer.tokens)
        self.form.fill([Span(0, 0, count, answer.table)])
        ids = torch.tensor([answer.tokens, list(range(count))])
        logits = self.runner.model(input_ids=ids[:1], position_ids=ids[1:], use_cache=False).logits
        answer.tokens.append(int(logits[0, -1].argmax()))

    def launch(self, chosen: list[int], tokens_from: list[int] | None = None) -> Handle:
        answers = [self.answers[at] for at in chosen]
        newest = [answer.tokens[-1] for answer in answers]
        return self.graphs.launch(
            [Span(row, answer.span.start, 1, answer.table) for row, answer in enumerate(answers)],
            newest, [Draw()] * len(answers), tokens_from or [],
        )  # fmt: skip

    def step(self, chosen: list[int]) -> None:
        for at, token in zip(chosen, self.launch(chosen).tokens(), strict=True):
            self.answers[at].tokens.append(token)

    def said(self) -> list[list[int]]:
        return [answer.tokens[len(prompt) :] for answer, prompt in zip(self.answers, prompts(), strict=True)]

    def check(self, family: str) -> None:
        for said, wanted in zip(self.said(), expected(family, 48), strict=True):
            assert said == wanted[: len(said)]


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what a CPU does outside of torch's dispatcher out of fused models, since fakes cannot record it."""
    monkeypatch.setattr(fuse_rows, "_compiled", lambda: None)
    monkeypatch.setattr(fuse_layer, "_STEADY_ROPES", frozenset())


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_lengths_grow_past_those_of_the_recording(family: str, fused: bool, dispatched: None) -> None:
    decoder = Decoder(family, fused, FakeCapture())
    for _ in range(32):  # four pages more than when the graph was recorded
        decoder.step([0, 1, 2])
    decoder.check(family)
    assert decoder.graphs.recorded == (4, 64)  # the largest comes first
    # one run to see how wide the logits are, one to warm up, and the recorded one: all rounds were replays
    assert decoder.forwards == [64, 64, 64, 4, 4]
    assert not decoder.graphs.failures


def test_the_same_without_graphs(dispatched: None) -> None:
    decoder = Decoder("llama")
    for _ in range(10):
        decoder.step([0, 1, 2, 3, 4])
    decoder.check("llama")
    assert decoder.graphs.recorded == ()
    assert decoder.forwards == [8] * 10


def test_who_is_in_a_round_changes_from_replay_to_replay(dispatched: None) -> None:
    decoder, rng = Decoder("llama", True, FakeCapture()), random.Random(9)
    for _ in range(60):
        room = [at for at in range(5) if len(decoder.said()[at]) < 48]
        decoder.step(rng.sample(room, rng.randint(1, len(room))))
    decoder.check("llama")
    assert decoder.graphs.recorded == (1, 2, 4, 8, 64)
    assert len(decoder.forwards) == 1 + 2 * 5


def test_padding_rows_write_nowhere(dispatched: None) -> None:
    decoder = Decoder("llama", True, FakeCapture())
    decoder.step([0, 1, 2])
    layer = decoder.runner._layers[0]
    assert layer.keys is not None
    before = layer.keys.clone()
    answers = [decoder.answers[at] for at in (0, 1, 2)]
    slots = {a.table.pages[(len(a.tokens) - 1) // PAGE] * PAGE + (len(a.tokens) - 1) % PAGE for a in answers}
    decoder.step([0, 1, 2])
    changed = (layer.keys != before).any(dim=2).any(dim=0).nonzero().flatten().tolist()
    assert set(changed) == slots


def test_a_round_may_take_its_tokens_from_the_one_before_on_the_device(dispatched: None) -> None:
    decoder = Decoder("llama", True, FakeCapture())
    first = decoder.launch([0, 1, 2])
    for at in (0, 1, 2):
        decoder.answers[at].tokens.append(-7)  # the host does not know it yet
    second = decoder.launch([2, 0, 3], [2, 0, NOWHERE])
    for at, token in zip((0, 1, 2), first.tokens(), strict=True):
        decoder.answers[at].tokens[-1] = token
    for at, token in zip((2, 0, 3), second.tokens(), strict=True):
        decoder.answers[at].tokens.append(token)
    decoder.check("llama")
    assert [len(said) for said in decoder.said()] == [3, 2, 3, 2, 1]


def test_recording_within_a_chain_keeps_the_tokens_on_the_device(dispatched: None) -> None:
    decoder = Decoder("llama", True, FakeCapture())
    first = decoder.launch([0, 1])
    for at in (0, 1):
        decoder.answers[at].tokens.append(-7)
    second = decoder.launch([0, 1, 2], [0, 1, NOWHERE])  # another size: recorded now, and run more than once
    for at, token in zip((0, 1), first.tokens(), strict=True):
        decoder.answers[at].tokens[-1] = token
    for at, token in zip((0, 1, 2), second.tokens(), strict=True):
        decoder.answers[at].tokens.append(token)
    decoder.check("llama")


def test_after_the_pages_moved_graphs_are_dropped_and_recorded_again(dispatched: None) -> None:
    decoder = Decoder("llama", True, FakeCapture())
    for _ in range(3):
        decoder.step([0, 1, 2])
    decoder.runner.resize(decoder.runner.pages + 4)
    decoder.graphs.drop()
    assert decoder.graphs.recorded == ()
    for _ in range(3):
        decoder.step([0, 1, 2])
    decoder.check("llama")
    assert len(decoder.forwards) == 2 * (3 + 2)
    assert decoder.graphs.capture is not None and decoder.graphs.capture.forgotten == 1  # their pool is not used again


def test_graphs_that_were_not_dropped_would_read_the_old_pages(dispatched: None) -> None:
    decoder = Decoder("llama", True, FakeCapture())
    decoder.step([0, 1, 2])
    old = decoder.runner._layers[0].keys
    decoder.runner.resize(decoder.runner.pages + 4)
    new = decoder.runner._layers[0].keys
    assert old is not None and new is not None
    before = new.clone()
    decoder.step([0, 1, 2])
    assert torch.equal(new, before)  # this is why `drop` is there


def test_an_unrecordable_model_is_computed_eagerly_and_reported_once(
    dispatched: None, caplog: pytest.LogCaptureFixture
) -> None:
    capture = FakeCapture()
    capture.fail = True
    decoder = Decoder("llama", True, capture)
    for _ in range(3):
        decoder.step([0, 1, 2])
    decoder.check("llama")
    reason = "RuntimeError: this fake was set to fail"
    assert decoder.graphs.failures == dict.fromkeys(decoder.graphs.sizes, reason)
    assert decoder.graphs.complete
    assert decoder.forwards == [64] + [4] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "rounds of any number of tokens are computed without a CUDA graph, and take longer; "
        f"recording one of 64 failed: {reason}"
    ]
    capture.fail = False
    decoder.graphs.drop()
    decoder.step([0, 1, 2])
    assert decoder.graphs.recorded == (4, 64)
    decoder.check("llama")


def test_a_forward_that_waits_for_the_device_is_found_out(dispatched: None) -> None:
    decoder = Decoder("llama", False, FakeCapture())
    forward = decoder.graphs.forward

    def waits(tokens: Tensor, positions: Tensor, view: RoundView) -> Tensor:
        return forward(tokens, positions, view)[:, : int(view.starts.max()) + 10_000]

    decoder.graphs.forward = waits
    decoder.step([0])
    assert "read off the device" in decoder.graphs.failures[1]
    decoder.check("llama")


def test_a_frozen_number_would_be_found_out(dispatched: None) -> None:
    decoder = Decoder("llama", False, FakeCapture())
    forward = decoder.graphs.forward

    def frozen(tokens: Tensor, positions: Tensor, view: RoundView) -> Tensor:
        longest = max(len(answer.tokens) for answer in decoder.answers[:3]) - 1  # differs from round to round
        return forward(tokens, positions.clamp_max(longest), view)

    decoder.graphs.forward = frozen
    for _ in range(20):
        decoder.step([0, 1, 2])
    assert any(said != wanted[: len(said)] for said, wanted in zip(decoder.said(), expected("llama", 48), strict=True))


def test_rows_without_a_sound_logit_are_marked(dispatched: None) -> None:
    decoder = Decoder("llama", False, FakeCapture())
    forward = decoder.graphs.forward

    def spoiled(tokens: Tensor, positions: Tensor, view: RoundView) -> Tensor:
        logits = forward(tokens, positions, view)
        return torch.where((view.tokens == decoder.answers[1].tokens[-1])[:, None], torch.nan, logits)

    decoder.graphs.forward = spoiled
    decoder.answers[0].tokens[-1], decoder.answers[1].tokens[-1] = 5, 6
    drawn = decoder.launch([0, 1]).tokens()
    assert drawn[1] == UNSOUND
    assert drawn[0] >= 0


def test_settings_of_every_sequence_reach_the_draw(dispatched: None) -> None:
    decoder = Decoder("llama", False, FakeCapture())
    decoder.graphs.draw = lambda logits, kind, settings: settings["seed"] + settings["position"]
    spans = [
        Span(row, decoder.answers[at].span.start, 1, decoder.answers[at].table) for row, at in enumerate((0, 1, 2))
    ]
    for base in (10, 50):
        draws = [Draw(temperature=1.0, seed=base * at, position=at) for at in (1, 2, 3)]
        assert decoder.graphs.launch(spans, [1, 1, 1], draws).tokens() == [base * at + at for at in (1, 2, 3)]


def test_a_round_is_padded_and_too_many_sequences_are_refused(dispatched: None) -> None:
    decoder = Decoder("llama")
    assert decoder.graphs.sizes == (1, 2, 4, *range(8, 65, 8))
    assert decoder.graphs.sequences_max == 64
    with pytest.raises(ValueError, match="a round of 65 sequences"):
        decoder.launch([0] * 65)


@pytest.mark.parametrize(
    ("draws", "kind"),
    [
        ([Draw(), Draw()], "greedy"),
        ([Draw(), Draw(temperature=0.8, seed=5)], "warm"),
        ([Draw(temperature=0.8, seed=5), Draw(temperature=1.5, seed=6, top_k=4, top_p=0.9)], "narrow"),
    ],
)
def test_draws_from_a_graphs_logits_are_those_from_computed_ones(
    draws: list[Draw], kind: str, dispatched: None
) -> None:
    said = []
    for capture in (None, FakeCapture()):
        decoder, kinds = Decoder("llama", True, capture), []
        decoder.graphs.draw = lambda *given, kinds=kinds: kinds.append(given[1]) or draw_tokens(*given)
        for step in range(12):
            placed = [replace(draw, position=step) for draw in draws]
            spans = [Span(row, decoder.answers[row].span.start, 1, decoder.answers[row].table) for row in (0, 1)]
            newest = [decoder.answers[row].tokens[-1] for row in (0, 1)]
            for answer, token in zip(
                decoder.answers, decoder.graphs.launch(spans, newest, placed).tokens(), strict=False
            ):
                answer.tokens.append(token)
        said.append(decoder.said())
    assert said[0] == said[1]
    assert decoder.graphs.recorded == (2, 64)
    assert kinds == [kind] * 12
