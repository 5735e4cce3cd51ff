"""A replica of a service without Ray: what the proxy would call, with a context like Ray Serve's."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from weftline.engine.jobs.ray.grpc_adapter import UNARY, full_name
from weftline.engine.jobs.ray.service import PipelineReplica, config_of, config_text
from weftline.engine.serving.config import Logs, ServeConfig, ServedPipeline, ServeLimits
from weftline.engine.serving.grpc.protos import HEALTH, V2
from weftline.errors import ModelError

Script = Callable[[Any], Awaitable[None]]


class Context:
    """As Ray Serve's RayServegRPCContext."""

    def __init__(self, **metadata: str) -> None:
        self._metadata = list(metadata.items())
        self.status = grpc.StatusCode.OK
        self.details = ""
        self.trailing: list[tuple[str, str]] = []

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self._metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        self.status = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, metadata: list[tuple[str, str]]) -> None:
        self.trailing = metadata


def config_for(path: Path) -> ServeConfig:
    return ServeConfig({"greet": ServedPipeline(path)}, insecure=True)


def with_replica(config: ServeConfig, script: Script) -> None:
    async def run() -> None:
        replica = PipelineReplica.__new__(PipelineReplica)
        await PipelineReplica.__init__(replica, config_text(config))  # type: ignore[func-returns-value, misc]
        try:
            await script(replica)
        finally:
            replica._repository.close()

    asyncio.run(run())


def asked(text: str) -> bytes:
    request = V2.ModelInferRequest(model_name="greet", id=text)
    request.inputs.add(name="text", datatype="BYTES", shape=[1]).contents.bytes_contents.append(text.encode())
    return bytes(request.SerializeToString())


async def ask(replica: Any, text: str, context: Context) -> Any:
    return V2.ModelInferResponse.FromString((await replica.ModelInfer(asked(text), context)).SerializeToString())


def test_methods_answer_as_through_grpc(greet: Callable[..., Path]) -> None:
    async def script(replica: Any) -> None:
        context = Context()
        assert b"hello you" in (await ask(replica, "you", context)).raw_output_contents[0]
        ready = await replica.ModelReady(V2.ModelReadyRequest(name="greet").SerializeToString(), context)
        assert V2.ModelReadyResponse.FromString(ready.SerializeToString()).ready
        health = await replica.Check(HEALTH.HealthCheckRequest().SerializeToString(), context)
        assert HEALTH.HealthCheckResponse.FromString(health.SerializeToString()).status == 1
        assert context.status is grpc.StatusCode.OK
        await replica.check_health()

    with_replica(config_for(greet()), script)


def test_what_is_wrong_becomes_the_status_of_the_call(greet: Callable[..., Path]) -> None:
    async def script(replica: Any) -> None:
        unknown = Context()
        await replica.ModelReady(b"\xff", unknown)
        assert (unknown.status, unknown.details) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "the message is not a valid ModelReadyRequest",
        )
        large = Context()
        assert not (await ask(replica, "x" * 2000, large)).outputs
        assert large.status is grpc.StatusCode.RESOURCE_EXHAUSTED and "the most is 1024" in large.details

    limits = ServeLimits(message_bytes_max=1024)
    with_replica(replace(config_for(greet()), limits=limits), script)


def test_a_stream_answers_each_request_and_ends_with_its_client(greet: Callable[..., Path]) -> None:
    async def script(replica: Any) -> None:
        async def requests() -> AsyncIterator[bytes]:
            for name in ("a", "b", "c"):
                yield asked(name)

        async def endless() -> AsyncIterator[bytes]:
            yield asked("a")
            await asyncio.Event().wait()

        answers = [one async for one in replica.ModelStreamInfer(requests(), Context())]
        found = [V2.ModelStreamInferResponse.FromString(one.SerializeToString()) for one in answers]
        assert sorted(one.infer_response.id for one in found) == ["a", "b", "c"]
        before = len(asyncio.all_tasks())
        stream = replica.ModelStreamInfer(endless(), Context())
        await anext(stream)
        await stream.aclose()
        assert len(asyncio.all_tasks()) == before

    with_replica(config_for(greet()), script)


def test_tokens_are_asked_for_in_every_replica(greet: Callable[..., Path], tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    digest = hashlib.sha256(b"t" * 43).hexdigest()
    tokens.write_text(f'tokens:\n  - {{name: web, sha256: "{digest}"}}\n')
    tokens.chmod(0o600)

    async def script(replica: Any) -> None:
        without, wrong, right = (
            Context(),
            Context(authorization="Bearer no"),
            Context(authorization="Bearer " + "t" * 43),
        )
        assert not (await ask(replica, "you", without)).raw_output_contents
        assert not (await ask(replica, "you", wrong)).raw_output_contents
        assert without.status is wrong.status is grpc.StatusCode.UNAUTHENTICATED
        assert (await ask(replica, "you", right)).raw_output_contents and right.status is grpc.StatusCode.OK
        stream = Context()
        assert [one async for one in replica.ModelStreamInfer(aiter_of([asked("a")]), stream)] == []
        assert stream.status is grpc.StatusCode.UNAUTHENTICATED
        probe = Context()
        await replica.ServerLive(b"", probe)
        assert probe.status is grpc.StatusCode.OK

    with_replica(replace(config_for(greet()), tokens=tokens), script)


async def aiter_of(messages: list[bytes]) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


def test_a_failed_deployment_reports_the_reason_and_leaves_nothing(greet: Callable[..., Path]) -> None:
    body = "inputs: {x: text}\nsteps:\n  a: {node: hello, inputs: {value: x}}\noutputs: {y: a.value}\n"
    with pytest.raises(ModelError, match="hello"):
        with_replica(config_for(greet(body)), lambda replica: asyncio.sleep(0))


def test_a_configuration_arrives_as_it_was() -> None:
    config = ServeConfig(
        {"a": ServedPipeline(Path("/x/a.yaml"), ("step",))},
        tokens=Path("/x/tokens.yaml"),
        limits=ServeLimits(tensors_max=3),
        logs=Logs("json"),
    )
    assert config_of(config_text(config)) == config


def test_methods_have_the_names_that_access_rights_are_given_by() -> None:
    assert full_name("Check") == "/grpc.health.v1.Health/Check"
    assert all(full_name(name) == f"/inference.GRPCInferenceService/{name}" for name in UNARY)
