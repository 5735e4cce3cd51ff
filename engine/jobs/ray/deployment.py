"""Life cycle of a Ray Serve service: deploy, watch and delete.

The first SIGTERM, SIGHUP or Ctrl-C removes the application: Ray Serve sends no new requests to replicas, and open ones
have the grace time to finish. Serve itself is shut down when it was started here. A second signal ends this process at
once.
"""

from __future__ import annotations

import logging
import math
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

from weftline.engine.jobs.ray.cluster import Need, check_capacity, connected
from weftline.engine.jobs.ray.grpc_adapter import IMPORT_PATH, full_name
from weftline.engine.machine import this_machine
from weftline.engine.serving.config import ServeConfig
from weftline.errors import InputError, ModelError, PipelineError, Problem, Unavailable
from weftline.pipelines.placement.place import Device, Machine

APP = "weftline"
"""The application's name in Ray Serve. Where others run beside it, clients send it as the metadata `application`."""

RATES = "rates"
"""Deployment that holds the account of the tokens' rates, where there are tokens."""

ONGOING_MAX = 1024
"""Most requests that a replica has at a time; more wait in the proxies."""

LOOK_S = 2.0
"""Polling interval of the application's state."""

PROBE_S = 30.0
"""Longest time to the proxy's first response, once all replicas are ready."""

_log = logging.getLogger("weftline.ingress")


@dataclass(frozen=True, slots=True)
class OnRay:
    """Options of `weftline serve --engine ray`.

    replicas: number of engines, each with all pipelines.
    need:     resources of each.
    address:  of the cluster; None: start one on this machine.
    """

    replicas: int = 1
    need: Need = field(default_factory=Need)
    address: str | None = None


@dataclass(frozen=True, slots=True)
class Deployed:
    """Address of the service, with the same port on every machine with a proxy, and its models."""

    grpc: str
    models: tuple[str, ...]
    replicas: int


class StopSignal(BaseException):
    """Raised in the main thread at SIGTERM or SIGINT."""


def machine_for(need: Need) -> Machine:
    """Return the machine to check pipelines against: this one, with the GPUs of a replica.

    GPU memory is only known where a replica runs, which plans again.
    """
    here = this_machine()
    missing = range(len(here.devices), math.ceil(need.gpus))
    return replace(here, devices=here.devices + tuple(Device(f"cuda:{number}", 1 << 40) for number in missing))


def check_config(config: ServeConfig) -> None:
    """Raise PipelineError for all settings that Ray Serve does not support."""
    from weftline.engine.serving.auth.tokens import TokenFile

    problems = list(_problems(config))
    if config.tokens is not None:
        try:
            TokenFile(config.tokens)
        except PipelineError as error:
            problems += error.problems
    if problems:
        raise PipelineError(problems)


def _problems(config: ServeConfig) -> Iterator[Problem]:
    source = "weftline serve --engine ray"
    for key, is_set in {
        "http": config.http is not None,
        "tls": config.tls is not None,
        "shared_memory": config.shared_memory,
        "grpc.socket": config.grpc.socket is not None,
        "grpc.processes": config.grpc.processes > 0,
        "otlp": bool(config.otlp),
    }.items():
        if is_set:
            found = "is not supported behind Ray Serve's gRPC proxy"
            yield Problem(key, found, fix="omit it; docs/guides/ray.md lists what is supported", file=source)
    if not config.insecure:
        found = "Ray Serve's gRPC proxy listens on every address of every machine of the cluster, without TLS"
        fix = "keep the port inside a network you trust, or behind a proxy with TLS, and pass --insecure"
        yield Problem("grpc.host", found, fix=fix, file=source)


def serve_on_ray(config: ServeConfig, on: OnRay, announce: Callable[[Deployed], None]) -> int:
    """Deploy, announce, and serve until a signal; return the exit code: 0, or 128 + the second signal.

    WeftlineError: from `connected` and `check_capacity`; InputError if the application exists;
    ModelError if the replicas cannot be deployed. Everything started has ended then.
    """
    check_config(config)
    with connected(on.address), _signals() as activity:
        try:
            with _deployed(config, on) as where:
                announce(where)
                _wait()
        except StopSignal:
            return 0 if len(activity) == 1 else 128 + activity[-1]
    return 0  # not reached: waiting ends with an error or a signal


@contextmanager
def _deployed(config: ServeConfig, on: OnRay) -> Iterator[Deployed]:
    """Deploy the application, and delete it at the end."""
    from ray import serve

    check_capacity(on.need, on.replicas)
    ours = not _serve_runs()
    if not ours and APP in serve.status().applications:
        fix = f"end the command that serves it, or `python -c 'from ray import serve; serve.delete(\"{APP}\")'`"
        raise InputError(f"an application called {APP} is deployed on this cluster already\n    fix: {fix}")
    port = config.grpc.port or _free_port()
    try:
        _deploy(config, on, port)
        _probe(port, ours)
        yield Deployed(f"0.0.0.0:{port}", tuple(config.pipelines), on.replicas)
    finally:
        if ours:
            serve.shutdown()
        else:
            serve.delete(APP)


def _deploy(config: ServeConfig, on: OnRay, port: int) -> None:
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from weftline.engine.jobs.ray.rates import RateReplica
    from weftline.engine.jobs.ray.router import SpreadRouter
    from weftline.engine.jobs.ray.service import PipelineReplica, config_text

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    files = {name: replace(one, file=one.file.resolve()) for name, one in config.pipelines.items()}
    tokens = config.tokens.resolve() if config.tokens is not None else None
    text = config_text(replace(config, pipelines=files, tokens=tokens))
    serve.start(
        proxy_location="EveryNode",
        http_options={"host": "127.0.0.1", "port": _free_port()},  # Ray Serve has no gRPC without HTTP
        grpc_options={"port": port, "grpc_servicer_functions": [IMPORT_PATH], "enable_reflection": False},
    )
    deployment = serve.deployment(
        PipelineReplica,
        name=APP,
        num_replicas=on.replicas,
        max_ongoing_requests=ONGOING_MAX,
        request_router_config=RequestRouterConfig(request_router_class=SpreadRouter),
        graceful_shutdown_timeout_s=config.grace_s,
        ray_actor_options={"num_cpus": on.need.cpus, "num_gpus": on.need.gpus},
    )
    rates = None
    if tokens is not None:
        account = serve.deployment(
            RateReplica, name=RATES, max_ongoing_requests=ONGOING_MAX, ray_actor_options={"num_cpus": 0}
        )
        rates = account.bind(str(tokens))
    try:
        serve.run(deployment.bind(text, rates), name=APP, route_prefix=f"/{APP}")  # gRPC needs a route, too
    except RuntimeError as error:
        raise ModelError(f"the replicas could not be deployed: {_why(error)}") from None


def _why(error: RuntimeError) -> str:
    """Extract the reason from Ray Serve's message, which ends with the replica's traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    ours = [line for line in lines if "weftline.errors." in line]
    return (ours or lines or ["no reason was given"])[-1].partition("weftline.errors.")[2] or lines[-1][:500]


def _probe(port: int, ours: bool) -> None:
    """Raise ModelError unless the proxy on this machine answers for us."""
    import grpc

    from weftline.engine.serving.grpc.protos import V2

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        live = channel.unary_unary(
            full_name("ServerLive"),
            request_serializer=V2.ServerLiveRequest.SerializeToString,
            response_deserializer=V2.ServerLiveResponse.FromString,
        )
        until = time.monotonic() + PROBE_S
        request, sent = V2.ServerLiveRequest(), (("application", APP),)
        while (code := _call_status(live, request, sent)) is not grpc.StatusCode.OK:
            if code is grpc.StatusCode.UNIMPLEMENTED or time.monotonic() > until:
                break
            time.sleep(0.1)  # the proxies see a new application with a delay
        else:
            return
    found = f"Ray Serve's gRPC proxy does not answer at port {port} ({code.name})"
    fix = "choose another --port"
    if not ours:
        fix = (
            f"Serve was running already, and its gRPC options cannot be changed: `serve shutdown` first, or "
            f"start it with port {port} and grpc_servicer_functions: [{IMPORT_PATH}]"
        )
    raise ModelError(f"{found}\n    fix: {fix}")


def _call_status(method: Any, request: Any, metadata: Any) -> Any:
    """Return the status of a call."""
    import grpc

    try:
        method(request, timeout=PROBE_S, wait_for_ready=True, metadata=metadata)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def _wait() -> None:
    """Wait for a signal and log changes of state; Unavailable if the cluster is lost."""
    from ray import serve
    from ray.exceptions import RayError

    before = ""
    while True:
        try:
            application = serve.status().applications.get(APP)
        except (RayError, ConnectionError, RuntimeError) as error:
            raise Unavailable(f"the Ray cluster was lost: {' '.join(str(error).split())[:300]}") from None
        if application is None:
            raise Unavailable(f"the application {APP} was deleted by another process")
        state = _describe(application)
        if state != before and before:
            _log.warning("%s", state)
        before = state
        time.sleep(LOOK_S)


def _describe(application: Any) -> str:
    deployment = application.deployments.get(APP)
    counts = deployment.replica_states.items() if deployment is not None else ()
    states = {str(getattr(state, "value", state)): count for state, count in counts}
    return f"{APP} is {application.status.value}: replicas " + ", ".join(f"{n} {name}" for name, n in states.items())


def _serve_runs() -> bool:
    import ray

    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Raise StopSignal at SIGTERM, SIGINT and SIGHUP, and list them; restores the handlers at the end."""
    activity: list[int] = []

    def on_signal(signum: int, frame: FrameType | None) -> None:
        activity.append(signum)
        raise StopSignal

    handled = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        handled.append(signal.SIGHUP)
    before = {signum: signal.signal(signum, on_signal) for signum in handled}
    try:
        yield activity
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
