"""Set-up of the Ray runner, on the cluster and before a model is loaded.

The driver's machine need not have what a replica has (a head node has no GPU), so the plan is made by a task that asks
for what a replica takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from weftline.engine.jobs.ray.connecting import Need, check_room, connected
from weftline.engine.jobs.ray.replicas import ReplicaAnswerer
from weftline.engine.jobs.rows import Answerer
from weftline.engine.jobs.runners.opening import AnswererFactory, open_here
from weftline.errors import ModelError, Unavailable, WeftlineError
from weftline.pipelines.spec.loader import load_file

DECIDE_S = 300.0
"""How long the cluster may take to find room for the decision; it takes a moment of one replica's room."""

OPENER = "weftline.engine.jobs.ray.opening:open_replica"


def open_on_cluster(
    pipeline: Path,
    *,
    outputs: Sequence[str] | None = None,
    seed: int = 0,
    block_rows: int | None = None,
    mode: str = "auto",
    replicas: int = 1,
    need: Need = Need(),  # noqa: B008  frozen
    address: str | None = None,
) -> AnswererFactory:
    """Connect to a cluster and decide how a job is answered there; as `open_here`, with whole-pipeline replicas.

    The pipeline's file, and what it names, lie under the same paths on every machine. Calling what is returned opens
    the replicas; closing their answerer ends the connection.
    PipelineError for what is wrong with the file; InputError, Unavailable, MissingPackage for the cluster; ModelError
    for what the cluster's machines say.
    """
    load_file(pipeline)
    asked = {
        "pipeline": str(pipeline.resolve()),
        "outputs": None if outputs is None else list(outputs),
        "seed": seed,
        "block_rows": block_rows,
        "mode": mode,
    }
    with ExitStack() as connecting:
        connecting.enter_context(connected(address))
        check_room(need, replicas)
        said = _decided(asked, need)
        connection = connecting.pop_all()
    arguments = {**asked, "mode": said["mode"], "block_rows": said["block_rows"]}

    def open_replicas(progress: object) -> Answerer:
        return ReplicaAnswerer(OPENER, arguments, replicas=replicas, need=need, connection=connection)

    return AnswererFactory(
        said["mode"], said["why"], said["block_rows"], said["part_rows"], said["repeatable"], open_replicas
    )  # fmt: skip


def open_replica(
    pipeline: str, outputs: Sequence[str] | None, seed: int, block_rows: int | None, mode: str
) -> Answerer:
    """Open the answerer of one replica, where it runs."""
    return open_here(Path(pipeline), outputs=outputs, seed=seed, block_rows=block_rows, mode=mode)(None)


def decide(asked: str) -> str:
    """Return as JSON how a job would be answered on this machine, or `error`: why it cannot be. Runs on the cluster."""
    told = msgspec.json.decode(asked)
    try:
        opening = open_here(Path(told.pop("pipeline")), **told)
    except WeftlineError as error:
        return msgspec.json.encode({"error": str(error)}).decode()
    said: dict[str, Any] = {name: getattr(opening, name) for name in ("mode", "why", "block_rows", "part_rows")}
    return msgspec.json.encode({**said, "repeatable": dict(opening.repeatable)}).decode()


def _decided(asked: dict[str, Any], need: Need) -> dict[str, Any]:
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    task = ray.remote(num_cpus=need.cpus, num_gpus=need.gpus, max_retries=1)(decide)
    try:
        said: dict[str, Any] = msgspec.json.decode(
            ray.get(task.remote(msgspec.json.encode(asked).decode()), timeout=DECIDE_S)
        )
    except GetTimeoutError:
        found = f"the Ray cluster had no room for a replica within {DECIDE_S:g} s"
        raise Unavailable(f"{found}\n    fix: wait until other work on it has ended, or ask for less") from None
    except RayError as error:
        told = " ".join(str(error).split())[-300:]
        fix = "install the same weftline on every machine of the cluster"
        raise ModelError(f"the Ray cluster could not plan the pipeline: {told}\n    fix: {fix}") from None
    if "error" in said:
        raise ModelError(f"on the Ray cluster: {said['error']}")
    return said
