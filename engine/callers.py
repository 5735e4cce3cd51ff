"""Who waits for which request, and is told what becomes of it; all of it under the runtime's lock."""

from __future__ import annotations

import logging
from collections.abc import Callable

from weftline.engine.scheduling import events as ev

_log = logging.getLogger("weftline.runtime")

Listener = Callable[[ev.ForCaller], ev.Event | None]
"""What a request's commands (Finish, Fail, Refuse, OutputReady, PieceReady) are handed to; called under the lock.

It may answer with an event, which the scheduler is told next."""


class Callers:
    """Callers of one runtime.

    waiting: their listeners, by request.
    take:    tells the scheduler something.
    """

    def __init__(self, take: Callable[[ev.Event], None]) -> None:
        self.waiting: dict[int, Listener] = {}
        self._take = take

    def tell(self, command: ev.ForCaller) -> None:
        """Tell a caller something on the way."""
        self._pass_on(command, self.waiting.get(command.request))

    def end(self, command: ev.ForCaller) -> None:
        """Tell a caller how its request has ended."""
        self._pass_on(command, self.waiting.pop(command.request, None))

    def end_all(self, end: ev.Fail) -> None:
        """Tell everybody that it is over."""
        listeners, self.waiting = self.waiting, {}
        for listener in listeners.values():
            try:
                listener(end)
            except Exception:
                _log.debug("a caller could not be told that the session is closed", exc_info=True)

    def _pass_on(self, command: ev.ForCaller, listener: Listener | None) -> None:
        """Tell a caller. One who cannot be told (its event loop is closed, say) loses its request, and nobody else."""
        if listener is None:
            return
        try:
            answer = listener(command)
        except Exception:
            _log.debug("request %d: its caller is gone", command.request, exc_info=True)
            self.waiting.pop(command.request, None)
            self._take(ev.Withdrawn(command.request))
            self._take(ev.Delivered(command.request))
        else:
            if answer is not None:
                self._take(answer)
