"""Room for an answer: reserve its bytes in the budget of unsent bytes before it is copied out of the engine's memory.

reservation = await room.reserve(answer.size_bytes)      # waits while clients have not read earlier answers
await answer.load()
... encode and send ...
room.settle(reservation)                                 # released once the socket has taken what was sent
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Protocol

from weftline.engine.serving.unsent_budget import WAIT_S, Reservation, UnsentBudget
from weftline.errors import DeadlineExceeded, LimitReached


class Room(Protocol):
    """Room for the answers of one call."""

    def is_free(self, size_bytes: int) -> bool:
        """Return True if an answer needs no reservation: a small one on a connection that is read."""

    async def reserve(self, size_bytes: int) -> Reservation:
        """Wait for room and return it; LimitReached after WAIT_S, DeadlineExceeded after the deadline of the call."""

    def settle(self, reservation: Reservation) -> None:
        """Release a reservation once the socket has taken what was sent."""


async def reserve(
    budget: UnsentBudget, connection: Hashable, caller: Hashable, size_bytes: int, deadline_s: float | None = None
) -> Reservation:
    """Wait for room in a budget; errors as `Room.reserve`. deadline_s: time left for the call."""
    granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def grant() -> None:
        if not granted.done():
            granted.set_result(None)

    reservation = budget.reserve(connection, caller, size_bytes, grant)
    if reservation.granted:
        return reservation
    try:
        async with asyncio.timeout(WAIT_S if deadline_s is None else max(0.0, min(WAIT_S, deadline_s))):
            await granted  # `wait_for` would ignore a cancellation that comes together with the grant
    except TimeoutError:
        reservation.release()
        if deadline_s is not None and deadline_s < WAIT_S:
            raise DeadlineExceeded("the call's deadline passed while earlier answers were not read") from None
        raise LimitReached(f"earlier answers were not read for {WAIT_S:g} s", 1.0) from None
    except BaseException:
        reservation.release()
        raise
    return reservation


class BudgetRoom:
    """Room in a budget whose reservations end when they are settled. connection, caller: keys in the budget."""

    def __init__(self, budget: UnsentBudget, connection: Hashable, caller: Hashable) -> None:
        self._budget, self._connection, self._caller = budget, connection, caller

    def is_free(self, size_bytes: int) -> bool:
        return False

    async def reserve(self, size_bytes: int) -> Reservation:
        return await reserve(self._budget, self._connection, self._caller, size_bytes)

    def settle(self, reservation: Reservation) -> None:
        reservation.release()
