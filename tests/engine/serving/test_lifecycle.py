"""Start, drain and stop of a server, and concurrent requests with sibling cancellation."""

from __future__ import annotations

import asyncio

import pytest

from weftline.engine.serving.lifecycle import RETRY_S, NetworkServer, draining_error, gather_or_cancel
from weftline.errors import InputError


class Recorded(NetworkServer):
    """A server of no transport that records its calls."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.fails = fails

    async def _listen(self) -> int:
        self.calls.append("listen")
        if self.fails:
            raise OSError("the address is in use")
        return 7

    async def _close(self, grace_s: float) -> None:
        self.calls.append(f"close {grace_s:g}")


def test_a_server_refuses_new_work_before_it_closes() -> None:
    async def run() -> None:
        server, notified = Recorded(), list[bool]()
        server.serving.listen(lambda: notified.append(server.serving.on))
        assert await server.start() == 7
        assert server.serving.on
        await server.stop(2.5)
        assert (server.calls, notified, server.serving.on) == (["listen", "close 2.5"], [False], False)
        await server.stop()

    asyncio.run(run())


def test_a_failed_start_closes_and_a_server_never_started_does_not() -> None:
    async def run() -> None:
        server = Recorded()
        await server.stop(1.0)
        assert server.calls == []
        failed = Recorded(fails=True)
        with pytest.raises(OSError, match="in use"):
            await failed.start()
        await failed.stop()
        assert failed.calls == ["listen", "close 0"]

    asyncio.run(run())


def test_the_refusal_of_a_draining_server_has_a_retry_time() -> None:
    assert (draining_error().status, draining_error().retry_after_s) == ("UNAVAILABLE", RETRY_S)


def test_results_come_in_order() -> None:
    async def run() -> None:
        async def value(number: int) -> int:
            await asyncio.sleep(0.01 * (3 - number))
            return number

        assert await gather_or_cancel([value(number) for number in range(3)]) == [0, 1, 2]

    asyncio.run(run())


def test_the_first_error_cancels_siblings_and_discards_finished_results() -> None:
    async def run() -> None:
        discarded, cancelled = list[str](), list[str]()

        async def done() -> str:
            return "done"

        async def slow() -> str:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append("slow")
                raise
            return "slow"

        async def broken() -> str:
            await asyncio.sleep(0.01)
            raise InputError("no")

        with pytest.raises(InputError, match="no"):
            await gather_or_cancel([done(), slow(), broken()], discarded.append)
        assert (discarded, cancelled) == (["done"], ["slow"])

    asyncio.run(run())
