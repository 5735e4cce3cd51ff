"""Sleep states of the steps of one worker: awake, falling asleep, asleep, waking.

Steps of a worker sleep independently. While one of them falls asleep or wakes, the worker gets no other work, because
both are blocking and may be slow. A step without an entry is awake, so every step of a new process is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

AWAKE, FALLING, ASLEEP, WAKING = "awake", "falling asleep", "asleep", "waking"

TRANSITIONS: Mapping[tuple[str, str], str] = {
    (AWAKE, "sleep"): FALLING,
    (FALLING, "slept"): ASLEEP,
    (ASLEEP, "wake"): WAKING,
    (WAKING, "awake"): AWAKE,
}
"""Sleep states of a step in one worker: (state, event) -> state. Sleep and wake are commands, the others replies."""


class SleepState:
    """Sleep states of the steps of one worker."""

    __slots__ = ("_loading", "_states", "any", "moving")

    def __init__(self) -> None:
        self._states: dict[int, str] = {}
        self._loading: set[int] = set()
        self.any = False  # at least one step is not awake
        self.moving = False  # at least one step is falling asleep or waking

    @property
    def loading(self) -> bool:
        """Return True while the worker reports that it loads a waking step."""
        return bool(self._loading)

    def state(self, step: int) -> str:
        return self._states.get(step, AWAKE)

    def move(self, step: int, event: str) -> None:
        """Move a step to its next state; ValueError for a move that the table does not have."""
        state = self.state(step)
        to = TRANSITIONS.get((state, event))
        if to is None:
            raise ValueError(f"a step that is {state} has no event {event}")
        if to == AWAKE:
            del self._states[step]
        else:
            self._states[step] = to
        self.any = bool(self._states)
        self.moving = any(one in (FALLING, WAKING) for one in self._states.values())
        self._loading.discard(step)

    def begin(self, step: int) -> None:
        """Mark a waking step as loading; ignored for a step that is not waking."""
        if self.state(step) == WAKING:
            self._loading.add(step)

    def asleep(self, steps: Collection[int]) -> bool:
        """Return True if all of these steps sleep; False for none."""
        return bool(steps) and all(self._states.get(step) == ASLEEP for step in steps)

    def clear(self) -> None:
        """Reset every step to awake, for a new process."""
        self._states.clear()
        self._loading.clear()
        self.any = self.moving = False
