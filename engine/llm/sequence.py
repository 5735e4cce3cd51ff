"""Sequence: known and computed tokens of one request, and its states.

A `Sequence`'s whole progress is two numbers: how many tokens are *known* (prompt and answer so far) and for how many of
them keys and values are *computed*; a round hands out the difference. A request that wants several answers is read as
one sequence; when its prompt is computed the others *fork* from it and share its pages.

    event     join                preempt              finish, cancel, fail
              waiting -> running  running -> waiting   -> finished, cancelled, failed
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

from weftline.engine.llm.pages import PageTable
from weftline.engine.llm.params import SamplingParams, shown
from weftline.engine.llm.retention import Retention
from weftline.errors import InputError
from weftline.nodes.urgency import PATIENCE_MS, PRIORITY_STEP_MS

UNKNOWN = -1
"""Stands for a token that a round on its way will draw."""

MOVES: dict[tuple[str, str], str] = {
    ("waiting", "join"): "running",
    ("running", "preempt"): "waiting",
    ("running", "finish"): "finished",
    ("waiting", "finish"): "finished",  # it gave way while its last token was on its way
    ("waiting", "cancel"): "cancelled",
    ("running", "cancel"): "cancelled",
    ("waiting", "fail"): "failed",
    ("running", "fail"): "failed",
}
"""A sequence's life: (state, event) to state. finished, cancelled and failed have no way out and hold no pages."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request inside the engine; the schedule owns it and alone changes it.

    tokens:    known token ids, the prompt first.
    prompt:    how many of them are the prompt.
    limit:     most known tokens it may reach: prompt and answer, within the context and the pool.
    order:     when it arrived, as a count; the lower of two goes first when they are equally urgent.
    priority:  the higher goes first.
    salt:      what every cached prefix that it may share was made with: its adapter's.
    own_salt:  the same of all but the first `shared` tokens: its caller's.
    shared:    tokens at the beginning that are the operator's, so that whole pages of them are shared by all callers.
    arrived_ms, deadline_ms: on the clock of whoever plans rounds; no deadline is None.
    paused:    its reader is slow; it is given no tokens.
    due_ms:    how urgent it is, the lower goes first. It never changes, and whoever comes late enough comes after it
               whatever its priority, so everybody's turn comes.
    rank:      who goes first when not all can: the lower.
    computed:  how many tokens have keys and values in pages.
    cached:    how many of those came from the prefix cache when it first joined.
    hashes:    chained hash of each full page of known tokens, as far as they were needed.
    draft:     guesses at the tokens that follow the known ones, for the next round to check; often empty.
    guessed:   how many tokens were guessed for it; right: how many of them were.
    index:     which of a request's answers it is.
    seed:      what its draws come from, together with each token's place.
    banned:    token sequences that its answer must not contain.
    adapter:   the LoRA adapter it runs with, as a number of the runner's; 0 is the model as it is.
    whole:     every token of its prompt has to pass the model: nothing is taken from the prefix cache.
    forks:     further answers to the same prompt, which begin when it is computed.
    retention: how long which part of the prompt is worth keeping after it has ended.
    """

    id: int
    tokens: list[int]
    prompt: int
    limit: int
    params: SamplingParams
    order: int
    priority: int = 0
    salt: bytes = b""
    arrived_ms: float = 0.0
    deadline_ms: float | None = None
    paused: bool = False
    state: str = "waiting"
    computed: int = 0
    cached: int = 0
    preemptions: int = 0
    table: PageTable = field(default_factory=PageTable)
    hashes: list[bytes] = field(default_factory=list)
    draft: tuple[int, ...] = ()
    guessed: int = 0
    right: int = 0
    index: int = 0
    seed: int = 0
    banned: tuple[tuple[int, ...], ...] = ()
    adapter: int = 0
    whole: bool = False
    forks: tuple[Sequence, ...] = ()
    retention: tuple[Retention, ...] = ()
    own_salt: bytes = b""
    shared: int = 0
    due_ms: float = field(init=False)
    rank: tuple[float, int] = field(init=False)

    @property
    def remaining(self) -> int:
        """Known tokens that are not computed."""
        return len(self.tokens) - self.computed

    @property
    def answer(self) -> SequenceOf[int]:
        """The tokens generated so far."""
        return self.tokens[self.prompt :]

    def __post_init__(self) -> None:
        patient_ms = self.arrived_ms + PATIENCE_MS
        due_ms = patient_ms if self.deadline_ms is None else min(self.deadline_ms, patient_ms)
        self.due_ms = due_ms - self.priority * PRIORITY_STEP_MS
        self.rank = (self.due_ms, self.order)

    def expired(self, now_ms: float) -> bool:
        return self.deadline_ms is not None and now_ms >= self.deadline_ms

    def move(self, event: str) -> None:
        """Take the step `event` in the table of moves."""
        to = MOVES.get((self.state, event))
        if to is None:
            allowed = [e for s, e in MOVES if s == self.state]
            raise RuntimeError(f"sequence {self.id} is {self.state}: {event} is no move; allowed: {allowed or 'none'}")
        self.state = to


def check_tokens(tokens: Iterable[Any], vocabulary: int) -> list[int]:
    """Return a prompt's token ids as a list; InputError when it is empty or an id is not in the vocabulary."""
    ids = list(tokens)
    if not ids:
        raise InputError("prompt: found no tokens, expected at least 1")
    for place, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocabulary:
            raise InputError(f"prompt: found token id {shown(token)} at {place}, expected 0 to {vocabulary - 1}")
    return ids
