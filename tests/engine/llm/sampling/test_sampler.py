"""A row's token depends on its options alone: not on other rows, draft tokens or earlier rounds."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engine.llm import plain_sampling
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.request import SampledToken
from weftline.engine.llm.sampling import sampler as sampling
from weftline.engine.llm.sampling.sampler import Row, Sampler
from weftline.engine.llm.sequence import Sequence
from weftline.errors import InputError

VOCABULARY = 60
ENDS = frozenset({0, 3})


def _sequence(tokens: list[int] | None = None, prompt: int = 2, order: int = 0, **params: Any) -> Sequence:
    seed = params.get("seed", 0)
    return Sequence(1, tokens or [1, 2], prompt, 99, SamplingParams(**params), order, seed=seed)


def _pick(logits: torch.Tensor, *rows: Sequence | Row, ends: frozenset[int] = frozenset()) -> list[SampledToken]:
    made = [row if isinstance(row, Row) else Row(row) for row in rows]
    return Sampler(ends, logits.shape[1]).pick(logits.clone(), made)


def _tokens(logits: torch.Tensor, *rows: Sequence | Row, ends: frozenset[int] = frozenset()) -> list[int]:
    return [choice.token for choice in _pick(logits, *rows, ends=ends)]


def _random_row(chance: random.Random, order: int) -> Row:
    token = lambda: chance.randrange(VOCABULARY)  # noqa: E731
    options: dict[str, Any] = {
        "temperature": chance.uniform(0.1, 2),
        "top_k": chance.randrange(1, 70),
        "top_p": chance.uniform(0.1, 1),
        "min_p": chance.uniform(0, 0.3),
        "typical_p": chance.uniform(0.1, 1),
        "repetition_penalty": chance.uniform(0.5, 2),
        "presence_penalty": chance.uniform(-2, 2),
        "frequency_penalty": chance.uniform(-2, 2),
        "logit_bias": {str(token()): chance.uniform(-5, 5) for _ in range(4)},
        "allowed_token_ids": [token() for _ in range(30)],
        "tokens_min": chance.randrange(9),
        "stop_token_ids": [token(), token()],
        "logprobs": chance.randrange(4),
    }
    params = SamplingParams(**{name: value for name, value in options.items() if chance.random() < 0.5})
    tokens = [chance.randrange(8) for _ in range(chance.randrange(1, 15))]
    words = tuple(tuple(chance.randrange(8) for _ in range(chance.randrange(1, 4))) for _ in range(3))
    sequence = Sequence(
        1, tokens, chance.randrange(1, len(tokens) + 1), 99, params, order,
        seed=chance.randrange(1 << 63), banned=words if chance.random() < 0.3 else (),
    )  # fmt: skip
    return Row(sequence, tuple(chance.randrange(8) for _ in range(chance.choice((0, 0, 2)))))


@pytest.mark.parametrize("few", [8, 128])
def test_random_rounds_are_what_the_definition_says(few, monkeypatch):
    monkeypatch.setattr(
        "weftline.engine.llm.sampling.logits_processing._SORTED_FIRST", few
    )  # with 8, most rows need more than is sorted at first
    monkeypatch.setattr("weftline.engine.llm.sampling.logits_processing._SORTED_FACTOR", 3)
    chance, sampler, compared = random.Random(few), Sampler(ENDS, VOCABULARY), 0
    for round in range(60):
        rows = [_random_row(chance, 100 * round + at) for at in range(chance.randrange(1, 9))]
        logits = torch.randn(len(rows), VOCABULARY, generator=torch.Generator().manual_seed(round)) * 4
        before = logits.double().tolist()
        for at, (row, choice) in enumerate(zip(rows, sampler.pick(logits, rows), strict=True)):
            s, params = row.sequence, row.sequence.params
            left = plain_sampling.edited(before[at], s.tokens, s.prompt, row.draft, params, ENDS, s.banned)
            clear, expected = True, max(range(VOCABULARY), key=left.__getitem__)
            if params.temperature > 0:
                kept, clear = plain_sampling.kept(left, params)
                expected = plain_sampling.drawn(kept, s.seed, len(s.tokens) + len(row.draft))
            assert choice.sound
            assert not clear or choice.token == expected, (params, row.draft)
            compared += clear
            assert (choice.logprob is None) == (params.logprobs is None) and len(choice.top) == (params.logprobs or 0)
            if choice.logprob is not None:
                logs = torch.tensor(before[at]).log_softmax(-1)
                assert choice.logprob == pytest.approx(float(logs[choice.token]), abs=1e-4)
                assert [token for token, _ in choice.top] == logs.topk(len(choice.top)).indices.tolist()
    assert compared > 200


def test_a_draw_does_not_depend_on_the_rest_of_the_round():
    chance = random.Random(3)
    rows = [_random_row(chance, at) for at in range(40)]
    logits = torch.randn(40, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 4
    together = _tokens(logits, *rows, ends=ENDS)
    assert together == [_tokens(logits[at : at + 1], row, ends=ENDS)[0] for at, row in enumerate(rows)]
    turned = _tokens(logits.flip(0), *reversed(rows), ends=ENDS)
    assert together == turned[::-1]


@pytest.mark.parametrize(
    "options", [{}, {"top_p": 0.9}, {"repetition_penalty": 1.5, "frequency_penalty": 0.3, "tokens_min": 6}]
)
def test_an_answer_is_the_same_with_draft_tokens_and_without(options):
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))  # a model: the last token's
    params = {"temperature": 0.9, "seed": 11, **options}
    alone, sampler = _sequence([5], 1, **params), Sampler(ENDS, VOCABULARY)
    for _ in range(30):
        alone.tokens.append(sampler.pick(table[alone.tokens[-1]][None].clone(), [Row(alone)])[0].token)
    drafted, chance, right = _sequence([5], 1, **params), random.Random(1), 0
    while len(drafted.tokens) < 25:
        at = len(drafted.tokens)
        draft = tuple(t if chance.random() < 0.7 else chance.randrange(VOCABULARY) for t in alone.tokens[at : at + 3])
        last = [drafted.tokens[-1], *draft]
        drawn = sampler.pick(table[last].clone(), [Row(drafted, draft[:n]) for n in range(4)])
        good = next((n for n, one in enumerate(draft) if drawn[n].token != one), 3)
        drafted.tokens += [one.token for one in drawn[: good + 1]]
        right += good
    assert drafted.tokens == alone.tokens[: len(drafted.tokens)] and right > 5


def test_forks_draw_from_seeds_of_their_own():
    logits = torch.zeros(1, VOCABULARY).expand(30, -1)
    drawn = _tokens(logits, *[_sequence(temperature=1.0, seed=seed, order=seed) for seed in range(30)])
    assert len(set(drawn)) > 15


def test_successive_tokens_of_one_seed_are_drawn_afresh():
    rows = [_sequence([1] * length, temperature=1.0, seed=7, order=length) for length in range(2, 32)]
    assert len(set(_tokens(torch.zeros(30, 1000), *rows))) > 25


def test_temperature_zero_takes_the_likeliest():
    logits = torch.randn(3, VOCABULARY)
    assert _tokens(logits, *[_sequence() for _ in range(3)]) == logits.argmax(-1).tolist()
    assert _tokens(logits, *[_sequence(temperature=1e-6) for _ in range(3)]) == logits.argmax(-1).tolist()


def test_greedy_rows_among_drawn_ones_take_the_likeliest_after_penalties():
    logits = torch.tensor([[2.0, 1.9, 1.8, -1.0]] * 3)
    greedy = _sequence([3, 0], 1, presence_penalty=1.0, order=1)
    drawn = [_sequence(temperature=1.0, seed=order, order=order) for order in (5, 6)]
    assert _tokens(logits, drawn[0], greedy, drawn[1])[1] == 1


def test_penalties_push_down_what_was_said():
    logits = torch.tensor([[2.0, 1.9, 1.8, -1.0]])
    assert _tokens(logits, _sequence([0, 3], 2, repetition_penalty=1.2)) == [1]  # counts the prompt
    assert _tokens(logits, _sequence([0, 3], 2, presence_penalty=1.0)) == [0]  # does not
    assert _tokens(logits, _sequence([3, 0], 1, presence_penalty=1.0)) == [1]
    assert _tokens(logits, _sequence([3, 0, 0, 0, 1], 1, frequency_penalty=0.15)) == [2]


def test_ends_wait_for_the_least_length():
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    early = _sequence([0, 0], 2, tokens_min=1, stop_token_ids=[2])
    assert _tokens(logits, early, ends=frozenset({1})) == [0]
    early.tokens.append(0)
    assert _tokens(logits, early, ends=frozenset({1})) == [1]


def test_a_row_without_usable_numbers_is_marked_unsound():
    for params in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}, {"allowed_token_ids": [1, 2]}):
        logits = torch.randn(4, 500)
        logits[1, 4] = torch.nan
        logits[2] = -torch.inf
        rows = [_sequence(order=order, **params) for order in range(4)]
        assert [choice.sound for choice in _pick(logits, *rows)] == [True, False, False, True], params


def test_a_row_whose_options_leave_no_token_is_not_sound():
    nothing = _sequence(allowed_token_ids=[0], tokens_min=1)
    assert [one.sound for one in _pick(torch.zeros(2, 9), nothing, _sequence(), ends=frozenset({0}))] == [False, True]


def test_options_kept_ready_are_those_of_the_sequence_at_hand(monkeypatch):
    monkeypatch.setattr(sampling, "KEPT_MIN", 1)
    sampler, logits = Sampler(frozenset(), 4), torch.tensor([[2.0, 1.9, 1.8, -1.0]])
    said = [_sequence([3, token], 1, presence_penalty=3.0, order=order) for order, token in ((0, 0), (0, 1), (1, 0))]
    said += [_sequence([3, 0], 1, order=0), replace(said[0], banned=((1,),))]
    for _ in range(2):
        assert [sampler.pick(logits.clone(), [Row(one)])[0].token for one in said] == [1, 0, 1, 0, 2]
    many = [replace(said[0], order=order) for order in range(10)]
    assert {one.token for one in sampler.pick(logits.expand(10, -1).clone(), [Row(one) for one in many])} == {1}


class OnlyOdd:
    """Stands in for a grammar's matcher: token ids have to be odd."""

    words, vocabulary = 1, 6

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def fill(self, row: torch.Tensor) -> None:
        if self.error:
            raise self.error
        row.fill_(0b101010)

    def rollback(self, count: int) -> None: ...


def test_grammars_have_the_last_word_and_fail_alone():
    logits = torch.tensor([[5.0, 1.0, 4.0, 2.0, 3.0, 0.0]] * 3)
    biased = _sequence(logit_bias={"2": 9, "1": 9}, logprobs=1)
    broken = InputError("the grammar is too large")
    free, odd, failed = _pick(logits, Row(_sequence()), Row(biased, (), OnlyOdd()), Row(biased, (), OnlyOdd(broken)))
    assert (free.token, free.sound) == (0, True)
    assert (odd.token, odd.top[0][0], odd.sound) == (1, 0, True)
    assert not failed.sound and failed.error is broken


def test_prompt_logprobs_include_the_top_tokens():
    logits = torch.randn(3, VOCABULARY)
    found = Sampler(ENDS, VOCABULARY).prompt_logprobs(logits, [4, 5, 6], 2)
    logs = logits.log_softmax(-1)
    assert [one.token for one in found] == [4, 5, 6]
    assert [one.logprob for one in found] == pytest.approx([float(logs[at, 4 + at]) for at in range(3)], abs=1e-5)
    assert [one.top[0][0] for one in found] == logits.argmax(-1).tolist() and len(found[0].top) == 2
    assert Sampler(ENDS, VOCABULARY).prompt_logprobs(logits[:0], [], 2) == []
