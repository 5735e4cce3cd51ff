"""Grammars of running requests with structured output: compilation and state.

`weftline.engine.llm.grammar.compiler` compiles; this module maps sequences to matchers. An engine without a tokenizer
refuses constraints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from weftline.engine.llm.params import SamplingParams, sampling_error
from weftline.engine.llm.request import LlmRequest
from weftline.engine.llm.sequence import Sequence
from weftline.errors import InputError, WeftlineError

if TYPE_CHECKING:
    from weftline.engine.llm.grammar.compiler import GrammarCompiler
    from weftline.engine.llm.tokens import Tokens

_PREFIX = "sampling: the constraint: "
"""Prefix of the compiler's and the matchers' errors, which do not contain the key of the constraint."""
NO_CONSTRAINT: Mapping[str, Any] = {}
WAIT_MS = 2.0
"""Time that a step waits for a grammar when there is nothing else to compute."""


class RequestGrammars:
    """Matchers by sequence; the compiler starts with the first grammar.

    tokens: None refuses constraints.
    own:    the constraint of the pipeline file, as SamplingParams.constraint; all callers share it once compiled.
    """

    def __init__(
        self,
        tokens: Tokens | None,
        vocabulary: int = 0,
        ends: frozenset[int] = frozenset(),
        own: Mapping[str, Any] = NO_CONSTRAINT,
    ) -> None:
        self._own = dict(own)
        self._tokens = tokens
        self._vocabulary = vocabulary
        self._ends = ends
        self._compiler: GrammarCompiler | None = None
        self._pending: dict[int, Any] = {}
        self._matchers: dict[int, Any] = {}

    def start(self, request: LlmRequest) -> bool:
        """Start compiling a request's constraint; return False when it has none."""
        constraints = request.sequences[0].params.constraint
        if not constraints:
            return False
        if self._tokens is None:
            raise sampling_error(next(iter(constraints)), "this engine does not support constraints")
        from weftline.engine.llm.grammar.compiler import Constraint, GrammarCompiler

        constraint = Constraint.read(constraints)
        if self._compiler is None:
            self._compiler = GrammarCompiler(self._tokens.tokenizer, self._vocabulary, self._ends)
        first = request.sequences[0]
        salt = b"" if constraints == self._own else first.own_salt
        self._pending[first.order] = self._compiler.submit(constraint, salt)
        return True

    def is_ready(self, request: LlmRequest, wait: bool) -> bool:
        """Return whether a request's grammar is compiled; InputError if it is invalid. wait: wait up to WAIT_MS."""
        first = request.sequences[0].order
        pending = self._pending[first]
        if wait and not pending.ready:
            pending.wait(WAIT_MS / 1e3)
        if not pending.ready:
            return False
        del self._pending[first]
        try:
            compiled = pending.result()
        except InputError as error:
            raise constraint_error(error, request.sequences[0].params) from None
        for sequence in request.sequences:
            self._matchers[sequence.order] = compiled.matcher()
        return True

    @property
    def any(self) -> bool:
        """Return whether any sequence has a grammar."""
        return bool(self._matchers)

    def matcher(self, sequence: Sequence) -> Any:
        """Return a sequence's matcher; None without a constraint."""
        return self._matchers.get(sequence.order) if self._matchers else None

    def accept(self, sequence: Sequence, token: int) -> None:
        matcher = self.matcher(sequence)
        if matcher is not None:
            matcher.accept(token)

    def finished(self, sequence: Sequence) -> bool:
        """Return whether a sequence's text is complete and nothing can follow."""
        matcher = self.matcher(sequence)
        return matcher is not None and bool(matcher.finished)

    def drop(self, sequence: Sequence) -> None:
        self._pending.pop(sequence.order, None)
        self._matchers.pop(sequence.order, None)

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.close()


def constraint_error(error: WeftlineError, params: SamplingParams) -> WeftlineError:
    """Return an error of a compiler or matcher as one of the key of the request's constraint."""
    if not isinstance(error, InputError):
        return error
    kind = next(iter(params.constraint))
    return sampling_error(kind, str(error).removeprefix(_PREFIX).removeprefix(f"sampling.{kind}: "))
