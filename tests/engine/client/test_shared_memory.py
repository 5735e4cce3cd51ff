"""Large inputs in shared memory, against a real server: placement, registration, loss and fallback."""

import asyncio
import logging
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.engine.client.flaky import flaky
from tests.engine.client.pipelines import PIPELINES
from tests.engine.serving.grpc.served import Served, served_in_thread
from weftline import errors
from weftline.engine.client.async_client import AsyncClient
from weftline.engine.client.client import Client
from weftline.engine.client.shared_memory import FOLDER, SharedRegion
from weftline.engine.request import RequestOptions
from weftline.errors import LimitReached

LARGE = np.random.default_rng(1).integers(0, 255, 1 << 20, np.uint8)


@pytest.fixture
def sharing(server: Served) -> Iterator[Client]:
    with Client(server.address, shared_memory=4 << 20) as one:
        yield one


def left() -> set[str]:
    return {one.name for one in Path(FOLDER).glob("weftline-client*")}


def test_a_large_input_lies_in_shared_memory(server: Served, sharing: Client) -> None:
    before = left()
    assert np.array_equal(sharing.run("bytes", x=LARGE)["y"], LARGE)
    (region,) = server.memory.status()
    assert region.name.startswith("weftline-client") and region.size_bytes == 4 << 20
    assert left() == before  # its name is gone though it is in use
    assert server.records[-1].ask.size_bytes < 1000  # the message had no more than where it lies
    assert np.array_equal(sharing.run("bytes", x=LARGE[::-1])["y"], LARGE[::-1])
    assert server.memory.status() == (region,)
    sharing.close()
    assert server.memory.status() == ()


def test_a_small_input_travels_in_the_message(server: Served, sharing: Client) -> None:
    sharing.run("bytes", x=LARGE[:1000])
    assert server.memory.status() == ()


def test_what_does_not_fit_travels_in_the_message(sharing: Client) -> None:
    sent = np.zeros(5 << 20, np.uint8)
    assert len(sharing.run("bytes", x=sent)["y"]) == 5 << 20


def test_its_place_is_free_after_every_request_even_a_failed_one(sharing: Client) -> None:
    sharing.run("bytes", x=LARGE)
    region = sharing._calls.shared_inputs._region
    assert region is not None and region.taken_bytes == 0
    with pytest.raises(errors.DeadlineExceeded):
        sharing.run("bytes", RequestOptions(deadline_ms=0.01), x=LARGE)
    assert region.taken_bytes == 0


def test_a_server_that_lost_the_region_gets_a_new_one(server: Served, sharing: Client) -> None:
    sharing.run("bytes", x=LARGE)
    (before,) = server.memory.status()
    server.memory.unregister_all()
    assert np.array_equal(sharing.run("bytes", x=LARGE)["y"], LARGE)
    (after,) = server.memory.status()
    assert after.name != before.name


def test_a_wrong_request_is_still_wrong(server: Served, sharing: Client) -> None:
    with pytest.raises(errors.InputError, match="sequence"):
        sharing.run("remember", x="a" * 100_000)
    assert len(server.memory.status()) == 1


def test_the_async_twin_shares_memory_too(server: Served) -> None:
    async def main() -> None:
        async with AsyncClient(server.address, shared_memory=True) as client:
            await client.run("bytes", x=LARGE)
            answers = await asyncio.gather(*(client.run("bytes", x=LARGE + i) for i in range(4)))
            for place, one in enumerate(answers):
                assert np.array_equal(one["y"], LARGE + place)
            assert server.memory.status()

    asyncio.run(main())
    assert server.memory.status() == ()


def test_requests_that_come_at_once_register_one_region(server: Served) -> None:
    async def main() -> None:
        async with AsyncClient(server.address, shared_memory=True) as client:
            await asyncio.gather(*(client.run("bytes", x=LARGE) for _ in range(4)))
            assert len(server.memory.status()) == 1

    asyncio.run(main())


def test_without_shared_memory_on_the_server_inputs_travel_in_messages(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "weftline.client")
    only, before = {"bytes": PIPELINES["bytes"]}, left()
    with served_in_thread(only) as server, Client(server.address, shared_memory=True) as client:
        for _ in range(2):
            assert np.array_equal(client.run("bytes", x=LARGE)["y"], LARGE)
    (line,) = [one.getMessage() for one in caplog.records if one.name == "weftline.client"]
    assert line.startswith(
        "shared memory is not used, inputs are sent in messages: shared memory is off on this server"
    )
    assert left() == before


def test_a_server_without_the_extension_is_no_trouble() -> None:
    with flaky() as server, Client(server.url, shared_memory=True) as client:
        assert client.run("m", x="a" * 100_000)["x"] == "a" * 100_000


def test_a_region_is_a_new_file_of_this_user_alone() -> None:
    region = SharedRegion.create(100)
    held = Path(f"{FOLDER}{region.key}").stat()
    assert stat.S_IMODE(held.st_mode) == 0o600 and held.st_size == region.size_bytes == 4096
    region.close()
    assert not Path(f"{FOLDER}{region.key}").exists()
    region.close()


def test_ranges_are_lent_and_given_back() -> None:
    region = SharedRegion.create(8192)
    first = region.try_place(b"a" * 4096)
    second = region.try_place(b"b" * 4096)
    assert {first, second} == {0, 4096} and region.try_place(b"c") is None
    held = Path(f"{FOLDER}{region.key}").read_bytes()
    assert held in (b"a" * 4096 + b"b" * 4096, b"b" * 4096 + b"a" * 4096)
    assert first is not None
    region.give_back(first)
    assert region.try_place(b"c") == first
    with pytest.raises(KeyError):
        region.give_back(4095)
    region.close()


def test_nothing_is_left_of_a_region_that_was_not_closed() -> None:
    region = SharedRegion.create(1)
    path = Path(f"{FOLDER}{region.key}")
    assert path.exists()
    del region
    assert not path.exists()


def test_a_region_larger_than_the_machine_is_refused_and_leaves_nothing() -> None:
    before = set(Path(FOLDER).glob("weftline-client*"))
    with pytest.raises(LimitReached, match="cannot reserve"):
        SharedRegion.create(1 << 50)
    assert set(Path(FOLDER).glob("weftline-client*")) == before
