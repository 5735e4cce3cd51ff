"""Outcome of one measured request: times, status and durations of its steps.

Reports, critical paths and traces are computed from outcomes only.
"""

from __future__ import annotations

from dataclasses import dataclass

from weftline.engine.scheduler.request import StepTiming


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """One request of a load; times in milliseconds, on the clock of the timings.

    sent_ms:  scheduled send time. Latency counts from here, so that a late load generator shows (coordinated omission).
    ended_ms: time of its answer or error.
    error:    class name of its error; '' when it was answered.
    message:  text of the error.
    timings:  of the steps that ran.
    late_ms:  delay of the actual send.
    traceback: of the exception that a step's code raised; '' for none.
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
