"""The options of one request: everything a caller can set beside the inputs.

    session.run(RequestOptions(deadline_ms=200, outputs=["text"]), photo=Path("photo.png"))

Options and inputs have separate name spaces: a pipeline's inputs can have any name. Sessions and clients take the same
options. Values are checked when the options are made, as far as possible without the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, cast

from msgspec import Meta

from weftline.errors import InputError
from weftline.fields import worded
from weftline.nodes.field_checks import check_fields, check_value, field_names
from weftline.nodes.urgency import PRIORITY_MAX, SEEDS, SequencePart

SEQUENCE_CHARS_MAX = 128
"""Longest id of a sequence of requests."""

DEADLINE_MS_MAX = 86_400_000
"""Longest deadline, a day: as in a pipeline file. Every wait then fits into the system's time types."""

SequenceId = Annotated[str, Meta(min_length=1, max_length=SEQUENCE_CHARS_MAX)]
Names = Annotated[Sequence[str], worded("a list of names")]
_A_SEQUENCE = worded(f"an id of 1 to {SEQUENCE_CHARS_MAX} characters, or a weftline.SequencePart")
Priority = Annotated[int, Meta(ge=-PRIORITY_MAX, le=PRIORITY_MAX)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options of one request, for sessions and clients. All are keywords, and none is required.

    InputError lists the invalid ones.
    """

    outputs: Names | None = None
    """Names of the wanted outputs; steps that only other outputs need do not run. None: all."""
    deadline_ms: Annotated[float, Meta(ge=0, le=DEADLINE_MS_MAX)] | None = None
    """Time limit from the call on; None: the pipeline's own deadline."""
    priority: Priority = 0
    """Requests of higher priority go first in every queue."""
    sequence: Annotated[SequencePart | SequenceId, _A_SEQUENCE] | None = None
    """The request's position in a sequence of requests; an id alone means a request in the middle."""
    job: bool = False
    """True for a row of a job: it waits behind other requests in every queue, at priority -100 unless another is set,
    and the pipeline's own deadline does not apply."""
    seed: Annotated[int, Meta(ge=0, le=SEEDS - 1)] | None = None
    """Seed of random choices; None: a new one for each request."""

    def __post_init__(self) -> None:
        if not check_fields(self):
            return
        if isinstance(self.sequence, SequencePart):
            check_value("sequence.id", SequenceId, self.sequence.id)
        elif self.sequence is not None:
            object.__setattr__(self, "sequence", SequencePart(self.sequence))
        if self.job and not self.priority:
            object.__setattr__(self, "priority", -PRIORITY_MAX)

    @property
    def output_names(self) -> tuple[str, ...] | None:
        """Names of the wanted outputs; a list has become a tuple."""
        return cast(tuple[str, ...] | None, self.outputs)

    @property
    def sequence_part(self) -> SequencePart | None:
        """The position in a sequence; an id has become the part in the middle."""
        return cast(SequencePart | None, self.sequence)


def checked_options(options: object) -> RequestOptions:
    """Return `options`, or the default options for None; InputError for any other type."""
    if options is None:
        return DEFAULT_OPTIONS
    if not isinstance(options, RequestOptions):
        found = f"options: found {type(options).__name__}, expected weftline.RequestOptions"
        raise InputError(f"{found}\n    fix: pass inputs by name, as in run(photo=...); run(**inputs) passes a dict")
    return options


def options_hint(unknown: Iterable[str]) -> str:
    """Return a remedy for unknown inputs that are names of options; '' if none is."""
    wrong = set(unknown)
    names = ", ".join(f"{name}=..." for name in field_names(RequestOptions) if name in wrong)
    return f"\n    fix: pass options in one value: RequestOptions({names})" if names else ""


DEFAULT_OPTIONS = RequestOptions()
