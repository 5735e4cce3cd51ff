"""Supervision of ingress processes: start, restart, drain and stop.

    manager = FrontendManager(backend)
    ports = await manager.start_ingress(IngressSpec("http", ("http",), config))
    ...
    await manager.drain(grace_s)          # or stop()

    FrontendManager       all ingress processes; publishes models and their states to them
      FrontendSupervisor  keeps one ingress process running: restarts with back-off, heartbeat
        FrontendProcess   one operating-system process, its socket and buffers
        FrontendConnection (connection.py)

When a process ends, its requests are cancelled at once and its clients see closed connections. A process that does not
respond to Ping for SILENT_S is killed, a stopped one after STOPPED_S. One that keeps failing to start is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from weftline.engine.runtime.processes import describe_exit, minimal_environment
from weftline.engine.scheduler.restarts import RestartPolicy, Restarts
from weftline.engine.serving.auth.rates import TokenRates
from weftline.engine.serving.backend import Backend
from weftline.engine.serving.frontend import messages as msg
from weftline.engine.serving.frontend.connection import FrontendConnection, RunCommand
from weftline.engine.serving.frontend.messages import IngressSpec, encode_spec, frame_bytes_max
from weftline.engine.serving.frontend.shared_buffer import create_request_buffer
from weftline.engine.serving.log_writer import log_descriptor
from weftline.engine.serving.statistics import Statistics
from weftline.errors import InputError, SessionClosed
from weftline.shm.arena import HostArena

ENTRY = "weftline.engine.serving.frontend.process"
"""Module that an ingress process runs."""

BUFFER_BYTES = 64 << 20
"""Size of each of the two shared buffers: eight tensors of 8 MB in transit; more travel inside messages."""

OPEN_S = 60.0
"""Start timeout, until all servers listen."""

EXIT_S = 2.0
"""Exit timeout of a drained process."""

LOST_EXIT_S = 0.3
"""Exit timeout of a process whose connection has closed."""

SILENT_S = 10.0
"""Heartbeat timeout."""

STOPPED_S = 1.0
"""Heartbeat timeout of a process that a signal has stopped (SIGSTOP): it cannot respond until another one continues
it."""

POLL_S = 0.2
"""Interval of checks for changed models."""

STATS_EVERY = 5
"""Checks per publication of statistics."""

_log = logging.getLogger("weftline.ingress")


class FrontendProcess:
    """A running ingress process. OSError or LimitReached if it cannot be started.

    It has a clean environment and a session of its own, and logs to the server's standard error. It exits when the
    socket pair closes.

    sock:      the engine's end of the socket pair.
    requests:  buffer that the process writes.
    responses: buffer that the engine writes.
    """

    def __init__(self, buffer_bytes: int, entry: str = ENTRY) -> None:
        with contextlib.ExitStack() as undo:
            self.requests = create_request_buffer(buffer_bytes)
            undo.callback(self.requests.close)
            self.responses = HostArena.create(buffer_bytes)
            undo.callback(self.responses.close)
            self.sock, theirs = socket.socketpair()
            undo.callback(self.sock.close)
            with theirs:
                passed = [theirs.fileno(), self.requests.fd, self.responses.fd]
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", entry, *map(str, passed), str(os.getpid())],
                    pass_fds=passed,
                    stdin=subprocess.DEVNULL,
                    stdout=log_descriptor(),  # the server's standard output is reserved for its own messages
                    stderr=log_descriptor(),
                    env=minimal_environment(os.environ),
                    process_group=0,  # no session: see docs/decisions/one-process-per-step.md
                )
            undo.pop_all()
        self.pid = self._process.pid

    @property
    def stopped(self) -> bool:
        """True while a signal has stopped it: state T of proc_pid_stat(5)."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except (OSError, IndexError):
            return False

    def kill(self) -> None:
        """Kill the process and its children."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def wait_end(self, timeout_s: float = EXIT_S) -> str:
        """Wait for the exit and return its status as text; kill after `timeout_s`. Blocks."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        if self._process.returncode is None:
            self.kill()
        return describe_exit(self._process.wait())


class FrontendSupervisor:
    """Keeps one ingress process running. For one event loop.

    on_connect: called with each new FrontendConnection, to send the current models.
    """

    def __init__(
        self,
        spec: IngressSpec,
        backend: Backend,
        run_command: RunCommand,
        on_connect: Callable[[FrontendConnection], None],
        buffer_bytes: int = BUFFER_BYTES,
        entry: str = ENTRY,
        rates: TokenRates | None = None,
    ) -> None:
        self.spec = spec
        self.ports: dict[str, int] = {}
        self.connection: FrontendConnection | None = None
        self.given_up = False
        self._backend = backend
        self._run_command = run_command
        self._on_connect = on_connect
        self._buffer_bytes = buffer_bytes
        self._entry = entry
        self._rates = rates
        self._process: FrontendProcess | None = None
        self._restarts = Restarts(RestartPolicy(), seed=os.getpid())
        self._supervision: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def ready(self) -> bool:
        """True while its servers listen."""
        return self.connection is not None and bool(self.ports)

    async def start(self) -> dict[str, int]:
        """Start the process and return its ports; WeftlineError or OSError on failure."""
        if self._supervision is not None:
            raise RuntimeError("an ingress process is started once")
        await self._open()
        self._supervision = asyncio.create_task(self._supervise())
        return self.ports

    def drain(self, grace_s: float) -> None:
        """Refuse new calls, and end once open calls have ended, at the latest after `grace_s`."""
        self._ending.set()
        if self.connection is not None:
            self.connection.send(msg.encode(msg.Drain(grace_s)))

    async def wait_end(self) -> None:
        """Wait for the end of the process after `drain`."""
        if self._supervision is not None:
            await asyncio.shield(self._supervision)

    async def stop(self) -> None:
        """Kill the process. Idempotent."""
        self._ending.set()
        if self._process is not None:
            self._process.kill()
        if self._supervision is not None:
            await asyncio.wait([self._supervision])

    async def _open(self) -> None:
        """Start a process and wait until its servers listen; clean up if they cannot."""
        loop = asyncio.get_running_loop()
        process = FrontendProcess(self._buffer_bytes, self._entry)
        calls_max = self.spec.config.limits.calls_max
        connection = FrontendConnection(
            self._backend, process.requests, process.responses, self._run_command, calls_max, self._rates
        )
        self._process = process
        try:
            await connection.serve(process.sock, frame_bytes_max(self.spec.config))
            connection.send(msg.encode(msg.Start(encode_spec(self.spec))))
            self._on_connect(connection)
            self.ports = await asyncio.wait_for(connection.wait_opened(), OPEN_S)
        except BaseException as error:
            connection.close()
            await connection.wait_closed()
            status = await loop.run_in_executor(None, process.wait_end, LOST_EXIT_S)
            self._process = None
            if isinstance(error, TimeoutError):
                raise SessionClosed(f"ingress process {self.spec.name} took more than {OPEN_S:g} s to open") from None
            if isinstance(error, SessionClosed):
                raise SessionClosed(f"ingress process {self.spec.name} ended before it was open: {status}") from None
            raise
        self.spec = self.spec.at(self.ports)
        self.connection = connection
        self._restarts.ready()

    async def _supervise(self) -> None:
        """Restart the process whenever it ends, until `drain`, `stop` or too many failed starts."""
        while self.connection is not None and self._process is not None:
            connection = self.connection
            status = await self._wait_death(connection, self._process)
            self.connection = self._process = None
            if self._ending.is_set():
                return
            delay_ms = self._restarts.died(_now_ms(), was_ready=True)
            _log.error(
                "ingress process %s died: %s; %d open requests are cancelled; then: restart in %.0f ms",
                self.spec.name, status, connection.cancelled_requests, delay_ms or 0.0,
            )  # fmt: skip
            while delay_ms is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), delay_ms / 1000)
                if self._ending.is_set():
                    return
                try:
                    await self._open()
                    if self._ending.is_set() and self._process is not None:  # drained during the start
                        self._process.kill()
                    break
                except Exception as error:
                    _log.error("ingress process %s could not be started: %s", self.spec.name, error)
                    delay_ms = self._restarts.died(_now_ms(), was_ready=False)
            if delay_ms is None:
                self.given_up = True
                _log.error("ingress process %s is given up: it keeps failing to start", self.spec.name)

    async def _wait_death(self, connection: FrontendConnection, process: FrontendProcess) -> str:
        """Wait for the end of the connection, which ends the process, and return the reason."""
        loop = asyncio.get_running_loop()
        closed = asyncio.create_task(connection.wait_closed())
        last_s, silent_s = connection.last_received_s, 0.0
        while not (await asyncio.wait([closed], timeout=msg.PING_S))[0]:
            connection.send(msg.encode(msg.Ping()))
            # Counts rounds, not seconds: in a round in which this loop was blocked, nothing could be received.
            silent_s = silent_s + msg.PING_S if connection.last_received_s == last_s else 0.0
            last_s = connection.last_received_s
            if silent_s > SILENT_S:
                connection.close(f"it was silent for {SILENT_S:g} s")
            elif silent_s >= STOPPED_S and process.stopped:
                connection.close("a signal has stopped it")
        status = await loop.run_in_executor(None, process.wait_end, EXIT_S if connection.drained else LOST_EXIT_S)
        return connection.close_reason or status


class FrontendManager:
    """All ingress processes of a server. For one event loop.

    backend:      serves their requests.
    buffer_bytes: size of each of a process's two shared buffers.
    statistics:   counters of the backend, reported by all servers.
    rates:        account of the tokens' rates; None: there are no tokens.
    """

    def __init__(
        self,
        backend: Backend,
        buffer_bytes: int = BUFFER_BYTES,
        *,
        statistics: Statistics | None = None,
        rates: TokenRates | None = None,
    ) -> None:
        self._backend = backend
        self._statistics = statistics or Statistics()
        self._rates = rates
        self._buffer_bytes = buffer_bytes
        self._supervisors: list[FrontendSupervisor] = []
        self._catalog: msg.Catalog | None = None
        self._stats = b""
        self._polling: asyncio.Task[None] | None = None
        self._ending = False

    async def start_ingress(self, spec: IngressSpec, entry: str = ENTRY) -> dict[str, int]:
        """Start an ingress process, keep it running, and return the ports of its servers by name.

        WeftlineError or OSError if it cannot be started. entry: module that it runs.
        """
        if self._ending:
            raise SessionClosed("the server is ending")
        supervisor = FrontendSupervisor(
            spec, self._backend, self._run_command, self._send_current, self._buffer_bytes, entry, self._rates
        )
        self._supervisors.append(supervisor)
        try:
            ports = await supervisor.start()
        except BaseException:
            self._supervisors.remove(supervisor)
            raise
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll())
        return ports

    async def drain(self, grace_s: float) -> None:
        """Refuse new calls in all ingress processes, wait for open ones, and end the processes."""
        self._ending = True
        for supervisor in self._supervisors:
            supervisor.drain(grace_s)
        await _wait_all(self._supervisors, grace_s)
        await self.stop()

    async def stop(self) -> None:
        """Kill all ingress processes. Idempotent."""
        self._ending = True
        if self._polling is not None:
            self._polling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._polling
            self._polling = None
        for supervisor in self._supervisors:
            await supervisor.stop()
        self._supervisors.clear()

    def publish(self) -> None:
        """Send the models to all ingress processes if they have changed."""
        catalog = _catalog(self._backend)
        if catalog != self._catalog:  # cheap: unchanged parts are identical objects
            self._catalog = catalog
            self._broadcast(msg.encode(catalog))

    @property
    def ready(self) -> bool:
        """True if the servers of all ingress processes listen."""
        return all(supervisor.ready for supervisor in self._supervisors)

    def log_dropped(self) -> dict[str, int]:
        """Return how many lines of its log every running ingress process has dropped, by name."""
        connections = ((one.spec.name, one.connection) for one in self._supervisors)
        return {name: connection.log_dropped for name, connection in connections if connection is not None}

    def pids(self) -> dict[str, int]:
        """Return the pid of every running ingress process by name."""
        return {one.spec.name: one.pid for one in self._supervisors if one.pid is not None}

    async def _poll(self) -> None:
        rounds = 0
        while True:
            await asyncio.sleep(POLL_S)
            rounds += 1
            try:
                self.publish()
                if rounds % STATS_EVERY == 0:
                    self._publish_stats()
            except Exception:
                _log.exception("the models could not be sent to the ingress processes")  # the next round retries

    def _publish_stats(self) -> None:
        stats = _session_stats(self._backend)
        if stats != self._stats:
            self._stats = stats
            self._broadcast(stats)

    def _send_current(self, connection: FrontendConnection) -> None:
        connection.send(msg.encode(_catalog(self._backend)))
        connection.send(self._stats or _session_stats(self._backend))

    def _broadcast(self, body: bytes) -> None:
        for supervisor in self._supervisors:
            if supervisor.connection is not None:
                supervisor.connection.send(body)

    async def _run_command(self, command: msg.Command) -> msg.CommandDone:
        if command.action == msg.LOAD:
            version = await self._backend.load(command.model)
            self.publish()  # before the response, so that the caller finds the model
            return msg.CommandDone(command.id, version)
        if command.action == msg.UNLOAD:
            await self._backend.unload(command.model)
            self.publish()
            return msg.CommandDone(command.id)
        if command.action == msg.METRICS:
            return msg.CommandDone(command.id, data=await self._backend.metrics())
        if command.action == msg.STATISTICS:
            return msg.CommandDone(command.id, data=msg.encode(await self._statistics.tell(command.versions)))
        raise InputError("unknown command")


async def _wait_all(supervisors: list[FrontendSupervisor], grace_s: float) -> None:
    """Wait for drained processes; kill those left one second after `grace_s`."""
    waiting = [asyncio.create_task(supervisor.wait_end()) for supervisor in supervisors]
    if waiting:
        await asyncio.wait(waiting, timeout=grace_s + 1.0)
    for supervisor in supervisors:
        with contextlib.suppress(ProcessLookupError):
            await supervisor.stop()


def _catalog(backend: Backend) -> msg.Catalog:
    index = backend.index()
    infos = []
    for state in index:
        with contextlib.suppress(SessionClosed):
            infos.append(backend.info(state.name))
    return msg.Catalog(index, tuple(infos))


def _session_stats(backend: Backend) -> bytes:
    stats = {state.name: backend.stats(state.name) for state in backend.index()}
    return msg.encode(
        msg.SessionStats({name: msgspec.to_builtins(dict(one), str_keys=True) for name, one in stats.items() if one})
    )


def _now_ms() -> float:
    return asyncio.get_running_loop().time() * 1000
