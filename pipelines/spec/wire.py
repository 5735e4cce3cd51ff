"""Wire reference: the source of a value, such as `hear.text`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wire:
    """Source of a value: output `port` of `step`, or pipeline input `port` when `step` is None.

    Written `hear.text`, or `question` for a pipeline input.
    """

    step: str | None
    port: str

    def __str__(self) -> str:
        return self.port if self.step is None else f"{self.step}.{self.port}"
