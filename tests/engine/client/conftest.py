"""One real server for all tests of the client."""

from collections.abc import Iterator

import pytest

from tests.engine.client.pipelines import PIPELINES
from tests.engine.serving.grpc.served import Served, served_in_thread
from weftline.engine.client.client import Client


@pytest.fixture(scope="package")
def server() -> Iterator[Served]:
    with served_in_thread(PIPELINES, shared_memory=True) as one:
        yield one


@pytest.fixture
def client(server: Served) -> Iterator[Client]:
    with Client(server.address) as one:
        yield one
