"""Embeddings and scores that come through the engine's rounds are those that transformers computes alone."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification

from tests.engine.llm import tiny
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.heads import UNFINISHED_MAX, Embedding, Scores, open_head
from weftline.engine.llm.model_loader import RunnerOptions
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.request import LlmRequestOptions
from weftline.engine.llm.runner import Runner
from weftline.engine.llm.schedule import RoundLimits
from weftline.engine.llm.sequence import Sequence
from weftline.errors import ModelError

LABELS = ("calm", "angry", "glad")
PAGES, PAGES_LEAST = 16, 7
"""Of 8 tokens. The memory shrinks and grows meanwhile: who loses pages is computed again from the start."""


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embedder")
    torch.manual_seed(4)
    AutoModel.from_config(tiny.config("qwen3")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _save_classifier(tmp_path_factory.mktemp("classifier"), LABELS)


def _save_classifier(folder: Path, labels: tuple[str, ...]) -> Path:
    torch.manual_seed(4)
    config = tiny.config("llama")
    config.id2label, config.label2id = dict(enumerate(labels)), {label: at for at, label in enumerate(labels)}
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder


@torch.inference_mode()
def _states(folder: Path, prompt: list[int]) -> np.ndarray:
    """Return float32 [tokens, width] of a model that transformers runs alone."""
    states: torch.Tensor = _plain(AutoModel, folder)(torch.tensor([prompt])).last_hidden_state[0]
    return states.numpy()


@cache
def _plain(kind: Any, folder: Path) -> Any:
    return kind.from_pretrained(folder, attn_implementation="eager").eval()


def _pooled(runner: Runner, prompts: list[list[int]], seed: int = 0) -> tuple[dict[int, np.ndarray], Engine]:
    """Send all prompts through an engine with few pages, some at a time; some others come and are cancelled."""
    rng = random.Random(seed)
    runner.resize(PAGES)
    engine = Engine(runner, None, RoundLimits(19, 5))
    found: dict[int, np.ndarray] = {}
    coming = list(range(len(prompts)))
    while coming or engine.busy:
        while coming and (not engine.busy or rng.random() < 0.6):
            at = coming.pop(0)
            engine.add(at, prompts[at], SamplingParams(), LlmRequestOptions(pool=True))
            if at % 3 == 0:
                engine.add(1000 + at, prompts[at][::-1], SamplingParams(), LlmRequestOptions(pool=True))
        engine.cancel(1000 + rng.randrange(len(prompts)))
        if rng.random() < 0.5:
            engine.resize(PAGES_LEAST if rng.random() < 0.5 else PAGES)
        for update in engine.step():
            assert update.error is None
            assert update.last
            found[update.id] = update.pooled
        engine.check()
    assert engine.stats().pages_used == 0
    return found, engine


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("pooling", ["last", "mean", "first"])
def test_an_embedding_in_chunks_and_company_is_the_one_computed_alone(embedder, pooling):
    runner = open_head(embedder, "embed", RunnerOptions(page_tokens=8), pooling=pooling)
    prompts = tiny.prompts(8, seed=6, longest=50)
    found, engine = _pooled(runner, prompts)
    for at, prompt in enumerate(prompts):
        states = _states(embedder, prompt)
        wanted = {"last": states[-1], "mean": states.mean(0), "first": states[0]}[pooling]
        assert found[at].dtype == np.float32
        np.testing.assert_allclose(found[at], wanted / np.linalg.norm(wanted), atol=2e-5)
    stats = engine.stats()
    assert (stats.prefix_hit_tokens > 0) == (pooling == "last")
    assert stats.preemptions > 0


def test_a_chunk_of_one_token_is_embedded_where_the_device_could_sample(embedder):
    runner = open_head(embedder, "embed", RunnerOptions(page_tokens=8, form="gpu"))
    found, _ = _pooled(runner, [[5], [5] * 17, [5] * 17])
    assert [found[at] is not None for at in range(3)] == [True] * 3


def test_an_embedding_that_is_not_scaled_keeps_its_length(embedder):
    runner = open_head(embedder, "embed", RunnerOptions(page_tokens=8), normalise=False)
    prompt = tiny.prompts(1, seed=2)[0]
    found, _ = _pooled(runner, [prompt])
    assert runner.head.width == len(found[0]) == 64
    np.testing.assert_allclose(found[0], _states(embedder, prompt)[-1], atol=1e-4)


def test_scores_of_a_classifier_are_those_of_transformers(classifier):
    runner = open_head(classifier, "classify", RunnerOptions(page_tokens=8))
    assert runner.head.labels == LABELS
    prompts = tiny.prompts(6, seed=7, longest=50)
    found, _ = _pooled(runner, prompts)
    model = _plain(AutoModelForSequenceClassification, classifier)
    for at, prompt in enumerate(prompts):
        with torch.inference_mode():
            wanted = model(torch.tensor([prompt])).logits[0].softmax(-1)
        np.testing.assert_allclose(found[at], wanted.numpy(), atol=2e-5)


@pytest.mark.parametrize("task", ["embed", "classify"])
def test_quantised_weights_give_nearly_the_same(embedder, classifier, task):
    pytest.importorskip("torchao")
    prompts, found = tiny.prompts(3, seed=7, longest=30), []
    for weights in ("auto", "int8"):
        runner = open_head(
            embedder if task == "embed" else classifier, task, RunnerOptions(page_tokens=8, weights=weights)
        )
        found.append(_pooled(runner, prompts)[0])
    plain, quantised = found
    for at in range(len(prompts)):
        assert not np.array_equal(plain[at], quantised[at])
        np.testing.assert_allclose(quantised[at], plain[at], atol=0.05)


def test_a_reward_is_one_number_as_the_model_gives_it(tmp_path):
    folder = _save_classifier(tmp_path, ("reward",))
    runner = open_head(folder, "classify", RunnerOptions(page_tokens=8))
    prompt = tiny.prompts(1, seed=2)[0]
    found, _ = _pooled(runner, [prompt])
    with torch.inference_mode():
        wanted = _plain(AutoModelForSequenceClassification, folder)(torch.tensor([prompt])).logits[0]
    assert found[0].shape == (1,)
    np.testing.assert_allclose(found[0], wanted.numpy(), rtol=1e-4)


def test_a_language_model_has_no_score_layer_and_an_odd_pooling_is_named(embedder):
    with pytest.raises(ModelError, match=r"1 weights missing .*score"):
        open_head(embedder, "classify")
    with pytest.raises(ModelError, match="pooling: found 'middle', expected one of last, mean, first"):
        Embedding(4, "middle")


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_an_embedding_is_the_same_when_its_neighbour_runs_out_of_memory(embedder, pooling, monkeypatch):
    runner = open_head(embedder, "embed", RunnerOptions(page_tokens=8), pooling=pooling)
    first, second = [at % 50 + 1 for at in range(40)], [7] * 20

    def embedded() -> list[list[float]]:
        """The first prompt is read in two rounds, and the second in the second of these."""
        engine, found = Engine(runner, None, RoundLimits(30, 5)), dict[int, list[float]]()
        for id, prompt in enumerate((first, second)):
            engine.add(id, prompt, SamplingParams(), LlmRequestOptions(pool=True))
        while engine.busy:
            found |= {update.id: update.pooled.tolist() for update in engine.step()}
        shortages.append(engine.stats().out_of_memory)
        return [found[id] for id in range(2)]

    usual, finished, shortages = runner.head.finish, list[int](), list[int]()
    expected = embedded()

    def finish(sequence: Sequence) -> np.ndarray:
        finished.append(sequence.order)
        if len(finished) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return usual(sequence)

    monkeypatch.setattr(runner.head, "finish", finish)
    np.testing.assert_allclose(embedded(), expected, atol=2e-5)
    assert (shortages, len(finished)) == ([0, 1], 4) and not runner.head._parts._parts


def _sequence(order: int, prompt: int, computed: int = 0) -> Sequence:
    sequence = Sequence(order, [5] * prompt, prompt, prompt, SamplingParams(), order)
    sequence.computed = computed
    return sequence


def test_a_repeated_chunk_counts_once_and_a_restart_drops_the_old_state():
    head, rows = Embedding(2, "mean", normalise=False), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 9.0]])
    sequence = _sequence(1, 3)
    head.add(sequence, rows[:2])
    sequence.computed = 2
    head.add(sequence, rows[2:])
    head.add(sequence, rows[2:])  # its round was computed again
    assert head.finish(sequence).tolist() == [3.0, 5.0]
    sequence.computed = 0
    head.add(sequence, rows[:2] + 100)
    sequence.computed = 0  # it gave its pages back and starts anew
    head.add(sequence, rows)
    assert head.finish(sequence).tolist() == [3.0, 5.0]
    sequence.computed = 0
    head.add(sequence, rows[:2])
    sequence.computed = 1  # half of that was computed again, and what follows comes with the other half
    head.add(sequence, rows[1:])
    assert head.finish(sequence).tolist() == [3.0, 5.0]


def test_prompts_that_never_end_leave_nothing_behind():
    head = Scores(("a", "b"), "sigmoid")
    for order in range(UNFINISHED_MAX + 10):
        head.add(_sequence(order, 1), torch.zeros(1, 2))
    assert len(head._parts._parts) == UNFINISHED_MAX
    assert head.finish(_sequence(UNFINISHED_MAX + 9, 1)).tolist() == [0.5, 0.5]
