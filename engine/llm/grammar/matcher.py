"""Grammar matcher of one sequence: state and permitted next tokens.

llguidance parses, and bounds memory and steps of each move (`LIMITS`). This module also bounds processor time per move
and in total. A matcher over a limit raises InputError for its own request only.

The end of the text is not decided by the grammar alone: end tokens are allowed exactly where the text is complete, and
control tokens and padding never, even when a grammar names them.

Sequences with the same constraint share the parser's lexer states, which speeds up later ones and could charge them for
an earlier one's excess. A matcher that fails in shared state therefore restarts once with fresh state.

The parser's error messages name its own parts and limits. `explain` translates them for the author of the constraint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from weftline.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from weftline.engine.llm.grammar.masks import Vocabulary

LIMITS: dict[str, Any] = {
    "max_items_in_row": 2_000,  # ways to go on at one place: about 500 optional properties
    "initial_lexer_fuel": 1_000_000,  # 20 ms
    "step_lexer_fuel": 200_000,  # 15 ms, seen 90
    "step_max_items": 20_000,  # a few ms, for what is not ambiguous
    "max_lexer_states": 100_000,  # up to 200 MB; counted repeats over a long text take 30 for each token
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
"""The parser's own limits, in its own units; the library's defaults but for the states and the items of a step."""
MOVE_MAX_MS = 250.0
"""Most processor time of one move (a mask, or a token taken): so long the others of a round may have to wait."""
BURST_MS = 1000.0
STEADY_MS = 10.0
"""All moves of a matcher may take BURST_MS, and STEADY_MS for each of them; usual ones take 0.02 to 1 ms."""
RENEW_MS = 300.0
RENEW_MAKINGS = 20
"""A grammar forgets what its matchers have learnt (30 MB, as measured) after RENEW_MS of their processor time, but not
before RENEW_MAKINGS times what it took to make it."""


class Grammar:
    """A compiled constraint, shared by any number of sequences. Not thread-safe."""

    def __init__(self, vocabulary: Vocabulary, text: str) -> None:
        self.vocabulary = vocabulary
        self._text = text
        self._spent_ms = 0.0
        self._fresh, self._making_ms = timed(self.parser)

    def parser(self) -> Any:
        """Create a parser with unshared state, in the start state; releases the GIL meanwhile.

        InputError when the grammar is over a limit or wrong.
        """
        from llguidance import LLMatcher, LLParserLimits

        made = LLMatcher(self.vocabulary.tokenizer, self._text, log_level=0, limits=LLParserLimits(**LIMITS))
        if made.is_error():
            raise InputError(explain(made.get_error()))
        return made

    def matcher(self) -> Matcher:
        """Create a matcher in the start state; takes microseconds unless the shared state is renewed."""
        if self._spent_ms > max(RENEW_MS, RENEW_MAKINGS * self._making_ms):
            return Matcher(self, self.renew())
        return Matcher(self, self._fresh.deep_copy())

    def note(self, took_ms: float) -> None:
        """Add the processor time of a matcher's move."""
        self._spent_ms += took_ms

    def renew(self) -> Any:
        """Replace the shared parser state; return a parser of the new state."""
        fresh = self.parser()
        self._fresh, self._spent_ms = fresh, 0.0
        return fresh.deep_copy()


def timed(make: Callable[[], Any]) -> tuple[Any, float]:
    """Call `make`; return its result and its processor time in milliseconds."""
    began = time.thread_time()
    made = make()
    return made, (time.thread_time() - began) * 1e3


class Matcher:
    """Parser state of one sequence. Not thread-safe; raises InputError at a limit.

    After an error it cannot be used, and its request has failed.
    """

    def __init__(self, grammar: Grammar, parser: Any) -> None:
        self._grammar = grammar
        self._vocabulary = grammar.vocabulary
        self._parser = parser
        self._tokens: list[int] = []
        self._revived = False
        self._moves = 0
        self._spent_ms = 0.0
        self._taking_ms = 0.0
        self._ended = False

    @property
    def words(self) -> int:
        """Return the number of 32-bit words in a mask row."""
        return self._vocabulary.words

    @property
    def vocabulary(self) -> int:
        """Return the number of columns of the logits."""
        return self._vocabulary.size

    @property
    def complete(self) -> bool:
        """Return whether the text may end here."""
        return self._ended or bool(self._parser.is_accepting())

    @property
    def finished(self) -> bool:
        """Return whether the text is complete and only an end token can follow."""
        return self._ended or bool(self._parser.is_stopped() and self._parser.is_accepting())

    def fill(self, row: Tensor) -> None:
        """Write the mask of allowed tokens to `row`, int32 [words] on the host: bit i % 32 of word i // 32.

        At least one bit is set. Releases the GIL while computing. After the end, only end tokens are allowed.
        """
        shape, words = tuple(row.shape), self.words  # the parser writes to an address, whatever is there
        if shape != (words,) or row.element_size() != 4 or row.is_cuda or not row.is_contiguous():
            raise ValueError(f"a mask's row of {row.dtype} {shape}, expected {words} words of int32 side by side")
        if self._ended:
            row.zero_()
        else:
            with self._timed():
                self._parser.unsafe_compute_mask_ptr(row.data_ptr(), 4 * self.words)
                if self._parser.is_error():
                    self._revive()
                    self._parser.unsafe_compute_mask_ptr(row.data_ptr(), 4 * self.words)
                    self._check()
            row &= self._vocabulary.plain
        if self.complete:
            for end in self._vocabulary.ends:
                row[end // 32] |= _BITS[end % 32]
        elif not row.any():
            raise InputError(f"{WHERE} no token of this model can go on from here; change it")

    def accept(self, token: int) -> bool:
        """Advance by one token; return False without a change if the grammar forbids it."""
        vocabulary = self._vocabulary
        if self._ended or not 0 <= token < vocabulary.size:
            return False
        if token in vocabulary.ends:
            if not self.complete:
                return False
            self._ended = True
            self._tokens.append(token)
            return True
        if token in vocabulary.silent:
            return False
        before_ms = self._spent_ms
        with self._timed():
            taken = self._try(token)
            if not taken:
                self._parser.compute_bitmask()  # says whether it is refused, or what is shared is used up
            if self._parser.is_error():
                self._revive()
                taken = self._try(token)
                self._check()
        self._taking_ms += self._spent_ms - before_ms
        if taken:
            self._tokens.append(token)
        return taken

    def rollback(self, tokens: int) -> None:
        """Undo the last `tokens` accepted tokens."""
        if not 0 <= tokens <= len(self._tokens):
            raise ValueError(f"cannot take back {tokens} tokens of {len(self._tokens)}")
        if tokens == 0:
            return
        parsed = tokens - self._ended
        self._ended = False
        del self._tokens[-tokens:]
        if parsed:
            self._parser.rollback(parsed)
            self._check()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count a move and its processor time; InputError above a limit."""
        began = time.thread_time()
        yield
        took_ms = (time.thread_time() - began) * 1e3
        self._moves += 1
        self._spent_ms += took_ms
        self._grammar.note(took_ms)
        if took_ms > MOVE_MAX_MS:
            raise InputError(f"{WHERE} a token took {took_ms:.0f} ms, the most is {MOVE_MAX_MS:g}; {SIMPLER}")
        if self._spent_ms > BURST_MS + STEADY_MS * self._moves:
            each = self._spent_ms / self._moves
            raise InputError(f"{WHERE} takes {each:.1f} ms for each token, the most is {STEADY_MS:g}; {SIMPLER}")

    def _try(self, token: int) -> bool:
        return bool(self._parser.try_consume_tokens([token]) == 1)

    def _revive(self) -> None:
        """Restart once with fresh state and the same tokens, since other sequences may have exhausted the shared state.

        Not for what is never shared, nor where taking the same tokens again would take long.
        """
        shared = self._parser.get_error().startswith("lexer error")
        if shared and not self._revived and self._taking_ms < MOVE_MAX_MS:
            self._revived = True
            self._parser = self._grammar.renew()
            self._parser.try_consume_tokens(self._tokens)
        self._check()

    def _check(self) -> None:
        if self._parser.is_error():
            raise InputError(explain(self._parser.get_error()))


_BITS = [1 << bit if bit < 31 else -(1 << 31) for bit in range(32)]
"""Single bits as int32 has them: the last one is the sign."""


WHERE = "sampling: the constraint:"
SIMPLER = "make it simpler, or less ambiguous"


def explain(error: str) -> str:
    """Translate a parser error for the author of the constraint."""
    lines = error.partition("\n<non-verbose/>")[0].splitlines() or [""]
    reason = next((meaning for sign, meaning in _MEANINGS.items() if sign in lines[0]), "")
    if not reason:  # of a wrong pattern, only one of the lines says what is wrong
        reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
        reason = reason.partition(" in regex /")[0].replace("json-schema://", "")
    return f"{WHERE} {reason.strip() or 'it cannot be used':.300}"


_MEANINGS = {
    "too many states:": f"needs too many states; {SIMPLER}",
    "too many expressions constructed": f"is too large once its repeats are written out; {SIMPLER}",
    "Too many items (limit": f"can go on in too many ways at once; {SIMPLER}",
    "Current row has": f"can go on in too many ways at once; {SIMPLER}",
    "too big (limit for this grammar": f"is too large once its repeats are written out; {SIMPLER}",
    "schema too large": f"is too large once its alternatives are written out; {SIMPLER}",
    "fuel exhausted": f"takes too long to prepare; {SIMPLER}",
    "lexer precomputation failed": f"takes too long to prepare; {SIMPLER}",
    "special token": "it names a control token, which is no text; write the text itself",
    "rollback not supported": "tokens cannot be taken back; leave out max_tokens and stop",
    "NoExtension": "no text satisfies it",
    "InternalError": f"is too complex; {SIMPLER}",
    "panic:": "it cannot be used",
}
"""Parts of the parser's error lines, and their meaning for the author of the constraint."""
