"""How a step rests in one worker: awake, falling asleep, asleep, waking.

A worker holds several steps, and each rests by itself; while one of them is on its way to sleep or back, the worker is
given nothing else to do, because it does one thing after the other and this one may take long. What is not on record
is awake: so is everything in a worker that has just started. Pure.
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
"""A step's rest in one worker: (state, event) -> state. It is told to sleep and wake, and answers slept and awake."""


class Rest:
    """The steps of one worker that are not awake."""

    __slots__ = ("_loading", "_states", "any", "moving")

    def __init__(self) -> None:
        self._states: dict[int, str] = {}
        self._loading: set[int] = set()
        self.any = False  # one or another of them is not awake
        self.moving = False  # one of them is falling asleep or waking

    @property
    def loading(self) -> bool:
        """Whether the worker has said that it is waking one or another step, and has not said yet that it is awake."""
        return bool(self._loading)

    def state(self, step: int) -> str:
        return self._states.get(step, AWAKE)

    def move(self, step: int, event: str) -> None:
        """Take a step to its next state; ValueError for a move the table does not have."""
        state = self.state(step)
        to = TRANSITIONS.get((state, event))
        if to is None:
            raise ValueError(f"a step that is {state} cannot be told, or say, {event}")
        if to == AWAKE:
            del self._states[step]
        else:
            self._states[step] = to
        self.any = bool(self._states)
        self.moving = any(one in (FALLING, WAKING) for one in self._states.values())
        self._loading.discard(step)

    def begin(self, step: int) -> None:
        """The worker says that it has come to waking a step; of one that is not to wake that means nothing."""
        if self.state(step) == WAKING:
            self._loading.add(step)

    def asleep(self, steps: Collection[int]) -> bool:
        """Whether all of these sleep; False of none."""
        return bool(steps) and all(self._states.get(step) == ASLEEP for step in steps)

    def clear(self) -> None:
        """The worker is gone: the next one opens its steps awake."""
        self._states.clear()
        self._loading.clear()
        self.any = self.moving = False
