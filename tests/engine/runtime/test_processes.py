"""Processes that are killed: the parent, a worker, and Ctrl-C. Nothing stays behind, and the next run works.

Everything runs in processes of its own, so that a test may kill them. A process counts as ended when it is a zombie:
in a container whose first process reaps no orphans, orphans stay in the process table until it ends.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import weftline
from weftline.engine.runtime import processes
from weftline.errors import WorkerDied

PIPELINE = """
weftline: 1
name: test
inputs: {x: text}
steps:
  a: {node: echo, inputs: {value: x}}
  b: {node: DELAY, inputs: {value: a.value}}
outputs: {y: b.value}
limits: {arena_bytes: 33554432}
"""
HOLD = """
import sys, weftline
with weftline.load(sys.argv[1]).open() as session:
    print(session.run(x="hi")["y"], *session.pids().values(), flush=True)
    sys.stdin.read()
"""
HOLD_BUSY = """
import sys, threading, time, weftline
with weftline.load(sys.argv[1]).open() as session:
    threading.Thread(target=lambda: session.run(x="hi"), daemon=True).start()
    time.sleep(0.2)
    print("hi", *session.pids().values(), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Write a pipeline of two steps whose second one takes `delay_ms`, and return its path."""

    def write(delay_ms: float = 0.0, more: str = "") -> str:
        path = tmp_path / "pipeline.yaml"
        path.write_text(PIPELINE.replace("DELAY", f"echo, delay_ms: {delay_ms}{more}"))
        return str(path)

    return write


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen]]:
    """Start Python in a process group of its own; whatever is left of it is killed after the test."""
    started: list[subprocess.Popen] = []

    def start(*words: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,  # pytest may have it ignored
        )
        started.append(process)
        return process

    yield start
    for process in started:
        for pid in [process.pid, *workers_of(process.pid)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        process.communicate()


def workers_of(parent: int) -> list[int]:
    """Return the pids of running workers that `parent` started, orphans included: their last argument names it."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if "weftline.engine.worker" in words and words[-1] == str(parent):
            found += [process.pid] if process.info["status"] != psutil.STATUS_ZOMBIE else []
    return found


def running(pids: list[int]) -> list[int]:
    """Return those of the processes that have not ended."""
    alive = []
    for pid in pids:
        try:
            alive += [pid] if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE else []
        except psutil.NoSuchProcess:
            pass
    return alive


def wait_until(condition: Callable[[], bool], seconds: float) -> float:
    """Wait until the condition holds and return how long that took; AssertionError when it takes too long."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"not within {seconds} s"
        time.sleep(0.005)
    return time.monotonic() - started


def held(process: subprocess.Popen) -> list[int]:
    """Return the workers' pids that a holding script prints once its session is open."""
    assert process.stdout is not None
    answer, *pids = process.stdout.readline().split()
    assert answer == "hi"
    assert sorted(map(int, pids)) == sorted(workers_of(process.pid))
    return list(map(int, pids))


def arenas_of(pid: int) -> set[str]:
    """Return the inodes of the arenas a process maps: memory without a name is known by them."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "/memfd:weftline" in line}


def held_somewhere(inodes: set[str]) -> set[str]:
    """Return those of the arenas that any process still maps or has a descriptor of."""
    found = set()
    for process in psutil.process_iter():
        try:
            found |= (arenas_of(process.pid) | open_arenas_of(process.pid)) & inodes
        except OSError:  # it ended, or belongs to another user
            continue
    return found


def open_arenas_of(pid: int) -> set[str]:
    """Return the inodes of the arenas of which a process has a descriptor."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if str(descriptor.readlink()).startswith("/memfd:weftline"):
                found.add(str(descriptor.stat().st_ino))
        except FileNotFoundError:  # closed meanwhile
            continue
    return found


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("script", [HOLD, HOLD_BUSY], ids=["idle", "in a request"])
def test_workers_end_within_a_second_when_their_parent_is_killed(write, start, script: str) -> None:
    process = start("-c", script, write(0 if script == HOLD else 60_000))
    workers = held(process)
    arenas = arenas_of(process.pid)
    assert len(arenas) == 3, "one for requests, one for each worker"
    process.kill()
    wait_until(lambda: running(workers) == [], 1.0)
    assert workers_of(process.pid) == []
    process.wait()
    assert held_somewhere(arenas) == set(), "memory without a name is freed with its last mapping and descriptor"


@pytest.mark.slow
def test_a_closed_session_leaves_no_process_no_memory_and_no_descriptor(write) -> None:
    file = write()
    with weftline.load(file).open() as session:  # the first one pays for imports, which keep descriptors
        session.run(x="hi")
    before = (open_descriptors(), len(arenas_of(os.getpid())))
    for _ in range(3):
        with weftline.load(file).open() as session:
            session.run(x="hi")
            workers = list(session.pids().values())
        assert running(workers) == []
    assert (open_descriptors(), len(arenas_of(os.getpid()))) == before
    assert workers_of(os.getpid()) == []


@pytest.mark.slow
def test_the_next_run_works_after_the_parent_was_killed(write, start) -> None:
    file = write()
    process = start("-c", HOLD, file)
    held(process)
    process.kill()
    process.wait()
    with weftline.load(file).open() as session:
        assert session.run(x="again")["y"] == "again"


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("idempotent", [True, False], ids=["may run twice", "must not run twice"])
def test_a_killed_worker_restarts_and_its_request_is_retried_or_fails(write, start, idempotent: bool) -> None:
    with weftline.load(write(400, f", idempotent: {str(idempotent).lower()}")).open() as session:
        pids = session.pids()

        def kill_soon() -> None:
            time.sleep(0.15)
            os.kill(pids["b"], signal.SIGKILL)

        killer = threading.Thread(target=kill_soon)
        killer.start()
        if idempotent:
            assert session.run(x="kept")["y"] == "kept"
            assert session.stats()["retried"] == 1
        else:
            with pytest.raises(WorkerDied, match="step b"):
                session.run(x="lost")
        killer.join()
        wait_until(lambda: session.pids().get("b") not in (None, pids["b"]), 10.0)
        assert session.run(x="found")["y"] == "found"
        assert session.pids()["a"] == pids["a"], "the other worker is untouched"
        assert session.stats()["worker_deaths"] == 1
    assert running(list(pids.values())) == []


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("whole_group", [True, False], ids=["as a terminal sends it", "to the parent alone"])
def test_ctrl_c_ends_with_130_and_leaves_nothing(write, start, whole_group: bool) -> None:
    process = start("-m", "weftline", "run", write(60_000), "--input", "x=hi")
    assert process.stderr is not None
    loaded = set()
    while len(loaded) < 2:
        line = process.stderr.readline()
        assert line, "the command ended before its models were loaded"
        loaded |= {line.split()[1]} if line.endswith(": ready\n") else set()
    time.sleep(0.3)  # the request is on its way
    workers = workers_of(process.pid)
    assert len(workers) == 2
    (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert running(workers) == []
    assert workers_of(process.pid) == []


@pytest.mark.slow
def test_ctrl_c_while_models_load_leaves_nothing(write, start) -> None:
    process = start("-m", "weftline", "run", write(), "--input", "x=hi")
    wait_until(lambda: bool(workers_of(process.pid)), 20.0)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert workers_of(process.pid) == []


@pytest.mark.slow
def test_a_terminated_command_leaves_nothing(write, start) -> None:
    process = start("-m", "weftline", "run", write(60_000), "--input", "x=hi")
    wait_until(lambda: len(workers_of(process.pid)) == 2, 20.0)
    workers = workers_of(process.pid)
    process.terminate()
    process.communicate(timeout=10)
    wait_until(lambda: running(workers) == [], 1.0)


def test_workers_share_the_session_and_no_process_group(start: Callable, write: Callable) -> None:
    process = start("-c", HOLD, write())
    pids = [int(word) for word in process.stdout.readline().split()[1:]]
    assert pids and all(os.getsid(pid) == os.getsid(process.pid) for pid in pids)
    assert all(os.getpgid(pid) == pid for pid in pids)


def test_a_worker_inherits_what_libraries_of_gpus_need_and_no_secret() -> None:
    kept = {
        "CUDA_VISIBLE_DEVICES": "GPU-8932f937", "TRITON_CACHE_DIR": "/cache/triton", "TRITON_LIBCUDA_PATH": "/usr/lib",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "NCCL_SOCKET_IFNAME": "eth0", "NCCL_P2P_DISABLE": "1", "CC": "gcc-13", "CUDA_CACHE_PATH": "/cache/nv",
        "NVIDIA_TF32_OVERRIDE": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_BLOCKING_WAIT": "0",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "40", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=8G",
        "CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING": "1", "CUDA_MPS_CLIENT_PRIORITY": "1",
    }  # fmt: skip
    dropped = {
        "AWS_SECRET_ACCESS_KEY": "s", "HF_TOKEN": "s", "DATABASE_URL": "s", "TRITON_API_KEY": "s",
        "TRITON_AUTH": "s", "TRITON_PWD": "s", "TRITON_SERVER_URL": "https://user:s@host",
        "NCCL_TOKEN": "s", "TORCH_NCCL_KEY": "s", "TRITONSERVER_PASSWORD": "s",
        "WEFTLINE_ANYTHING": "s", "CUDA_MPS_PIPE_DIRECTORY": "/mine",
    }  # fmt: skip
    made = processes._environment(kept | dropped, 2)
    assert kept.items() <= made.items()
    assert not dropped.keys() & made.keys()
