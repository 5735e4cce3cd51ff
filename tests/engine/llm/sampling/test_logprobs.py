"""Log-probabilities are those of the logits as they are."""

from __future__ import annotations

import math

import pytest
import torch

from weftline.engine.llm.sampling.draw import LOGPROB_MIN, token_logprobs


def test_they_are_those_of_the_softmax():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 5
    logs = logits.double().log_softmax(-1)
    logprobs = token_logprobs(logits, torch.tensor([4, 7, 9]), [0, 3, 50])
    for at, (token, top) in enumerate(zip((4, 7, 9), (0, 3, 50), strict=True)):
        assert logprobs[at][0] == pytest.approx(float(logs[at, token]), abs=1e-5)
        assert [one for one, _ in logprobs[at][1]] == logs[at].sort(descending=True).indices[:top].tolist()
        values = logs[at].sort(descending=True).values[:top].tolist()
        assert [one for _, one in logprobs[at][1]] == pytest.approx(values, abs=1e-5)


def test_more_than_there_are_is_all_there_are():
    assert len(token_logprobs(torch.zeros(1, 5), torch.tensor([0]), [20])[0][1]) == 5


def test_a_token_without_a_chance_has_a_number_that_json_knows():
    logits = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    (chosen, top), *_ = token_logprobs(logits, torch.tensor([1]), [2])
    assert chosen == LOGPROB_MIN and top[0] == (0, 0.0) and top[1][1] == LOGPROB_MIN
    assert all(
        math.isfinite(value) for _, value in token_logprobs(torch.full((1, 3), torch.nan), torch.tensor([1]), [2])[0][1]
    )
