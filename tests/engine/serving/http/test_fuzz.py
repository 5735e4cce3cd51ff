"""schemathesis over every path: whatever comes, no answer is a failure of ours, and none tells of the inside."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from tests.engine.serving.http.backends import Functions, chatting, info
from tests.engine.serving.http.hosted import Hosted, hosted
from weftline.engine.serving.backend import Ask
from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.http.openapi import document

FORBIDDEN = re.compile(r"0x[0-9a-fA-F]{6,}|Traceback|File \"|/(?:work|root|home|usr|tmp|dev|proc)/|site-packages|wl_")
MODELS = ["chat", "embed", "rank", "tensor", "ears", "voice", "unknown"]


def document_of_these_models() -> dict[str, Any]:
    """The document, with the names that exist: else every request would end at an unknown model."""
    found = document()
    for item in found["paths"].values():
        for operation in item.values():
            for parameter in operation["parameters"]:
                odd = ["r", "..", "a b"]
                known = {"model": MODELS, "version": ["1", "2", "x"], "region": odd, "response": odd}
                parameter["schema"] = {"enum": known[parameter["name"]]}
            for content in operation.get("requestBody", {"content": {}})["content"].values():
                if "model" in content["schema"]["properties"]:
                    properties = content["schema"]["properties"] | {"model": {"enum": MODELS}}
                    content["schema"] = content["schema"] | {"properties": properties}
    return found


schema = schemathesis.openapi.from_dict(document_of_these_models())


def echo(ask: Ask) -> dict[str, Any]:
    return {"y": ask.inputs.get("x"), "t": ask.inputs.get("s")}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Hosted]:
    backend = Functions(
        {
            "chat": chatting(lambda ask: {"text": "hello", "usage": {"prompt_tokens": 1}, "answers": None}),
            "embed": (
                info("embed", {"text": "text"}, {"embedding": "float32[2]"}),
                lambda ask: {"embedding": np.zeros(2, np.float32)},
            ),
            "rank": (
                info("rank", {"query": "text", "passages": "list[text]"}, {"scores": "float32[N]"}),
                lambda ask: {"scores": np.zeros(len(ask.inputs["passages"]), np.float32)},
            ),
            "tensor": (info("tensor", {"x": "float32[N]?", "s": "text?"}, {"y": "float32[N]?", "t": "text?"}), echo),
            "voice": (
                info("voice", {"text": "text", "speed": "json?"}, {"audio": "audio"}),
                lambda ask: {"audio": np.zeros(9, np.float32)},
            ),
            "ears": (info("ears", {"speech": "audio"}, {"text": "text"}), lambda ask: {"text": "said"}),
        }
    )
    with hosted(backend, limits=ServeLimits(message_bytes_max=1 << 20), shared_memory=True) as endpoint:
        yield endpoint


@schema.parametrize()
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
def test_no_answer_is_a_failure_or_tells_of_the_inside(case: Any, endpoint: Hosted) -> None:
    response = case.call(base_url=endpoint.url)
    ready = case.path.endswith("/ready") or case.path in ("/readyz", "/health")
    assert response.status_code < 500 or (ready and response.status_code == 503), response.text
    assert not FORBIDDEN.search(response.content.decode("utf-8", "replace"))
    assert not any(FORBIDDEN.search(f"{name}: {value}") for name, value in response.headers.items())
    if response.status_code >= 400 and response.headers.get("content-type") == [b"application/json"]:
        assert "error" in response.json()
