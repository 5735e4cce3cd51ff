"""Choice of the runner for `weftline batch`: local engine, server or Ray."""

from __future__ import annotations

from weftline.cli.batch_options import BatchRequest, OnRay, Via
from weftline.engine.jobs.runners.opening import AnswererFactory, open_here
from weftline.engine.jobs.spec import JobSpec
from weftline.errors import InputError
from weftline.pipelines.check.problems import did_you_mean, listed
from weftline.pipelines.spec.loader import load_file


def opening_of(request: BatchRequest) -> AnswererFactory:
    """Decide how the rows of a request are answered; PipelineError lists every problem. Nothing is started yet."""
    spec = request.spec
    _check_outputs(spec)
    if isinstance(request.where, Via):
        return _of_server(spec, request.where)
    if request.where is not None:
        return _on_ray(spec, request.where)
    return open_here(spec.pipeline, outputs=spec.out.outputs, seed=spec.seed, block_rows=spec.block_rows)


def _check_outputs(spec: JobSpec) -> None:
    known = list(load_file(spec.pipeline).outputs)
    for name in spec.out.outputs or ():
        if name not in known:
            raise InputError(
                f"--output {name:.80}: the pipeline has no such output; {did_you_mean(name, known)} "
                f"it has {listed(known)}"
            )


def _of_server(spec: JobSpec, via: Via) -> AnswererFactory:
    from weftline.engine.jobs.runners.via_opening import open_via

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


def _on_ray(spec: JobSpec, ray: OnRay) -> AnswererFactory:
    """Return copies of what would run here, planned on the cluster: this machine may lack what they need.

    A job that began here can go on there, and the other way round.
    """
    from weftline.engine.jobs.ray.connecting import Need
    from weftline.engine.jobs.ray.opening import open_on_cluster

    return open_on_cluster(
        spec.pipeline,
        outputs=spec.out.outputs,
        seed=spec.seed,
        block_rows=spec.block_rows,
        replicas=ray.replicas,
        need=Need(gpus=ray.gpus_per_replica),
        address=ray.address,
    )
