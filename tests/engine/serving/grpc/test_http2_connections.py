"""Connections that serve no call keep no client out."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from benchmarks.ingress_hostile import PREFACE, SETTINGS
from tests.engine.serving.grpc.requests import METHOD, request, wait_until
from tests.engine.serving.grpc.served import ECHO, Served, served_in_thread
from tests.engine.serving.grpc.test_hostile import connections, is_closed, is_well
from tests.engine.serving.grpc.test_shares import HEALTH, begun, transport
from weftline.engine.serving.config import ServeLimits


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served_in_thread({"echo": ECHO}, limits=ServeLimits(connections_max=32)) as one:
        yield one


def test_idle_connections_keep_no_client_out(server: Served) -> None:
    for said in (b"", PREFACE + SETTINGS, begun(HEALTH + b"Watch", 1)):
        with connections(server, said, 60) as opened:
            assert is_well(server)
            wait_until(lambda opened=opened: sum(map(is_closed, opened)) >= 60 - 32 - 8)  # type: ignore[misc]
            with grpc.insecure_channel(server.address) as channel:
                infer = channel.unary_unary(METHOD + "ModelInfer")
                for _ in range(3):
                    assert infer(request().SerializeToString(), timeout=10)
        wait_until(lambda: not len(transport(server).table))
