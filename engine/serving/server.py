"""Life cycle of a server, from configuration to exit code.

    exit_code = asyncio.run(serve(config, announce=print))

Addresses are tried before models are loaded, and the servers listen once every model is ready. gRPC runs in the
engine's process or in ingress processes. HTTP always runs in an ingress process, so that its JSON and TLS do not delay
the scheduler. The first SIGTERM, SIGHUP or Ctrl-C drains: not ready, new work refused, open requests finish within the
grace time, exit code 0. A second SIGTERM or Ctrl-C ends everything at once; a second SIGHUP does not, because a closed
terminal sends it twice. SIGHUP that is ignored, as under nohup, stays ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from weftline.engine.metrics.registry import Metrics
from weftline.engine.metrics.traces import Tracing, to_collector
from weftline.engine.repository import Repository
from weftline.engine.runtime.opening import Progress
from weftline.engine.serving.auth.exposure import check_exposure
from weftline.engine.serving.auth.gate import Gate
from weftline.engine.serving.auth.rates import TokenRates
from weftline.engine.serving.auth.shared_memory import SharedMemory
from weftline.engine.serving.auth.tls import TlsFiles
from weftline.engine.serving.auth.tokens import TokenFile
from weftline.engine.serving.backend import Observer
from weftline.engine.serving.config import ServeConfig
from weftline.engine.serving.deployments import DeploymentState, deployments_of
from weftline.engine.serving.frontend.messages import GRPC, HTTP, IngressSpec
from weftline.engine.serving.frontend.supervisor import FrontendManager
from weftline.engine.serving.grpc.server import GrpcServer
from weftline.engine.serving.identity import version
from weftline.engine.serving.local import LocalBackend
from weftline.engine.serving.logs import RequestLog, dropped_lines, start_logs
from weftline.engine.serving.model_info import ModelState
from weftline.engine.serving.statistics import Statistics
from weftline.engine.serving.unix_socket import SocketClaim
from weftline.engine.serving.watch import Watch
from weftline.errors import WeftlineError

_log = logging.getLogger("weftline.ingress")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Addresses and models of a running server.

    grpc: 'host:port' or 'unix:PATH'.
    http: 'http://host:port', or https; '' without HTTP.
    deployments: the nodes that are loaded, with the steps that share each.
    """

    grpc: str
    http: str
    models: tuple[ModelState, ...]
    deployments: tuple[DeploymentState, ...] = ()


async def serve(
    config: ServeConfig,
    *,
    announce: Callable[[ServeOptions], None] = lambda serving: None,
    progress: Progress | None = None,
) -> int:
    """Serve until a signal ends it, and return the exit code: 0, or 128 + the second signal.

    announce: called once, when all models are loaded and the servers listen.
    progress: as for `Session.open`.
    WeftlineError: the configuration, a model or an address cannot be used; all that was started has been stopped.
    """
    signals = _Signals()
    with signals, _logging_as(config):
        server = Server(config, progress)
        starting = asyncio.ensure_future(server.open())
        try:
            await signals.wait_any(starting)
            if starting.done():
                announce(starting.result())
                await signals.wait_first()
                _log.info("draining: open requests have %g s", config.grace_s)
                await signals.wait_any(asyncio.ensure_future(server.drain(config.grace_s)), second=True)
        finally:
            await server.close()
            if not starting.done():
                starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
    return signals.exit_code


class Server:
    """Models and network servers of one process. Call `open` once, optionally `drain`, then `close`."""

    def __init__(self, config: ServeConfig, progress: Progress | None = None) -> None:
        check_exposure(config)
        self.config = config
        if config.tls is not None:
            TlsFiles(config.tls)  # raises its problems now
        tokens = TokenFile(config.tokens) if config.tokens is not None else None
        self.statistics = Statistics()
        exporter = to_collector(config.otlp) if config.otlp else None
        self._tracing = Tracing(exporter, version=version()) if exporter is not None else None
        self._repository = Repository()
        callers = [token.name for token in tokens.tokens] if tokens is not None else []
        self.metrics = Metrics(
            lambda: self.backend.sessions(),
            callers=callers,
            ingress=lambda: self._frontends.pids(),
            log_dropped=lambda: {"engine": dropped_lines(), **self._frontends.log_dropped()},
            version=version(),
        )
        observers: list[Observer] = [self.statistics, self.metrics, RequestLog(config.logs)]
        self.backend = LocalBackend(
            self._repository,
            config.pipelines,
            observers=observers if self._tracing is None else [*observers, self._tracing],
            begin=self._tracing.begin if self._tracing is not None else None,
            metrics=self.metrics.render,
            progress=progress,
            strict=config.strict,
        )
        self._tokens = tokens
        self._rates = TokenRates(tokens)
        self._frontends = FrontendManager(self.backend, statistics=self.statistics, rates=self._rates)
        self._watching: asyncio.Task[None] | None = None
        self._grpc: GrpcServer | None = None
        self._claim: SocketClaim | None = None

    async def open(self) -> ServeOptions:
        """Load the models, then start the servers."""
        config = self.config
        for where in _addresses(config):
            _try_address(*where)
        if config.grpc.socket is not None:
            self._claim = SocketClaim(config.grpc.socket)
        watch = Watch({name: one.file for name, one in config.pipelines.items()} if config.watch else {})
        await watch.look()
        await self.backend.open()
        if config.watch:
            self._watching = asyncio.create_task(watch.run(self.backend.should_serve, self.backend.load))
        grpc_at = await self._open_grpc()
        http_at = ""
        if config.http is not None:
            ports = await self._frontends.start_ingress(IngressSpec("http", (HTTP,), config))
            scheme = "https" if config.tls is not None else "http"
            http_at = f"{scheme}://{_address(config.http.host, ports[HTTP])}"
        return ServeOptions(grpc_at, http_at, self.backend.index(), deployments_of(self.backend))

    async def drain(self, grace_s: float) -> None:
        """Report not ready, refuse new work, and let open requests finish for at most `grace_s` seconds."""
        self._stop_watching()
        stops = [self._frontends.drain(grace_s)]
        if self._grpc is not None:
            self._grpc.set_serving(False)
            stops.append(self._grpc.stop(grace_s))
        await asyncio.gather(*stops)

    async def close(self) -> None:
        """Stop all servers and models at once. Safe to call twice."""
        self._stop_watching()
        closing = asyncio.to_thread(self._repository.close)  # first: it stops models that are loading
        ended = await asyncio.gather(closing, self._frontends.stop(), return_exceptions=True)
        for error in ended:
            if isinstance(error, BaseException):
                _log.error("a part of the server could not be closed", exc_info=error)
        if self._grpc is not None:
            await self._grpc.stop(0.0)
        if self._claim is not None:
            self._claim.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    def _stop_watching(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    async def _open_grpc(self) -> str:
        config, endpoint = self.config, self.config.grpc
        if endpoint.processes == 0:
            self._grpc = GrpcServer(
                config,
                self.backend,
                Gate(self._tokens, config.limits, rates=self._rates),
                SharedMemory(config.limits, config.shared_memory),
                figures=self.statistics.tell,
                version=version(),
            )
            port = await self._grpc.start()
        else:
            port = endpoint.port
            for number in range(endpoint.processes):
                spec = IngressSpec(f"grpc-{number}", (GRPC,), config).at({GRPC: port})
                port = (await self._frontends.start_ingress(spec))[GRPC]
        return f"unix:{endpoint.socket}" if endpoint.socket is not None else _address(endpoint.host, port)


class _Signals:
    """Handler of the first and the second termination signal."""

    def __init__(self) -> None:
        self.exit_code = 0
        nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._handled = [signum for signum in SIGNALS if not (nohup and signum == signal.SIGHUP)]
        self._first = asyncio.Event()
        self._second = asyncio.Event()

    async def wait_first(self) -> None:
        await self._first.wait()

    async def wait_any(self, work: asyncio.Future[Any], *, second: bool = False) -> None:
        """Wait until `work` is done, or for the first signal (or the second). Raises an exception of `work`."""
        received: asyncio.Future[Any] = asyncio.ensure_future((self._second if second else self._first).wait())
        try:
            await asyncio.wait({work, received}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            received.cancel()
        if work.done():
            work.result()

    def _on_signal(self, signum: int) -> None:
        if self._first.is_set() and signum != signal.SIGHUP:
            self.exit_code = 128 + signum
            self._second.set()
        self._first.set()

    def __enter__(self) -> _Signals:
        loop = asyncio.get_running_loop()
        for signum in self._handled:
            loop.add_signal_handler(signum, self._on_signal, signum)
        return self

    def __exit__(self, *ended: object) -> None:
        loop = asyncio.get_running_loop()
        for signum in self._handled:
            loop.remove_signal_handler(signum)


@contextlib.contextmanager
def _logging_as(config: ServeConfig) -> Iterator[None]:
    """Log as configured within the context."""
    logger = logging.getLogger("weftline")
    level = logger.level
    handler = start_logs(config.logs, take_stderr=True)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()
        logger.setLevel(level)
        logger.propagate = True


def _addresses(config: ServeConfig) -> list[tuple[str, int]]:
    at = [] if config.grpc.socket is not None else [(config.grpc.host, config.grpc.port)]
    return at if config.http is None else [*at, (config.http.host, config.http.port)]


def _try_address(host: str, port: int) -> None:
    """Raise WeftlineError if an address cannot be bound."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        with socket.socket(found[0][0], socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(found[0][4])
            sock.listen(1)  # fails where another process listens
    except OSError as error:
        problem = f"cannot listen at {_address(host, port)}: {error.strerror}"
        raise WeftlineError(f"{problem}\n    fix: choose another port, or end the process that has it") from None


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
