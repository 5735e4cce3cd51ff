"""Options that several commands share, and the output of generated text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weftline.engine.flags import Flag
from weftline.errors import WeftlineError

VERBOSE = Flag("--verbose", short="-v", about="Show INFO records of steps, and tracebacks of unexpected errors.")

PipelineFile = Annotated[str, Flag("FILE", about="The pipeline's YAML file.")]
PipelineFiles = Annotated[tuple[str, ...], Flag("FILE...", about="One or more pipeline files.")]
Gpus = Annotated[
    str | None,
    Flag(
        "--gpus",
        "N[:MEMORY[:MODEL]]",
        about="Plan for this machine with other GPUs, such as 2:141GiB or 2:141GiB:H200; 0 for none.",
    ),
]
Outputs = Annotated[
    tuple[str, ...],
    Flag("--output", "NAME", short="-o", about="Compute only this output, and the steps it needs; repeatable."),
]
NoImport = Annotated[
    bool, Flag("--no-import", about="Run no Python file that a pipeline names; its own nodes are problems then.")
]
OutputFile = Annotated[
    Path | None, Flag("--output", "OUT", short="-o", about="Write to this file instead of standard output.")
]
Verbose = Annotated[bool, VERBOSE]
Quiet = Annotated[bool, Flag("--quiet", short="-q", about="Print errors only: no progress, no tables of times.")]


def write_text(text: str, output: Path | None) -> None:
    """Print `text`, or write it to a file and print the file's name."""
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, "utf-8")
    except OSError as error:
        raise WeftlineError(f"cannot write {output}: {error.strerror}") from None
    typer.echo(f"wrote {output}", err=True)
