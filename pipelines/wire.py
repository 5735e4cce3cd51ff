"""Where a value comes from: the one word that steps, conditions and outputs share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wire:
    """Where a value comes from: output `port` of `step`, or pipeline input `port` when `step` is None.

    Written `hear.text`, or `question` for a pipeline input.
    """

    step: str | None
    port: str

    def __str__(self) -> str:
        return self.port if self.step is None else f"{self.step}.{self.port}"
