"""Tiny models are shared by the tests of a file, and by no two files: what one test changes must not reach far."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def own_runners() -> Iterator[None]:
    """Give each file runners of its own, where a file uses any."""
    yield
    tiny = sys.modules.get("tests.engine.llm.tiny")
    if tiny is not None:
        tiny.runner.cache_clear()
