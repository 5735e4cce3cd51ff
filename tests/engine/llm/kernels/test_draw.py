"""The sampling kernel's launch, the numbers it shares with the reference, and who uses it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from weftline.engine.llm.kernels import draw as draw_kernels
from weftline.engine.llm.kernels.checks import draw_cases, draw_error
from weftline.engine.llm.kernels.draw import draw_launch
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.sampling import draw as drawing
from weftline.engine.llm.sampling import sampler
from weftline.engine.llm.sampling.sampler import Row, Sampler
from weftline.engine.llm.sequence import Sequence

ROWS, VOCABULARY = 3, 50
GIVEN = {
    "logits": torch.zeros(ROWS, VOCABULARY),
    "temperature": torch.ones(ROWS),
    "seed": torch.zeros(ROWS, dtype=torch.int64),
    "position": torch.zeros(ROWS, dtype=torch.int64),
}


@pytest.mark.parametrize(
    ("name", "wrong", "says"),
    [
        ("logits", torch.zeros(ROWS, VOCABULARY).half(), "wants dense rows of float32"),
        ("logits", torch.zeros(VOCABULARY, ROWS).t(), "wants dense rows of float32"),
        ("logits", torch.zeros(ROWS, 0), "a vocabulary of at least 1"),
        ("temperature", torch.ones(ROWS - 1), "temperatures: wants dense torch.float32 [3]"),
        ("seed", torch.zeros(ROWS), "seeds: wants dense torch.int64 [3]"),
        ("top_k", torch.zeros(ROWS), "top_ks: wants dense torch.int64 [3]"),
        ("min_p", torch.zeros(2 * ROWS)[::2], "min_ps: wants dense torch.float32 [3]"),
    ],
)
def test_wrong_tensors_are_refused(name: str, wrong: torch.Tensor, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        draw_launch(**{**GIVEN, name: wrong})


def test_rounds_that_narrow_have_one_form_and_others_another() -> None:
    plain = draw_launch(**GIVEN)[1].arguments
    assert [plain[name] for name in ("top_ks", "top_ps", "min_ps", "typical_ps")] == [None] * 4
    narrowed = draw_launch(**GIVEN, top_p=torch.full((ROWS,), 0.9))[1].arguments
    assert narrowed["top_ks"].tolist() == [0] * ROWS and narrowed["typical_ps"].tolist() == [1.0] * ROWS


def test_the_numbers_of_the_hash_are_the_references() -> None:
    for name in ("_GOLDEN_64", "_FIRST_64", "_SECOND_64"):
        assert getattr(draw_kernels, name).value - (1 << 64) == getattr(drawing, name)
    assert draw_kernels._GOLDEN_32.value - (1 << 32) == drawing._GOLDEN_32
    assert draw_kernels._FIRST_32.value == drawing._FIRST_32
    assert draw_kernels._SECOND_32.value - (1 << 32) == drawing._SECOND_32
    for name in ("_STEP", "_LARGEST", "_SMALL"):
        assert getattr(draw_kernels, name).value == getattr(drawing, name)
    assert draw_kernels.COLD.value == drawing.COLD


class FakeKernel:
    """Draws with the reference, and notes which rows it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[int] = []
        self._torch = drawing.try_draw
        self._patch = monkeypatch
        for module in (drawing, sampler):
            monkeypatch.setattr(module, "draw_kernel", lambda device: self)

    def __call__(self, logits: torch.Tensor, *settings: Any) -> torch.Tensor:
        self.calls.append(len(logits))
        with self._patch.context() as patch:
            patch.setattr(drawing, "draw_kernel", lambda device: None)
            return drawing.draw(logits, drawing.DrawSettings(*settings))


def test_where_the_kernel_can_be_used_it_draws_all_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    options = [{}, {"top_k": 30}, {"top_p": 0.9}, {"typical_p": 0.5}, {"temperature": 0.0}, {"min_p": 0.1, "top_k": 3}]
    rows = [
        Row(Sequence(1, [1, 2], 2, 99, SamplingParams(**{"temperature": 0.9, **one}), at, seed=at))
        for at, one in enumerate(options)
    ]
    logits = torch.randn(len(rows), 900, generator=torch.Generator().manual_seed(0)) * 3
    expected = [choice.token for choice in Sampler(frozenset(), 900).pick(logits.clone(), rows)]
    kernel = FakeKernel(monkeypatch)
    assert [choice.token for choice in Sampler(frozenset(), 900).pick(logits.clone(), rows)] == expected
    assert kernel.calls == [5]


def test_a_cold_row_picks_the_lowest_of_equal_tokens_with_any_filter() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0, 5.0, 5.0]]).repeat(2, 400)
    settings = drawing.DrawSettings(torch.zeros(2), torch.zeros(2).long(), torch.zeros(2).long(), torch.tensor([0, 7]))
    assert drawing.draw(logits, settings).tolist() == [1, 1]


def test_the_check_counts_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        def run(self) -> None: ...

    rows = draw_cases()["ties"]()
    module = "weftline.engine.llm.kernels.checks.draw_launch"
    monkeypatch.setattr(module, lambda logits, **given: (torch.full((len(logits),), -1), Nothing()))
    assert draw_error(rows, torch.device("cpu")) == len(rows)
