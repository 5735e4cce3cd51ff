"""Counts kept up over rounds are those of counting anew, whatever happens to the tokens."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from weftline.engine.llm.sampling.logits_processing import TokenCounts

TOKEN = st.integers(0, 40)
STEP = st.one_of(
    st.tuples(st.just("say"), st.lists(TOKEN, max_size=20)),
    st.tuples(st.just("wrong draft"), st.lists(TOKEN, min_size=1, max_size=5)),
    st.tuples(st.just("another's"), st.lists(TOKEN, max_size=30)),
)


def _check(history: TokenCounts, tokens: list[int], prompt: int, draft: list[int], from_prompt: bool) -> None:
    ids, times = history.count(tokens, prompt, draft, from_prompt)
    found = dict(zip(ids.tolist(), times.tolist(), strict=True))
    answer = Counter([*tokens[prompt:], *draft])
    assert len(found) == len(ids)
    assert found == {token: answer[token] for token in ({*tokens, *draft} if from_prompt else answer)}


@given(st.lists(TOKEN, max_size=20), st.lists(STEP, max_size=12), st.lists(TOKEN, max_size=5), st.booleans())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_counts_are_those_of_counting_anew(tokens, steps, draft, from_prompt):
    history, prompt = TokenCounts(), len(tokens) // 2
    for kind, some in steps:
        if kind == "say":
            tokens += some
        elif kind == "wrong draft":  # as a draft model's view of a sequence does it: another list, another end
            tokens = tokens[: max(prompt, len(tokens) - len(some))] + some
        else:
            tokens, prompt = list(some), len(some) // 3
        _check(history, tokens, prompt, [], from_prompt)
        _check(history, tokens, prompt, draft, from_prompt)
        _check(history, tokens, prompt, draft[:1], not from_prompt)


def test_only_what_is_new_is_looked_at():
    class Counted(list[int]):
        looked = 0

        def __getitem__(self, at):
            Counted.looked += 1
            return super().__getitem__(at)

    tokens, history = Counted(range(100)), TokenCounts()
    history.count(tokens, 50)
    Counted.looked = 0
    tokens.append(7)
    history.count(tokens, 50, (1, 2))
    assert Counted.looked == 1
