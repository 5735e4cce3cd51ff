"""Set-up of the remote runner; checks everything before the first call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weftline.engine.client.options import ClientTls
from weftline.engine.jobs.runners.opening import PART_ROWS_SLOW, AnswererFactory
from weftline.engine.jobs.runners.repeatable import ROUNDING
from weftline.engine.jobs.runners.served_model import ports_of
from weftline.engine.jobs.runners.via import BLOCK_ROWS, ServerAnswerer
from weftline.pipelines.spec.graph import Pipeline
from weftline.pipelines.spec.loader import load_file

SERVER = "server"
"""The mode of such a job."""


def open_via(
    pipeline: Path | Pipeline,
    address: str,
    *,
    model: str = "",
    token: str | None = None,
    tls: bool | str | Path | ClientTls = False,
    insecure: bool = False,
    outputs: Sequence[str] | None = None,
    seed: int = 0,
    block_rows: int | None = None,
    in_flight: int | None = None,
) -> AnswererFactory:
    """Return the way through a server that serves this pipeline; opening it raises InputError when it does not.

    PipelineError has everything that is wrong with the file.

    address: 'host:port' of the server's gRPC door, or 'unix:/path' of its socket.
    model:   the name it is served under; '': the pipeline's own.
    The rest is as for ServerAnswerer.
    """
    pipeline = load_file(pipeline) if isinstance(pipeline, Path) else pipeline
    _, gives = ports_of(pipeline)
    rows = block_rows or BLOCK_ROWS
    wanted = tuple(outputs) if outputs is not None else tuple(gives)
    return AnswererFactory(
        SERVER, "", rows, PART_ROWS_SLOW, dict.fromkeys(wanted, ROUNDING),
        lambda progress: ServerAnswerer(
            address, model or pipeline.name, token=token, tls=tls, insecure=insecure, outputs=outputs,
            in_flight=in_flight, pipeline=pipeline, seed=seed, block_rows=rows,
        ),
    )  # fmt: skip
