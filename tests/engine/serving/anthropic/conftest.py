"""The stock `anthropic` client of a module's `endpoint`."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest

from tests.engine.serving.http.hosted import Hosted


@pytest.fixture(scope="module")
def client(endpoint: Hosted) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=endpoint.url, api_key="none", max_retries=0) as client:
        yield client
