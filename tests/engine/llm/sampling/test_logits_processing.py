"""Edits are, row for row, what a slow definition says, and what transformers makes of the options it has too."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from tests.engine.llm import plain_sampling
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.sampling.logits_processing import LogitsProcessor, LogitsSettings
from weftline.engine.llm.sequence import Sequence

VOCABULARY = 30
ENDS = frozenset({0, 3})
Rows = list[tuple[Sequence, tuple[int, ...]]]


def _edited(logits: torch.Tensor, rows: Rows, ends: frozenset[int] = ENDS) -> torch.Tensor:
    edits, out = LogitsProcessor(logits.shape[1]), logits.clone()
    for at, (sequence, draft) in enumerate(rows):
        edits.add(at, sequence, draft, LogitsSettings(sequence.params, sequence.banned, ends, logits.shape[1]))
    edits.apply(out)
    return out


def _sequence(tokens: list[int], prompt: int, banned: tuple[tuple[int, ...], ...] = (), **params: Any) -> Sequence:
    return Sequence(1, tokens, prompt, 99, SamplingParams(**params), 0, banned=banned)


def _random_params(chance: random.Random) -> dict[str, Any]:
    token = lambda: chance.randrange(VOCABULARY)  # noqa: E731
    options: dict[str, Any] = {
        "repetition_penalty": chance.uniform(0.5, 2),
        "presence_penalty": chance.uniform(-2, 2),
        "frequency_penalty": chance.uniform(-2, 2),
        "logit_bias": {str(token()): chance.uniform(-5, 5) for _ in range(4)},
        "allowed_token_ids": [token() for _ in range(12)],
        "tokens_min": chance.randrange(9),
        "stop_token_ids": [token(), token()],
    }
    return {name: value for name, value in options.items() if chance.random() < 0.4}


def test_random_rows_are_what_the_definition_says():
    chance = random.Random(5)
    for _ in range(60):
        rows: Rows = []
        for _ in range(chance.randrange(1, 9)):
            tokens = [chance.randrange(6) for _ in range(chance.randrange(1, 15))]
            words = [tuple(chance.randrange(6) for _ in range(chance.randrange(1, 4))) for _ in range(3)]
            banned = tuple(words) if chance.random() < 0.5 else ()
            draft = tuple(chance.randrange(6) for _ in range(chance.randrange(4)))
            prompt = chance.randrange(1, len(tokens) + 1)
            rows.append((_sequence(tokens, prompt, banned, **_random_params(chance)), draft))
        logits = torch.randn(len(rows), VOCABULARY, dtype=torch.float64) * 4
        found = _edited(logits, rows)
        for at, (s, draft) in enumerate(rows):
            row = plain_sampling.edited(logits[at].tolist(), s.tokens, s.prompt, draft, s.params, ENDS, s.banned)
            assert all(map(lambda a, b: math.isclose(a, b, rel_tol=1e-12, abs_tol=1e-12), found[at].tolist(), row))


def test_transformers_makes_the_same_of_repetition_bias_and_bad_words():
    tokens = torch.randint(0, VOCABULARY, (20, 12), generator=torch.Generator().manual_seed(0))
    logits = torch.randn(20, VOCABULARY, dtype=torch.float64)
    banned = ((5,), (7, 8), *((int(row[-1]), 9) for row in tokens[:5]))
    rows: Rows = [(_sequence(row.tolist(), 1, repetition_penalty=1.7), ()) for row in tokens]
    assert torch.equal(_edited(logits, rows), RepetitionPenaltyLogitsProcessor(1.7)(tokens, logits))
    rows = [(_sequence(row.tolist(), 1, logit_bias={"4": 2.5, "6": -3}), ()) for row in tokens]
    bias = SequenceBiasLogitsProcessor([[[4], 2.5], [[6], -3.0]])
    assert torch.allclose(_edited(logits, rows), bias(tokens, logits).double(), rtol=0, atol=1e-6)
    rows = [(_sequence(row.tolist(), 1, banned), ()) for row in tokens]
    words = NoBadWordsLogitsProcessor([list(word) for word in banned])
    assert torch.equal(_edited(logits, rows).isinf(), words(tokens, logits).isinf())


@pytest.mark.parametrize("least", [3, 5, 6, 9])
def test_transformers_holds_ends_off_as_long(least):
    tokens = torch.randint(0, VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(0))
    logits = torch.randn(4, VOCABULARY, dtype=torch.float64)
    rows: Rows = [(_sequence(row.tolist(), 7, tokens_min=least), ()) for row in tokens]
    expected = MinNewTokensLengthLogitsProcessor(7, least, sorted(ENDS), device="cpu")(tokens, logits)
    assert torch.equal(_edited(logits, rows), expected)


def test_draft_tokens_count_as_generated_ones():
    options = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "tokens_min": 4}
    logits = torch.randn(1, VOCABULARY)
    said = _edited(logits, [(_sequence([1, 2, 5, 7, 7], 2, ((7, 7, 9),), **options), ())])
    drafted = _edited(logits, [(_sequence([1, 2, 5], 2, ((7, 7, 9),), **options), (7, 7))])
    assert torch.equal(said, drafted) and said[0, 9] == -torch.inf


def test_a_banned_word_that_began_in_the_prompt_may_be_ended():
    logits = torch.zeros(1, VOCABULARY)
    assert _edited(logits, [(_sequence([1, 7], 2, ((7, 9),)), ())])[0, 9] == 0
    assert _edited(logits, [(_sequence([1, 7], 1, ((7, 9),)), ())])[0, 9] == -torch.inf


def test_tokens_beyond_the_vocabulary_are_passed_over():
    sequence = _sequence([1, 1], 1, ((99,), (1, 99)), tokens_min=2, stop_token_ids=[50])
    assert _edited(torch.zeros(1, VOCABULARY), [(sequence, ())], frozenset({0, 88})).isinf().sum() == 1
