"""A service on two nodes: requests to one address use the replicas of both, and a token has one rate."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree

import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.weftline.served import serving

SLOW = """weftline: 1
name: slow
inputs: {words: text}
steps:
  s: {node: function, function: "slow.py:slow", inputs: {words: words}}
outputs: {pid: s.output}
"""
CODE = '''import os
import time


def slow(words: str) -> str:
    """Return the process, after 200 ms."""
    time.sleep(0.2)
    return str(os.getpid())
'''
CALLERS, SECONDS = 8, 6.0
ONE_REPLICA_PER_S = 5
FREE, RARE = "wl_free-token", "wl_rare-token"


@contextmanager
def two_nodes(folder: Path) -> Iterator[str]:
    """Start a cluster of its own with two nodes and yield its address; no process of it is left."""
    (folder / "ray").mkdir()  # else the address would be written where other clusters of this machine look for it
    env = {**os.environ, "RAY_TMPDIR": str(folder), "PYTHONPATH": str(Path.cwd()), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-m", "tests.engine.jobs.ray.two_nodes"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            for one in family:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            psutil.wait_procs(family, timeout=20)


def answers(address: str, token: str, seconds: float) -> list[bytes]:
    """Send requests of CALLERS threads over one connection; return the processes that answered."""
    found: list[bytes] = []
    given = triton.InferInput("words", [1], "BYTES")
    given.set_data_from_numpy(np.array([b"x"], object))
    headers = {"authorization": f"Bearer {token}"}
    until = time.monotonic() + seconds

    def send() -> None:
        while time.monotonic() < until:
            try:
                found.append(client.infer("slow", [given], headers=headers).as_numpy("pid")[0])
            except InferenceServerException as refused:
                assert refused.status() == "StatusCode.RESOURCE_EXHAUSTED", refused
                time.sleep(0.02)

    with triton.InferenceServerClient(address) as client:
        threads = [threading.Thread(target=send) for _ in range(CALLERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return found


@pytest.mark.slow
def test_one_address_uses_the_replicas_of_both_nodes_at_one_rate() -> None:
    pytest.importorskip("ray")
    folder = Path(tempfile.mkdtemp(prefix="w", dir="/tmp"))  # names of sockets in it are bounded
    tokens = folder / "tokens.yaml"
    entries = "".join(
        f'  - {{name: {name}, sha256: "{hashlib.sha256(token.encode()).hexdigest()}"{more}}}\n'
        for name, token, more in (("free", FREE, ""), ("rare", RARE, ", requests_per_s: 5"))
    )
    tokens.write_text("tokens:\n" + entries)
    tokens.chmod(0o600)
    (folder / "slow.yaml").write_text(SLOW)
    (folder / "slow.py").write_text(CODE)
    words = ["slow.yaml", "--engine", "ray", "--replicas", "2", "--insecure", "--port", "0", "--grace-s", "2"]
    try:
        with (
            two_nodes(folder) as address,
            serving(folder, *words, "--tokens", "tokens.yaml", "--address", address) as served,
        ):
            served.wait_up()
            at = served.grpc.replace("0.0.0.0", "127.0.0.1")
            answers(at, FREE, 1)  # the first calls open what later ones use
            found = Counter(answers(at, FREE, SECONDS))
            assert len(found) == 2 and min(found.values()) > 0.3 * found.total(), found
            assert found.total() > 1.4 * ONE_REPLICA_PER_S * SECONDS, found
            limited = Counter(answers(at, RARE, SECONDS))
            most = 5 * (SECONDS + 1)  # a second's worth at once; a busy machine may not use all
            assert 0.75 * most < limited.total() <= most + 3, limited
            served.process.terminate()
            assert served.wait_end(40) == 0
    finally:
        rmtree(folder, ignore_errors=True)
