"""The examples' stock clients do what they say against a endpoint like the one they name."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.serving.http.backends import Functions, info
from tests.engine.serving.http.hosted import Hosted, hosted

CLIENTS = Path(__file__).resolve().parents[4] / "examples/clients"


def main_of(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, CLIENTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def answer(ask: Any) -> dict[str, Any]:
    constrained = "json_schema" in ask.inputs.get("sampling", {})
    said = '"circle"' if constrained else "There are 2."
    usage = {"completion_tokens": 4, "finish_reason": "stop"}
    return {"text": said, "usage": usage, "answers": [{"prompt_token_ids": [5, 6, 7]}]}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Hosted]:
    assistant = "voice-photo-assistant"
    tabular = info(
        "tabular",
        {"measures": "float32[4]", "habitat": "int64[]"},
        {"species": "int64[]", "probabilities": "float32[3]"},
    )
    models: dict[str, Any] = {
        f"{assistant}.answer": (
            info(
                f"{assistant}.answer",
                {"messages": "json?", "sampling": "json?", "template": "json?"},
                {"text": "text", "usage": "json", "answers": "json"},
                "text",
            ),
            answer,
        ),
        f"{assistant}.hear": (
            info(f"{assistant}.hear", {"audio": "audio"}, {"text": "text"}),
            lambda ask: {"text": f"received {len(ask.inputs['audio'])} bytes"},
        ),
        "embedding.embed": (
            info("embedding.embed", {"text": "text"}, {"embedding": "float32[2]"}),
            lambda ask: {"embedding": np.array([1, len(ask.inputs["text"])], np.float32)},
        ),
        "tabular": (
            tabular,
            lambda ask: {"species": ask.inputs["habitat"], "probabilities": ask.inputs["measures"][:3]},
        ),
    }
    with hosted(Functions(models)) as endpoint:
        yield endpoint


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("openai_chat", ["whole: There are 2.", "streamed: There are 2.  (4 tokens)", 'as JSON: "circle"']),
        (
            "anthropic_messages",
            ["tokens: 3", "whole: There are 2. (end_turn)", "streamed: There are 2.  (4 tokens)", 'as JSON: "circle"'],
        ),
        (
            "openai_responses",
            [
                *("whole: There are 2.", "streamed: There are 2.  (4 tokens)"),
                *("asked again: There are 2.", 'as JSON: "circle"'),
            ],
        ),
        ("openai_async", ["nothing: There are 2."]),
        ("openai_embeddings", ["2 numbers, likeness to the first: 145.0"]),
        ("openai_speech", ["received "]),
        ("http_sync", ["wants measures: FP32 [-1, 4]", "species 1 of [4.7 1.4 6.1]", "answered so far: 0"]),
        ("http_json", ["species [1]", "probabilities [4.699"]),
    ],
)
def test_an_example_prints_what_it_is_there_for(
    endpoint: Hosted, capsys: pytest.CaptureFixture[str], name: str, says: list[str]
) -> None:
    plain = {
        "http_sync": f"127.0.0.1:{endpoint.port}",
        **dict.fromkeys(("http_json", "anthropic_messages"), endpoint.url),
    }
    url = plain.get(name, f"{endpoint.url}/v1")
    found = main_of(name)(url)
    if asyncio.iscoroutine(found):
        asyncio.run(found)
    printed = " ".join(capsys.readouterr().out.split())  # independent of numpy's print options
    for one in says:
        assert " ".join(one.split()).replace("[ ", "[") in printed.replace("[ ", "[")
