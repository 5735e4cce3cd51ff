"""Deployments of a server: figures of each, the steps that share it, and the names that a caller may see."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.engine.serving.grpc.served import served_in_thread
from tests.engine.serving.http.hosted import hosted
from weftline.engine.client.client import Client
from weftline.engine.repository import Repository
from weftline.engine.serving.auth.gate import Gate
from weftline.engine.serving.auth.tokens import TokenFile, digest
from weftline.engine.serving.config import ServedPipeline
from weftline.engine.serving.deployments import DeploymentState, deployments, described
from weftline.engine.serving.local import LocalBackend

GIB, MIB = 1 << 30, 1 << 20

PIPELINE = """
weftline: 1
name: NAME
inputs: {x: text}
steps:
  NAME-step: {node: echo, delay_ms: 1, batch: {items_max: 8}, instances: 2, inputs: {value: x}}
  NAME-own: {node: echo, delay_ms: DELAY, inputs: {value: NAME-step.value}}
outputs: {y: NAME-own.value}
"""
TEXTS = {
    name: PIPELINE.replace("NAME", name).replace("DELAY", delay) for name, delay in (("mine", "2"), ("other", "3"))
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tokens") / "tokens.yaml"
    entries = ("ops", ", admin: true"), ("web", ", models: [mine]"), ("none", ", models: [absent]"), ("all", "")
    lines = (f"  - {{name: {name}, sha256: {digest(f'wl_{name}')}{more}}}" for name, more in entries)
    file.write_text("tokens:\n" + "\n".join(lines) + "\n")
    file.chmod(0o600)
    return file


@pytest.fixture(scope="module", params=["grpc", "http"])
def ask(request: pytest.FixtureRequest, tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return a function that returns the deployments that a token is shown, by either protocol."""
    if request.param == "grpc":
        with served_in_thread(TEXTS, tokens=tokens) as one:

            def call(token: str) -> list[DeploymentState]:
                with Client(one.address, token=token) as client:
                    return list(client.deployments())

            yield call
        return
    folder = tmp_path_factory.mktemp("pipelines")
    for name, text in TEXTS.items():
        (folder / f"{name}.yaml").write_text(text)
    served = {name: ServedPipeline(folder / f"{name}.yaml") for name in TEXTS}
    with Repository() as repository:
        backend = LocalBackend(repository, served)
        asyncio.run(backend.open())
        with hosted(backend, Gate(TokenFile(tokens))) as server:

            def get(token: str) -> list[DeploymentState]:
                response = httpx.get(f"{server.url}/deployments", headers={"authorization": f"Bearer {token}"})
                return msgspec.json.decode(response.read(), type=list[DeploymentState])

            yield get


def test_an_admin_sees_all_deployments_and_who_shares_them(ask: Any) -> None:
    for token in ("wl_ops", "wl_all"):
        shared, *own = ask(token)
        assert (shared.node, shared.steps, shared.others) == ("echo", ("mine: mine-step", "other: other-step"), 0)
        assert (shared.instances, shared.ready, shared.queued, shared.items_max) == (2, 2, 0, 8)
        assert shared.devices == ("cpu",) and shared.resident_bytes > MIB and not shared.kv_bytes
        assert [one.steps for one in own] == [("mine: mine-own",), ("other: other-own",)]


def test_a_token_of_one_model_sees_no_name_of_another(ask: Any) -> None:
    shared, own = ask("wl_web")
    assert (shared.steps, shared.others, shared.users) == (("mine: mine-step",), 1, "mine: mine-step, and 1 more")
    assert (own.steps, own.others) == (("mine: mine-own",), 0)
    assert "other-" not in repr((shared, own)) and "other:" not in repr((shared, own))
    assert ask("wl_none") == []


def stats(**more: Any) -> dict[str, Any]:
    node = {"node": "llm", "model": "tiny", "heavy": True, "devices": ["cuda:0"], "resident_bytes": GIB}
    figures = {"page_bytes": MIB, "pages_used": 1, "pages_idle": 2, "pages_free": 5}
    return {
        "engine": 1,
        "deployments": {"talk": "other.talk"},
        "nodes": {"talk": node},
        "workers": {"talk": {"all": 2, "ready": 1, "asleep": 0}},
        "queued": {"talk": 3},
        "batches": {},
        "figures": {"talk": {"a": figures, "b": figures}},
        "device_memory": {
            "cuda:0": {
                "claims": [
                    ("other.talk", "weights and work", GIB),
                    ("other.talk", "weights and work", GIB),
                    ("w", "arena", 9),
                ],
                "steps": {},
            }
        },
    } | more


def test_memory_is_measured_or_planned_and_kv_use_is_added_up() -> None:
    (planned,) = deployments({"a": stats(), "b": stats()})
    assert planned.device_bytes == 2 * GIB and planned.steps == ("a: talk", "b: talk")
    assert (planned.kv_bytes, planned.kv_used_bytes) == (16 * MIB, 2 * MIB)
    memory = stats()["device_memory"]["cuda:0"] | {"steps": {"other.talk": {"open_bytes": 5, "peak_bytes": 3 * GIB}}}
    assert deployments({"a": stats(device_memory={"cuda:0": memory})})[0].device_bytes == 6 * GIB
    assert list(described([planned])) == [
        "llm tiny: 1 of 2 ready, cuda:0, 2 GiB, KV 12% of 16 MiB; queue 3, joins and leaves; for a: talk, b: talk"
    ]
    assert len(deployments({"a": stats(), "b": stats(engine=2)})) == 2, "names of deployments are an engine's own"


def test_models_that_do_not_serve_have_no_deployment() -> None:
    assert deployments({"a": {}, "b": stats()})[0].steps == ("b: talk",)
