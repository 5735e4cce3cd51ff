"""Sessions of tests that break things: each is found with nothing left in it, and leaves nothing behind."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine.fire import Gate, builder, descriptors, memory_maps, settled, wait_until
from weftline.engine.session import Session, Source, load


@pytest.fixture(scope="session")
def warm() -> None:
    """Open a session once: imports keep descriptors."""
    p = builder("warm")
    p.output("y", p.step("s", "echo", value=p.input("x", "text")).value)
    with load(p).open() as session:
        session.run(x="a")


@pytest.fixture
def start(warm: None) -> Iterator[Callable[[Source], Session]]:
    """Open pipelines. Afterwards every request has ended once, no lease is left, and closing gives everything back."""
    before = descriptors(), memory_maps()
    sessions: list[Session] = []

    def start(pipeline: Source) -> Session:
        sessions.append(load(pipeline).open())
        return sessions[-1]

    yield start
    left = []
    for session in sessions:
        try:
            if not session.closed:
                wait_until(lambda session=session: settled(session), 10)  # type: ignore[misc]
        except AssertionError:
            left.append(session.stats())
        finally:
            session.close()
    assert left == [], "something was left behind"
    # fewer is what a server of an earlier module leaves that was still ending at first
    assert descriptors() <= before[0] and memory_maps() <= before[1]


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """A gate that is open; it is opened again at the end."""
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.open()
