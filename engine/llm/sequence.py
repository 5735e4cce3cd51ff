"""Sequence: known and computed tokens of one request, and its states.

The progress of a `Sequence` is two numbers: how many tokens are *known* (prompt and answer so far), and for how many of
them keys and values are *computed*; a round computes part of the difference. A request for several answers starts as
one sequence; when its prompt is computed the others *fork* from it and share its pages.

    event     join                preempt              finish, cancel, fail
              waiting -> running  running -> waiting   -> finished, cancelled, failed
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

from weftline.engine.llm.kv_cache import PageTable
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.retention import Retention
from weftline.engine.llm.vision.positions import RotaryPositions
from weftline.engine.llm.vision.prompt import PromptImage
from weftline.errors import InputError
from weftline.nodes.field_checks import shown
from weftline.nodes.urgency import PATIENCE_MS, PRIORITY_STEP_MS

UNKNOWN = -1
"""Placeholder of a token that a round in flight will sample."""

MOVES: dict[tuple[str, str], str] = {
    ("waiting", "join"): "running",
    ("running", "preempt"): "waiting",
    ("running", "finish"): "finished",
    ("waiting", "finish"): "finished",  # preempted while its last token was in flight
    ("waiting", "cancel"): "cancelled",
    ("running", "cancel"): "cancelled",
    ("waiting", "fail"): "failed",
    ("running", "fail"): "failed",
}
"""State table: (state, event) to state. finished, cancelled and failed are final and hold no pages."""

LIVE = frozenset(state for state, _ in MOVES)


def urgency_ms(arrived_ms: float, deadline_ms: float | None, priority: int) -> float:
    """Return the urgency of a request, lower first; see `Sequence.due_ms`."""
    patient_ms = arrived_ms + PATIENCE_MS
    due_ms = patient_ms if deadline_ms is None else min(deadline_ms, patient_ms)
    return due_ms - priority * PRIORITY_STEP_MS


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer of a request inside the engine; owned by the schedule.

    tokens:    known token ids, the prompt first.
    prompt:    number of prompt tokens.
    limit:     most known tokens it may reach: prompt and answer, within the context and the pool.
    order:     arrival number; breaks ties of urgency, lower first.
    priority:  higher first.
    salt:      prefix-cache key of its adapter, for all tokens.
    own_salt:  prefix-cache key of its caller, for all but the first `shared` tokens.
    shared:    leading tokens of the operator; whole pages of them are shared by all callers.
    arrived_ms, deadline_ms: on the clock passed to `Engine.step`; None: no deadline.
    paused:    its reader is slow; it is not scheduled.
    due_ms:    urgency, lower first. It is constant, and any request that arrives late enough has a higher one whatever
               its priority, so no request starves.
    rank:      scheduling order, lower first.
    computed:  number of tokens with keys and values in pages.
    cached:    number of those found in the prefix cache when it first joined.
    hashes:    chained hash of each full page of known tokens, as far as they were needed.
    draft:     draft tokens after the known ones, for the next round to verify; often empty.
    drafted:   number of its draft tokens so far; accepted: how many were accepted.
    index:     number of the answer within its request.
    seed:      seed of its random draws, together with each token's position.
    banned:    token sequences that its answer must not contain.
    adapter_slot: slot of its LoRA adapter in the runner; 0: none.
    skips_prefix_cache: every prompt token must pass the model.
    forks:     further answers to the same prompt, which fork when it is computed.
    retention: how long parts of the prompt stay in the prefix cache.
    images:    pictures of the prompt, in order.
    rotary:    positions of its tokens in three dimensions, for a model that has them; None: a token's index.
    caller:    name of its caller, which has an equal share of the engine; '' without tokens.
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
    drafted: int = 0
    accepted: int = 0
    index: int = 0
    seed: int = 0
    banned: tuple[tuple[int, ...], ...] = ()
    adapter_slot: int = 0
    skips_prefix_cache: bool = False
    forks: tuple[Sequence, ...] = ()
    retention: tuple[Retention, ...] = ()
    own_salt: bytes = b""
    shared: int = 0
    images: tuple[PromptImage, ...] = ()
    rotary: RotaryPositions | None = None
    caller: str = ""
    due_ms: float = field(init=False)
    rank: tuple[float, int] = field(init=False)

    @property
    def remaining(self) -> int:
        """Return the number of known tokens that are not computed."""
        return len(self.tokens) - self.computed

    @property
    def answer(self) -> SequenceOf[int]:
        """Return the tokens generated so far."""
        return self.tokens[self.prompt :]

    def __post_init__(self) -> None:
        self.due_ms = urgency_ms(self.arrived_ms, self.deadline_ms, self.priority)
        self.rank = (self.due_ms, self.order)

    def expired(self, now_ms: float) -> bool:
        return self.deadline_ms is not None and now_ms >= self.deadline_ms

    def move(self, event: str) -> None:
        """Change the state by `event`; RuntimeError for an illegal move."""
        to = MOVES.get((self.state, event))
        if to is None:
            allowed = [e for s, e in MOVES if s == self.state]
            raise RuntimeError(f"sequence {self.id} is {self.state}: {event} is no move; allowed: {allowed or 'none'}")
        self.state = to


def check_tokens(tokens: Iterable[Any], vocabulary: int) -> list[int]:
    """Return a prompt's token ids as a list; InputError when it is empty or an id is not in the vocabulary."""
    ids = list(tokens)
    if not ids:
        raise InputError("prompt: found no tokens, expected at least 1", param="prompt")
    for place, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocabulary:
            found = f"found token id {shown(token)} at {place}, expected 0 to {vocabulary - 1}"
            raise InputError(f"prompt: {found}", param="prompt")
    return ids
