"""Who answers the rows of `weftline batch`: an engine here, a server that runs, or copies of the pipeline on Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from weftline.batch_options import BatchRequest, OnRay, Via
from weftline.engine.jobs.answering.opening import Opening, open_here
from weftline.engine.jobs.rows import Answerer
from weftline.engine.jobs.spec import JobSpec
from weftline.errors import InputError
from weftline.pipelines.load import load_file
from weftline.pipelines.problems import did_you_mean, listed

if TYPE_CHECKING:
    from weftline.engine.runtime import Progress


def opening_of(request: BatchRequest) -> Opening:
    """Decide how the rows of a request are answered; PipelineError lists every problem. Nothing is started yet."""
    spec = request.spec
    _check_outputs(spec)
    if isinstance(request.where, Via):
        return _of_server(spec, request.where)
    here = open_here(spec.pipeline, outputs=spec.out.outputs, seed=spec.seed, block_rows=spec.block_rows)
    return here if request.where is None else _on_ray(spec, request.where, here)


def _check_outputs(spec: JobSpec) -> None:
    known = list(load_file(spec.pipeline).outputs)
    for name in spec.out.outputs or ():
        if name not in known:
            raise InputError(
                f"--output {name:.80}: the pipeline has no such output; {did_you_mean(name, known)} "
                f"it has {listed(known)}"
            )


def _of_server(spec: JobSpec, via: Via) -> Opening:
    from weftline.engine.jobs.answering.via_opening import open_via

    token, tls = via.remote.credentials()
    return open_via(
        spec.pipeline,
        via.remote.url,
        model=via.model or "",
        token=token,
        tls=tls,
        insecure=via.remote.insecure,
        outputs=spec.out.outputs,
        seed=spec.seed,
        block_rows=spec.block_rows,
    )


def _on_ray(spec: JobSpec, ray: OnRay, here: Opening) -> Opening:
    """Return copies of what would run here: the same blocks, batches and seeds, so the same job and the same results.

    One that began here can go on there, and the other way round.
    """

    def opened(progress: Progress | None) -> Answerer:
        from weftline.engine.jobs.cluster.connecting import Need
        from weftline.engine.jobs.cluster.replicas import ReplicaAnswerer

        arguments = {
            "pipeline": str(spec.pipeline.resolve()),
            "outputs": spec.out.outputs,
            "seed": spec.seed,
            "block_rows": spec.block_rows,
        }
        need = Need(gpus=ray.gpus_per_replica)
        return ReplicaAnswerer(REPLICA, arguments, replicas=ray.replicas, need=need, address=ray.address)

    return replace(here, open=opened)


REPLICA = "weftline.batch_answering:open_replica"
"""What a replica calls, on whichever machine it runs."""


def open_replica(pipeline: str, outputs: Sequence[str] | None, seed: int, block_rows: int | None) -> Answerer:
    """Open a copy of the pipeline where this is called."""
    return open_here(Path(pipeline), outputs=outputs, seed=seed, block_rows=block_rows)()
