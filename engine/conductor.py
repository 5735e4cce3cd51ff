"""Between the scheduler and whoever it commands: what is heard is told to it, what it says is carried out.

Callers, workers and the clock have something to say; the scheduler answers with commands, for workers' processes and
for callers. All of it happens under the runtime's lock, in whichever thread holds it. Here is the order in which things
are told: what was heard in one turn together, what finalizers left with it, and time passes only after that.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from weftline.engine.alarm import Alarm
from weftline.engine.callers import Callers
from weftline.engine.clock import Clock
from weftline.engine.fleet import Fleet
from weftline.engine.scheduling import events as ev
from weftline.engine.scheduling.scheduler import Scheduler

_log = logging.getLogger("weftline.runtime")

DRAINS_MAX = 64
"""How often descriptors are looked at before time is told to pass; a read takes 64 KiB, a socket holds some MB."""


class Conductor:
    """Tells one scheduler, and carries out what it says.

    callers: who waits for what.
    alarm:   when the thread that keeps the time comes next.
    """

    def __init__(self, scheduler: Scheduler, fleet: Fleet, clock: Clock) -> None:
        self.callers = Callers(self.take)
        self.alarm = Alarm()
        self._scheduler = scheduler
        self._fleet = fleet
        self._clock = clock
        self._later: deque[ev.Event] = deque()
        self._news: list[ev.Event] = []  # heard in this turn, and told to the scheduler together
        self._carry: dict[type, Callable[[Any], None]] = {
            ev.Send: lambda command: fleet.send(command.worker, command.message),
            ev.OutputReady: self.callers.tell,
            ev.PieceReady: self.callers.tell,
            ev.Finish: self.callers.end,
            ev.Fail: self.callers.end,
            ev.Refuse: self.callers.end,
            ev.StartWorker: lambda command: fleet.start(command.worker, command.arena),
            ev.ShareArena: lambda command: fleet.share(command.worker, command.arena),
            ev.KillWorker: lambda command: fleet.kill(command.worker),
            ev.ForgetArena: lambda command: fleet.forget(command.arena),
            ev.Note: lambda command: _log.warning("%s", command.message),
        }

    def start(self) -> None:
        """Have every worker started."""
        self._carry_out(self._scheduler.start(self._clock.now_ms()))
        self.tell_news()

    def take(self, event: ev.Event) -> None:
        """Tell the scheduler something now."""
        carry = self._carry
        for command in self._scheduler.on(event, self._clock.now_ms()):
            carry[type(command)](command)

    def hear(self, event: ev.Event) -> None:
        """Keep something until this turn's news are told."""
        self._news.append(event)

    def later(self, events: Sequence[ev.Event]) -> None:
        """Keep something until the next turn. The one thing here that needs no lock, and takes none."""
        self._later.extend(events)

    def tell_news(self) -> None:
        """Tell the scheduler what was heard, and what is heard of what that leads to."""
        while self._news:
            news, self._news = self._news, []
            self._carry_out(self._scheduler.on_all(news, self._clock.now_ms()))

    def take_in(self, ready: Sequence[tuple[int, int]], *, wakes: bool = True) -> None:
        """Tell the scheduler what descriptors have to say, all of it together."""
        self._fleet.look(ready, wakes=wakes)
        while self._later:
            self._news.append(self._later.popleft())
        self.tell_news()

    def let_time_pass(self) -> None:
        """Tell the scheduler that something is due, if it is, and set the alarm to when the next thing will be.

        When this thread was kept from running for a while, what was said meanwhile comes first; see Alarm.
        """
        self.alarm.set(self._next_ms())

    def nap_s(self) -> float:
        """How long the thread that keeps the time may sleep; -1 for ever."""
        return self.alarm.nap_s(self._clock.now_ms())

    def wake_if_sooner(self) -> None:
        """Wake that thread when something is due before the moment it sleeps until."""
        if self.alarm.asleep and self.alarm.sooner(self._scheduler.wake_at_ms()):
            self._fleet.wake()

    def _next_ms(self) -> float | None:
        wake_at = self._scheduler.wake_at_ms()
        now_ms = self._clock.now_ms()
        if wake_at is None or wake_at > now_ms:
            return wake_at
        if self.alarm.missed(now_ms):
            self._take_in_all()
            if (quiet_until := self.alarm.quiet_until(now_ms)) is not None:
                return quiet_until
        self.alarm.passed()
        self._carry_out(self._scheduler.on(ev.Tick(), self._clock.now_ms()))
        self.tell_news()
        return self._scheduler.wake_at_ms()

    def _take_in_all(self) -> None:
        for _ in range(DRAINS_MAX):
            ready = self._fleet.wait_ready(0)
            if not ready:
                return
            self.take_in(ready)

    def _carry_out(self, commands: Sequence[ev.Command]) -> None:
        carry = self._carry
        for command in commands:
            carry[type(command)](command)
