"""Masks of a round: only constrained rows change, and what fails fails alone."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from tests.engine.llm import tiny
from weftline.engine.llm.grammar import matcher as grammar_matcher
from weftline.engine.llm.grammar.compiler import Constraint, Grammar, GrammarCompiler
from weftline.engine.llm.grammar.masks import apply_masks, read_vocabulary, unpack_on_device, unpack_on_host
from weftline.engine.llm.grammar.matcher import Matcher
from weftline.errors import InputError, StepError

WORDS = tiny.tokenizer()
END = int(WORDS.eos_token_id)
SIZE = len(WORDS) + 45  # no multiple of 32


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(WORDS, SIZE, frozenset({END}))
    yield made
    made.close()


def grammar(compiler: GrammarCompiler, pattern: str) -> Grammar:
    pending = compiler.submit(Constraint("regex", pattern))
    assert pending.wait(60)
    return pending.result()


def id_of(letter: str) -> int:
    (token,) = WORDS.encode(letter, add_special_tokens=False)
    return int(token)


def left(row: torch.Tensor) -> set[str]:
    """Return the texts of the tokens that are not forbidden."""
    return {WORDS.decode([int(token)]) for token in (row > -torch.inf).nonzero().flatten()}


def test_only_rows_with_a_matcher_change_and_allowed_logits_stay(compiler: GrammarCompiler) -> None:
    digits, letters = grammar(compiler, "[0-9]"), grammar(compiler, "[xyz]")
    logits = torch.randn(4, SIZE)
    before = logits.clone()
    assert apply_masks(logits, [None, digits.matcher(), None, letters.matcher()]) == {}
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    assert left(logits[1]) == set("0123456789")
    assert left(logits[3]) == set("xyz")
    kept = logits[1] > -torch.inf
    assert torch.equal(logits[1][kept], before[1][kept])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_logits_of_any_float_type_are_masked_in_place(compiler: GrammarCompiler, dtype: torch.dtype) -> None:
    logits = torch.zeros(2, SIZE, dtype=dtype)
    storage = logits.data_ptr()
    assert apply_masks(logits, [grammar(compiler, "[0-9]").matcher() for _ in range(2)]) == {}
    assert logits.data_ptr() == storage
    assert left(logits[0]) == left(logits[1]) == set("0123456789")


def test_columns_without_a_token_are_forbidden(compiler: GrammarCompiler) -> None:
    logits = torch.zeros(1, SIZE)
    apply_masks(logits, [grammar(compiler, r"(?s:.*)").matcher()])
    assert (logits[0, len(WORDS) :] == -torch.inf).all()
    assert (logits[0, : len(WORDS)] == 0).sum() > 200  # all but control tokens and bytes that begin no character


def test_a_round_without_constraints_costs_nothing_and_changes_nothing() -> None:
    logits = torch.randn(2, 5)
    before = logits.clone()
    assert apply_masks(logits, [None, None]) == {}
    assert apply_masks(logits[:0], []) == {}
    assert torch.equal(logits, before)


def test_logits_of_another_model_are_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(ValueError, match=f"the masks are for {SIZE}"):
        apply_masks(torch.zeros(1, SIZE - 1), [grammar(compiler, "a").matcher()])


class Broken(Matcher):
    """Raises `error` instead of filling a mask."""

    def __init__(self, grammar: Grammar, error: Exception) -> None:
        super().__init__(grammar, grammar.parser())
        self.error = error

    def fill(self, row: torch.Tensor) -> None:
        raise self.error


def test_what_fails_fails_alone_and_its_row_is_left_as_it_is(compiler: GrammarCompiler) -> None:
    digits = grammar(compiler, "[0-9]")
    matchers = [digits.matcher(), Broken(digits, InputError("too much")), digits.matcher()]
    logits = torch.zeros(3, SIZE)
    failed = apply_masks(logits, matchers)
    assert list(failed) == [1]
    assert isinstance(failed[1], InputError) and str(failed[1]) == "too much"
    assert left(logits[0]) == left(logits[2]) == set("0123456789")
    assert (logits[1] == 0).all()


def test_an_unexpected_error_is_not_reported_as_the_callers_mistake(compiler: GrammarCompiler) -> None:
    failed = apply_masks(torch.zeros(1, SIZE), [Broken(grammar(compiler, "[0-9]"), RuntimeError("/a/path"))])
    assert isinstance(failed[0], StepError)
    assert str(failed[0]) == "the constraint failed: RuntimeError"


def test_bits_mean_the_same_here_and_on_a_device() -> None:
    bits = torch.randint(-(1 << 31), (1 << 31) - 1, (3, 4), dtype=torch.int32)
    bits[0] = torch.tensor([0, -1, 1, -(1 << 31)])
    assert torch.equal(unpack_on_host(bits), unpack_on_device(bits))
    assert (~unpack_on_host(bits[:1])[0]).nonzero().flatten().tolist() == [*range(32, 64), 64, 127]


def test_a_matcher_over_its_limit_fails_alone(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(grammar_matcher.LIMITS, "max_lexer_states", 300)
    greedy, modest = grammar(compiler, "[ab]*a[ab]{50}").matcher(), grammar(compiler, "[ab]*").matcher()
    letters, rng, failed = (id_of("a"), id_of("b")), random.Random(3), {}
    for _ in range(3000):
        failed = apply_masks(torch.zeros(2, SIZE), [greedy, modest])
        if failed:
            break
        token = rng.choice(letters)
        assert greedy.accept(token) and modest.accept(token)
    assert list(failed) == [0]
    assert "too many states" in str(failed[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_logits_on_a_gpu_are_masked_there(compiler: GrammarCompiler) -> None:
    logits = torch.zeros(3, SIZE, device="cuda")
    assert apply_masks(logits, [grammar(compiler, "[0-9]").matcher(), None, grammar(compiler, "[xyz]").matcher()]) == {}
    assert left(logits[0].cpu()) == set("0123456789")
    assert (logits[1] == 0).all()
    assert left(logits[2].cpu()) == set("xyz")


def test_a_tokenizer_error_without_text_is_named_by_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise ValueError("\n")

    monkeypatch.setattr("llguidance.hf.from_tokenizer", refuse)
    refused = read_vocabulary(WORDS, SIZE, frozenset({END}))
    assert str(refused) == "structured output: the model's tokenizer cannot be used: ValueError"
