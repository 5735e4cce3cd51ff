"""Connection to a Ray cluster: an existing one, or a local one for this process.

Disables Ray's log lines on the terminal and its usage statistics, unless the environment sets them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from weftline.errors import InputError, MissingPackage, Unavailable

QUIET: Mapping[str, str] = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DATA_LOG_LEVEL": "ERROR",
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # its core writes lines to standard error that no logger holds back
}
"""Defaults of Ray's environment variables."""


@dataclass(frozen=True, slots=True)
class Need:
    """Resources of one replica; fractions of a GPU are allowed below 1."""

    cpus: float = 1.0
    gpus: float = 0.0


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connect to a cluster, and disconnect at the end; an existing connection is used and kept.

    address: 'auto', or HOST:PORT of the head; None: start a local one, with this machine's cores and GPUs.
    MissingPackage without Ray; InputError for an unsupported address; Unavailable without a response.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise MissingPackage("ray", "ray") from None
    if ray.is_initialized():
        yield
        return
    if address is not None and "://" in address:
        fix = "start this command on a machine of the cluster, with --address auto or HOST:PORT"
        raise InputError(f"--address {address:.200}: the Ray client protocol is not supported\n    fix: {fix}")
    options: dict[str, Any] = {} if address is not None else {"include_dashboard": False}
    try:
        ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        fix = "start one with `ray start --head`, or omit --address to start one on this machine"
        reason = " ".join(str(error).split())[:300]
        raise Unavailable(f"no Ray cluster at {address or 'this machine'}: {reason}\n    fix: {fix}") from None
    try:
        yield
    finally:
        ray.shutdown()


def check_capacity(need: Need, replicas: int) -> int:
    """Return how many replicas fit on the cluster's machines now; InputError if none fits.

    Machines that an autoscaler would add are not counted: start one of the required kind.
    """
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fits = capacity(nodes, need)
    if not fits:
        has = "; ".join(f"{one.get('CPU', 0):g} CPUs and {one.get('GPU', 0):g} GPUs" for one in nodes)
        raise InputError(
            f"no machine of the Ray cluster fits a replica, which needs {need.cpus:g} CPUs and {need.gpus:g} GPUs\n"
            f"    found: {has or 'no machine'}\n    fix: request less (--gpus-per-replica), or add machines"
        )
    return min(fits, replicas)


def capacity(nodes: Iterable[Mapping[str, float]], need: Need) -> int:
    """Return how many replicas fit on empty machines with these resources."""
    return sum(min(_times(node.get("CPU", 0.0), need.cpus), _times(node.get("GPU", 0.0), need.gpus)) for node in nodes)


def _times(available: float, needed: float) -> int:
    if needed <= 0:
        return 1 << 20
    per = int(1 / needed) if needed < 1 else 0  # a fraction is on one device
    return int(available) * per if per else int(available // needed)
