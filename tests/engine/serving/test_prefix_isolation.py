"""Cached prompts over a server: the operator's text is shared by all callers, everything else is one caller's."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tritonclient.grpc as triton

from tests.engine.serving.grpc.requests import text
from weftline.engine.repository import Repository
from weftline.engine.serving.auth.tokens import digest
from weftline.engine.serving.config import GrpcConfig, HttpConfig, ServeConfig, ServedPipeline
from weftline.engine.serving.frontend.messages import GRPC, HTTP, IngressSpec
from weftline.engine.serving.frontend.supervisor import FrontendManager
from weftline.engine.serving.local import LocalBackend

MODEL = Path(__file__).resolve().parents[3] / "examples/models/shapes-chat"
PAGE = 16
CHAT = f"""
weftline: 1
name: chat
inputs: {{prompt: text, tenant: {{type: text, optional: true}}}}
steps:
  answer:
    node: llm
    model: {MODEL}
    fuse: false
    kv_bytes: 16777216
    page_tokens: {PAGE}
    system: You are a helpful assistant. Count the shapes in the photo, name their colours, and answer in one sentence.
    sampling: {{tokens_max: 2, temperature: 0}}
    inputs: {{prompt: prompt, tenant: tenant}}
outputs: {{text: answer.text, usage: answer.usage}}
"""
LONG = "The photo shows: 2 red circles, 1 blue star, 4 green triangles and 1 yellow square. Question: how many {0}?" * 2


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    """Serve from an ingress process with both servers, to the callers `web` and `app`."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "chat.yaml").write_text(CHAT)
    tokens = folder / "tokens.yaml"
    entries = [{"name": name, "sha256": digest(name * 16), "models": ["chat"]} for name in ("web", "app")]
    tokens.write_text(json.dumps({"tokens": entries}))
    tokens.chmod(0o600)
    loop = asyncio.new_event_loop()
    with Repository() as repository:
        backend = LocalBackend(repository, {"chat": ServedPipeline(folder / "chat.yaml")})
        desk = FrontendManager(backend)
        config = ServeConfig({}, grpc=GrpcConfig(port=0), http=HttpConfig(port=0), tokens=tokens)

        async def start() -> dict[str, int]:
            await backend.open()
            return await desk.start_ingress(IngressSpec("servers", (GRPC, HTTP), config))

        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            yield asyncio.run_coroutine_threadsafe(start(), loop).result(120)
        finally:
            asyncio.run_coroutine_threadsafe(desk.stop(), loop).result(60)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)
            loop.close()


def by_grpc(ports: dict[str, int], caller: str, prompt: str, tenant: str = "") -> dict[str, Any]:
    with triton.InferenceServerClient(f"127.0.0.1:{ports[GRPC]}") as client:
        inputs = [text(prompt, "prompt"), *([text(tenant, "tenant")] if tenant else [])]
        found = client.infer("chat", inputs, headers={"authorization": f"Bearer {caller * 16}"}).as_numpy("usage")
    usage: dict[str, Any] = json.loads(np.asarray(found).reshape(-1)[0])
    return usage


def by_openai(ports: dict[str, int], caller: str, prompt: str) -> int:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{ports[HTTP]}/v1", api_key=caller * 16, max_retries=0) as client:
        usage: Any = client.completions.create(model="chat", prompt=prompt).usage
    return int(usage.prompt_tokens_details.cached_tokens)


@pytest.mark.slow
def test_callers_share_cached_pages_of_the_operator_and_of_no_other_caller(ports: dict[str, int]) -> None:
    prompt = LONG.format("circles")
    whole = by_grpc(ports, "web", "warm")["prompt_tokens"] // PAGE * PAGE
    first = by_grpc(ports, "web", prompt)
    fixed = first["cached_tokens"]
    assert PAGE <= fixed <= whole and fixed % PAGE == 0  # the system prompt, which `web` has just had computed
    all_of_it = (first["prompt_tokens"] - 1) // PAGE * PAGE
    assert all_of_it > fixed + 2 * PAGE
    assert by_grpc(ports, "web", prompt)["cached_tokens"] == all_of_it
    for tenant in ("", "web", "3:web:", "app"):
        assert by_grpc(ports, "app", prompt, tenant)["cached_tokens"] == fixed, tenant
        assert by_grpc(ports, "app", prompt, tenant)["cached_tokens"] == all_of_it, tenant
    assert by_grpc(ports, "web", prompt, "other")["cached_tokens"] == fixed  # a tenant divides further


@pytest.mark.slow
def test_it_is_the_same_by_openais_way(ports: dict[str, int]) -> None:
    prompt = "Another question. " + LONG.format("stars")
    by_grpc(ports, "web", "warm")
    cached = [by_openai(ports, caller, prompt) for caller in ("web", "web", "app", "app")]
    assert 0 < cached[0] == cached[2] < cached[1] == cached[3]
