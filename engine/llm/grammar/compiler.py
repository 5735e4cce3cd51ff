"""Asynchronous, bounded compilation and cache of structured-output constraints.

    compiler = GrammarCompiler(tokenizer, vocabulary, ends)     # once for a model; starts nothing yet
    pending = compiler.submit(Constraint.read({"regex": "[0-9]+"}))     # at once; LimitReached when too many wait
    pending.ready; pending.wait(0.002)                          # checked each round; waits only when nothing else runs
    grammar = pending.result()                                  # InputError: refused, with the reason for the caller
    matcher = grammar.matcher()                                 # one for each sequence, in microseconds
    failed = apply_masks(logits, [matcher, None, ...])          # once for each round, before sampling; by row
    matcher.accept(token)                                       # after sampling, for every token of the answer
    matcher.finished                                            # no token can follow: the answer may end

A preempted sequence keeps its matcher. Requests with a constraint are not speculated on. Other options must leave some
token: `tokens_min` delays an end that may be the only legal token, and `ignore_eos` continues where no token is legal.

One thread compiles constraints in order. Each is first compiled in the trial process (`sandbox.TrialProcess`), which is
killed when it takes too long. A constraint that passes is compiled here for the model's own tokens, while other threads
continue. The last ones are cached, refused ones too. No thread, process or tokenizer table exists before the first
constraint.
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import threading
from collections import OrderedDict
from typing import Any

from weftline.engine.llm.grammar.constraint import Constraint
from weftline.engine.llm.grammar.masks import Vocabulary, read_vocabulary
from weftline.engine.llm.grammar.matcher import Grammar, explain
from weftline.engine.llm.grammar.sandbox import TrialProcess
from weftline.engine.llm.params import sampling_error
from weftline.errors import InputError, LimitReached, MissingPackage, ModelError, SessionClosed, WeftlineError

__all__ = ["Constraint", "Grammar", "GrammarCompiler", "Pending"]

CACHE_MAX = 32
"""Constraints kept; usually less than 1 MB each, and about 30 MB at most."""
WAITING_MAX = 256
"""Most constraints that wait to be prepared."""
CLOSE_MAX_S = 10.0

_SPACES = r"( |\n{1,2}[ \t]{0,20})"
"""What JSON may have between its parts: enough to be indented, too little for a model to go on with for ever."""

_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)

# a token by its id, or what may contain the same characters: a comment, a text
_TOKEN_ID = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|<\[[0-9]{1,9}\]>')


class Pending:
    """Future of a compiled constraint."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._outcome: Grammar | WeftlineError | None = None

    @property
    def ready(self) -> bool:
        """Return whether `result` is available."""
        return self._done.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until `ready`, at most `timeout_s` seconds; return whether it is."""
        return self._done.wait(timeout_s)

    def result(self) -> Grammar:
        """Return the compiled grammar; RuntimeError before it is ready.

        InputError: the constraint is wrong or takes too much. LimitReached: no process could be started for it.
        ModelError: the model's tokenizer cannot be constrained. SessionClosed: the compiler was closed.
        """
        if isinstance(self._outcome, Grammar):
            return self._outcome
        if self._outcome is None:
            raise RuntimeError("the result of a constraint that is not ready; ask `ready` first")
        kind = type(self._outcome)
        error = kind.__new__(kind, *self._outcome.args)  # a new one for each: an exception gathers its callers' frames
        vars(error).update(vars(self._outcome))
        raise error

    def finish(self, outcome: Grammar | WeftlineError) -> None:
        """Set the outcome, once."""
        if not self.ready:
            self._outcome = outcome
            self._done.set()


class GrammarCompiler:
    """Compile constraints for one model; `submit` and `close` are thread-safe."""

    def __init__(
        self,
        tokenizer: Any,
        vocabulary: int,
        ends: frozenset[int],
        *,
        cache_max: int = CACHE_MAX,
        trials: TrialProcess | None = None,
    ) -> None:
        """tokenizer: a fast one of transformers.   vocabulary: columns of the logits.   ends: end-of-text tokens."""
        self._tokenizer = tokenizer
        self._size = vocabulary
        self._ends = ends
        self._cache_max = cache_max
        self._trials = trials or TrialProcess()
        self._vocabulary: Vocabulary | ModelError | None = None
        self._known: OrderedDict[tuple[bytes, Constraint], Pending] = OrderedDict()
        self._waiting: queue.Queue[tuple[bytes, Constraint, Pending] | None] = queue.Queue(WAITING_MAX)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, constraint: Constraint, salt: bytes = b"") -> Pending:
        """Queue a constraint and return its future without waiting.

        salt: callers with the same salt share a compiled constraint. For others its time is that of a new one, so it
              does not depend on what other callers have sent.

        LimitReached when too many wait, SessionClosed after `close`.
        """
        with self._lock:
            if self._closed:
                raise SessionClosed("the engine is closed")
            pending = self._known.get((salt, constraint))
            if pending is None:
                pending = Pending()
                try:
                    self._waiting.put_nowait((salt, constraint, pending))
                except queue.Full:
                    message = f"sampling: {WAITING_MAX} constraints wait to be prepared, the limit; try again"
                    raise LimitReached(message, 1.0) from None
                self._known[salt, constraint] = pending
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="weftline-grammars", daemon=True)
                    self._thread.start()
            self._known.move_to_end((salt, constraint))
            while len(self._known) > self._cache_max:
                self._known.popitem(last=False)
            return pending

    def close(self) -> None:
        """Stop the thread and its process; pending constraints fail with SessionClosed."""
        with self._lock:
            self._closed = True
            thread = self._thread
            self._known.clear()
        self._trials.close()
        if thread is None:
            return
        with contextlib.suppress(queue.Empty):
            while (job := self._waiting.get_nowait()) is not None:
                job[2].finish(SessionClosed("the engine was closed while the constraint waited"))
        self._waiting.put(None)
        thread.join(CLOSE_MAX_S)

    def _run(self) -> None:
        while (job := self._waiting.get()) is not None:
            salt, constraint, pending = job
            try:
                outcome: Grammar | WeftlineError = self._prepare(constraint)
            except WeftlineError as error:
                outcome = error
            except BaseException as error:  # a panic too: a thread that ended here would leave everybody waiting
                outcome = sampling_error(constraint.kind, f"cannot be prepared: {type(error).__name__}")
            if not isinstance(outcome, Grammar | InputError):
                self._forget((salt, constraint), pending)
            pending.finish(outcome)
        self._trials.kill()

    def _forget(self, key: tuple[bytes, Constraint], pending: Pending) -> None:
        """Remove a transient failure from the cache."""
        with self._lock:
            if self._known.get(key) is pending:
                del self._known[key]

    def _prepare(self, constraint: Constraint) -> Grammar:
        if constraint.kind == "grammar" and _GBNF_RULE.search(str(constraint.value)):
            constraint = Constraint("grammar", self._trials.wait_translation(str(constraint.value)))
        error = self._trials.wait_trial(_translated(_without_token_ids(constraint)))
        if error:
            raise InputError(explain(error))
        if self._vocabulary is None:
            self._vocabulary = read_vocabulary(self._tokenizer, self._size, self._ends)
        if isinstance(self._vocabulary, ModelError):
            raise self._vocabulary
        grammar = Grammar(self._vocabulary, _translated(constraint))
        self._try_beginning(grammar)
        return grammar

    def _try_beginning(self, grammar: Grammar) -> None:
        """Compute the first mask, to raise its errors early and warm the parser's lexer states."""
        import torch

        row = torch.empty(grammar.vocabulary.words, dtype=torch.int32)
        matcher = grammar.matcher()
        matcher.fill(row)
        word = int(row.nonzero()[0])
        first = next(bit for bit in range(32) if int(row[word]) >> bit & 1)
        if matcher.accept(32 * word + first):
            matcher.rollback(1)


def _without_token_ids(constraint: Constraint) -> Constraint:
    """Replace tokens in a grammar by a letter, for the trial process, which does not have the model's tokens."""
    if constraint.kind != "grammar" or not isinstance(constraint.value, str):
        return constraint
    letters = _TOKEN_ID.sub(lambda found: '"t"' if found[0].startswith("<") else found[0], constraint.value)
    return Constraint("grammar", letters)


def _translated(constraint: Constraint) -> str:
    """Translate the constraint for llguidance; InputError where its meaning would change."""
    try:
        from llguidance import LLMatcher, regex_to_lark
    except ImportError:
        raise MissingPackage("llguidance", "llm") from None

    value = constraint.value
    if isinstance(value, tuple):
        return LLMatcher.grammar_from_regex("|".join(map(_literal, value)))
    if constraint.kind in ("regex", "grammar"):
        # \d and \w are ASCII as in JSON Schema: a model is not asked for digits in forty scripts.
        lark = value if constraint.kind == "grammar" else f"start: /{regex_to_lark(value, 'dw')}/"
        return json.dumps({"grammars": [{"lark_grammar": lark}]})  # bare, it could be taken for such JSON itself
    schema = value if constraint.kind == "json_schema" else '{"type": "object"}'
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _SPACES, "lenient": False})


def _literal(text: str) -> str:
    """Return a pattern that matches exactly `text`."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):X}}}" for char in text)
