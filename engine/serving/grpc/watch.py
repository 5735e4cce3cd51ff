"""Watch one connection: find that it is silent, stalled or slow, and when it is to be pinged. Pure."""

from __future__ import annotations

from weftline.engine.serving.unsent_budget import SLOW_BYTES_S

PING, LATE = "ping", "late"
"""A connection is to be pinged; its last ping has had no answer."""


class ConnectionWatch:
    """Times and byte counts of one connection.

    received_s:    when bytes last came.
    sent_s:        when bytes of a response were last handed to the socket, or none waited.
    flushed_bytes: handed to the transport so far.
    """

    __slots__ = (
        "_opened_s",
        "_ping_allowed_s",
        "_pinged_s",
        "_pongs",
        "_pressed",
        "_taken_bytes",
        "_taken_s",
        "flushed_bytes",
        "received_s",
        "sent_s",
    )

    def __init__(self, now_s: float) -> None:
        self.received_s = self.sent_s = self._taken_s = now_s
        self._opened_s = self._ping_allowed_s = now_s
        self.flushed_bytes = self._taken_bytes = 0
        self._pinged_s: float | None = None
        self._pongs = 0
        self._pressed: tuple[float, int] | None = None  # when other responses began to wait, and the bytes taken then

    def is_silent(self, now_s: float, acknowledged: bool, header_s: float) -> bool:
        """Return True if the client has sent no greeting, or no answer to the server's, in time."""
        return not acknowledged and now_s - self._opened_s > header_s

    def is_stalled(self, now_s: float, buffered_bytes: int, unsent_bytes: int, stall_s: float) -> bool:
        """Return True if the client takes nothing of what waits for it.

        buffered_bytes: in the transport's buffer. unsent_bytes: of responses that were not handed to it.
        """
        taken_bytes = self.flushed_bytes - buffered_bytes
        if not buffered_bytes or taken_bytes > self._taken_bytes:
            self._taken_bytes, self._taken_s = taken_bytes, now_s
        if not unsent_bytes:
            self.sent_s = now_s
        return now_s - min(self._taken_s, self.sent_s) > stall_s

    def is_slow(self, now_s: float, buffered_bytes: int, pressed: bool, slow_s: float) -> bool:
        """Return True if the client takes fewer than SLOW_BYTES_S for `slow_s`.

        pressed: it has unsent responses, and those of other connections wait for the budget.
        """
        if not pressed:
            self._pressed = None
            return False
        taken_bytes = self.flushed_bytes - buffered_bytes
        if self._pressed is None:
            self._pressed = now_s, taken_bytes
        since_s = now_s - self._pressed[0]
        if since_s < slow_s:
            return False
        slow = taken_bytes - self._pressed[1] < since_s * SLOW_BYTES_S
        self._pressed = now_s, taken_bytes
        return slow

    def may_be_pinged(self, now_s: float, interval_s: float) -> bool:
        """Return True once per interval, in which the client may ping once more."""
        if now_s - self._ping_allowed_s < interval_s:
            return False
        self._ping_allowed_s = now_s
        return True

    def ping(self, now_s: float, pongs: int, keepalive_s: float, wait_s: float) -> str:
        """Return PING for an idle connection, LATE if a ping had no answer, else ''. pongs: answers so far."""
        if self._pinged_s is not None:
            if self.received_s > self._pinged_s or pongs > self._pongs:
                self._pinged_s = None
            elif now_s - self._pinged_s > wait_s:
                return LATE
        elif now_s - self.received_s > keepalive_s:
            self._pinged_s, self._pongs = now_s, pongs
            return PING
        return ""
