"""Outcome of one measured request: times, status and durations of its steps.

Outcomes are what a load gives and all that figures, critical paths and traces are made from.
"""

from __future__ import annotations

from dataclasses import dataclass

from weftline.engine.scheduler.request import StepTiming


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """One request of a load; times are on the clock that the timings are on, in milliseconds.

    sent_ms:  when it was meant to be sent. Latency counts from here, so that a late load does not flatter anybody.
    ended_ms: when its answer, or its error, was there.
    error:    class name of its error; '' when it was answered.
    message:  what the error said.
    timings:  of its steps, as far as it came.
    late_ms:  how much later than meant it was sent.
    traceback: of the exception that a step's code raised; '' where there is none.
    """

    sent_ms: float
    ended_ms: float
    ok: bool = True
    error: str = ""
    timings: tuple[StepTiming, ...] = ()
    late_ms: float = 0.0
    message: str = ""
    traceback: str = ""

    @property
    def latency_ms(self) -> float:
        return self.ended_ms - self.sent_ms

    def good(self, deadline_ms: float | None) -> bool:
        """Return True for an answer within the deadline; None: any answer."""
        return self.ok and (deadline_ms is None or self.latency_ms <= deadline_ms)
