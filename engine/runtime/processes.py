"""Start one worker process, wait for its death, and kill everything that it started.

A worker is started by exec with one end of a socket pair and a clean environment that sets its number of threads. It
has a session of its own, so that Ctrl-C at a terminal reaches only the parent, which then closes the worker. A pidfd
becomes readable when it dies. `output.py` reads what it prints.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from weftline.engine.protocol.channel import Channel
from weftline.engine.runtime import descendants
from weftline.engine.runtime.output import LINES_KEPT, OutputPipe
from weftline.pipelines.spec.document import is_secret

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

KEPT_VARIABLES = (
    "PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH",
    "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TORCH_HOME", "XDG_CACHE_HOME", "SSL_CERT_FILE", "VIRTUAL_ENV",
    # which GPUs there are, where CUDA lies, and what it caches and loads
    "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH", "CUDA_CACHE_PATH", "CUDA_CACHE_MAXSIZE", "CUDA_CACHE_DISABLE",
    "CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    # a client's part of NVIDIA's multi-process service; whether it connects is decided in `mps.py`
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "CUDA_MPS_CLIENT_PRIORITY",
    "CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING",
    # torch's allocator (the second name since torch 2.9), and where torch.compile keeps what it has compiled
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR",
    # the C compiler that Triton and torch.compile call, and where it finds headers and libraries
    "CC", "CXX", "CPATH", "LIBRARY_PATH",
    # glibc's allocator, which ingress processes set where these do not
    "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES",
)  # fmt: skip
"""Variables that a worker inherits: paths, and settings that GPU libraries take in no other form; never a secret."""

KEPT_PREFIXES = ("NCCL_", "TORCH_NCCL_", "TRITON_")
"""Prefixes of further names that it inherits: NCCL's interfaces and transports, torch's use of it, Triton's caches."""

_PRIVATE = re.compile(r"AUTH|PASS|PWD|CRED", re.IGNORECASE)
_WITH_PASSWORD = re.compile(r"://[^/\s]*@")

THREAD_VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "BLIS_NUM_THREADS", "NUMEXPR_NUM_THREADS",
    "NUMBA_NUM_THREADS", "OPENCV_FOR_THREADS_NUM", "RAYON_NUM_THREADS", "POLARS_MAX_THREADS",
)  # fmt: skip
"""Variables from which libraries take their number of threads when they are first imported."""


class WorkerProcess:
    """A running worker: its channel, its pidfd, and the pipes of its output. OSError when it cannot be started.

    environment: further variables of this worker.
    steps:       names of its steps; with several of them each has a pipe of its own.
    outputs:     its pipes, each with the prefix of its lines.
    """

    def __init__(
        self, name: str, threads: int, environment: Mapping[str, str] | None = None, steps: Sequence[str] = ()
    ) -> None:
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as undo, contextlib.ExitStack() as passed:
            undo.callback(ours.close)
            self.name = name
            self._mark = descendants.new_mark()
            reads, writes = [], [theirs.fileno()]
            for _ in steps if len(steps) > 1 else ():
                read, write = os.pipe()
                undo.callback(os.close, read)
                passed.callback(os.close, write)
                reads.append(read)
                writes.append(write)
            command = [sys.executable, "-P", "-m", "weftline.engine.worker", *map(str, writes), str(os.getpid())]
            self._process = subprocess.Popen(
                command,
                pass_fds=writes,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=_environment(os.environ, threads) | dict(environment or {}) | {descendants.VARIABLE: self._mark},
                process_group=0,  # no session: see docs/decisions/one-process-per-step.md
            )
            undo.callback(self._undo_start)
            self.pid = self._process.pid
            self.pidfd = os.pidfd_open(self.pid)
            undo.pop_all()
        self.channel = Channel(ours, blocking=False)
        if self._process.stdout is None:
            raise RuntimeError("a worker was started without a pipe for its output")
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._reads = reads
        named = [(steps[0] if len(steps) == 1 else name, self._process.stdout.fileno()), *zip(steps, reads)]
        self.outputs = [(step, OutputPipe(fd, self._lines)) for step, fd in named]

    def _undo_start(self) -> None:
        """Kill a process whose pidfd could not be opened, because descriptors ran out."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    @property
    def last_lines(self) -> list[str]:
        return list(self._lines)

    def wait_death(self) -> str:
        """Reap the process, whose pidfd has fired, and return how it ended."""
        code = self._process.wait()
        hint = "; a node that writes into its inputs must set mutates_inputs" if -code == signal.SIGSEGV else ""
        return f"{describe_exit(code)}{hint}"

    def kill(self) -> None:
        """Kill it and everything it started."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        descendants.kill_marked(self._mark, self.pid)

    def wait_end(self, timeout_s: float, last: Callable[[WorkerProcess], None] = lambda process: None) -> None:
        """Wait for its exit, kill what is left, and close every descriptor. last: called before they are closed."""
        ended = select.poll()
        ended.register(self.pidfd, select.POLLIN)
        ended.poll(timeout_s * 1000)
        self.kill()  # not reaped yet, so its process group is still its own
        self._process.wait()
        last(self)
        self.close()

    def close(self) -> None:
        if self.pidfd >= 0:
            self.channel.close()
            os.close(self.pidfd)
            self.pidfd = -1
            if self._process.stdout is not None:
                self._process.stdout.close()
            for read in self._reads:
                os.close(read)


def describe_exit(code: int) -> str:
    """Return a process's return code, negative for a signal, as text: 'exit code 1', 'signal 9, SIGKILL'."""
    if code >= 0:
        return f"exit code {code}"
    return f"signal {-code}, {signal.Signals(-code).name if -code in signal.valid_signals() else 'unknown'}"


def no_process() -> str:
    """Return the message for a refused process start: the limit of processes, and what to do."""
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    may = "" if most == resource.RLIM_INFINITY else f"; {most} may run at a time, threads counted"
    return f"the system starts no more processes for this user{may}: end some, or raise the limit (ulimit -u)"


def _is_private(name: str, text: str) -> bool:
    """Return whether a variable may be a secret: by its name, or as an address with a password."""
    return is_secret(name) or _PRIVATE.search(name) is not None or _WITH_PASSWORD.search(text) is not None


def minimal_environment(parent: Mapping[str, str], threads: int = 1) -> dict[str, str]:
    """Return the environment of a child process: an allow-list of `parent`, the module path and thread pool sizes."""
    kept = {name: parent[name] for name in KEPT_VARIABLES if name in parent}
    kept |= dict.fromkeys(THREAD_VARIABLES, str(threads))
    # The parent's path and no more: with -P the current folder is not searched for modules.
    kept["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    kept["PYTHONUNBUFFERED"] = "1"
    return kept


def _environment(parent: Mapping[str, str], threads: int) -> dict[str, str]:
    public = {
        name: text for name, text in parent.items() if name.startswith(KEPT_PREFIXES) and not _is_private(name, text)
    }
    kept = public | minimal_environment(parent, threads)
    kept["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order in which machine.py counts devices
    kept["OMP_WAIT_POLICY"] = "passive"  # threads that spin while they wait take the cores of the other workers
    kept["TOKENIZERS_PARALLELISM"] = "false"
    return kept


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, of which others may share a part; 0 when it is gone."""
    try:
        return int(Path("/proc", str(pid), "statm").read_text("ascii").split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0
