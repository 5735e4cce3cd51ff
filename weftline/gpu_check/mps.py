"""V10: NVIDIA's multi-process service with one faulting client; only on request.

The service changes the fault domain: one client's fatal fault hits every client of the device. What happens to the
others is therefore reported, not judged. A daemon of the check's own is started, with pipes of its own, and ended.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from weftline.gpu_check.faults import lose
from weftline.gpu_check.hops import check_hops
from weftline.gpu_check.leases import check_leases
from weftline.gpu_check.running import Skipped, Wrong, run_limited
from weftline.gpu_check.sharing import check_share
from weftline.gpu_check.trial import Trial

DAEMON = "nvidia-cuda-mps-control"
START_MAX_S = 20.0
OTHERS = 2
"""Clients beside the one that faults."""


def check_mps(trial: Trial) -> dict[str, Any]:
    """V10: sharing, leases and hops as clients of the service; then a fault in one client, and what the others see."""
    with _service() as environment:
        under = replace(trial, environment=environment, quick=True)
        figures = {f"under the service: {key}": value for key, value in check_share(under).items()}
        for part in (check_leases, check_hops):
            figures |= {f"under the service: {key}": value for key, value in part(under).figures.items()}
        with under.crew() as crew:
            doomed = crew.start("the doomed")
            others = [crew.start(f"client {number}") for number in range(OTHERS)]
            for one in others:
                one.ask("open")
            figures["a client that faults"] = lose(doomed)
            served = sum(_serves(one) for one in others)
            figures["other clients that serve on"] = f"{served} of {OTHERS}"
            for one in (doomed, *others):
                crew.dismiss(one)
            figures["a new client afterwards"] = "serves" if _serves(crew.start("a new client")) else "does not serve"
    return figures


def _serves(process: Any) -> bool:
    """Whether a process can still use its device."""
    try:
        process.ask("make", arena="b", size_bytes=1 << 20)
        process.ask("fill", arena="b", offset=0, size_bytes=1 << 16, seed=1)
    except Wrong:
        return False
    return True


@contextlib.contextmanager
def _service() -> Iterator[dict[str, str]]:
    """Run the service for a while; yields the variables by which its clients find it. Skipped where it cannot run."""
    daemon = shutil.which(DAEMON)
    if daemon is None:
        raise Skipped(f"{DAEMON} is not installed")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("pipe", "log"):
            (Path(folder) / name).mkdir()
        environment = {
            "CUDA_MPS_PIPE_DIRECTORY": str(Path(folder) / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(Path(folder) / "log"),
        }
        try:
            code, said = run_limited([daemon, "-d"], START_MAX_S, environment, keep=True)
        except TimeoutError:
            raise Skipped(f"{DAEMON} did not start within {START_MAX_S:.0f} s") from None
        if code != 0:
            raise Skipped(f"{DAEMON} ended with {code}: {' | '.join(said.strip().splitlines()[-2:])}")
        try:
            yield environment
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    [daemon], input="quit\n", text=True, timeout=START_MAX_S, check=False, capture_output=True,
                    env={**os.environ, **environment},
                )  # fmt: skip
