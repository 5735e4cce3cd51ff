"""The stock `openai` client of a module's `endpoint`."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.engine.serving.http.hosted import Hosted


@pytest.fixture(scope="module")
def client(endpoint: Hosted) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="none", max_retries=0) as client:
        yield client
