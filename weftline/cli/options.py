"""Options that several commands share, and the output of generated text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weftline.errors import WeftlineError

PipelineFile = Annotated[str, typer.Argument(metavar="FILE", help="The pipeline's YAML file.")]
Gpus = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        metavar="N[:MEMORY[:MODEL]]",
        help="Plan for this machine with other GPUs, such as 2:141GiB or 2:141GiB:H200; 0 for none.",
    ),
]
Outputs = Annotated[
    list[str] | None,
    typer.Option(
        "--output", "-o", metavar="NAME", help="Compute only this output, and the steps it needs; repeatable."
    ),
]
NoImport = Annotated[
    bool,
    typer.Option("--no-import", help="Run no Python file that a pipeline names; its own nodes are problems then."),
]
OutputFile = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="OUT", help="Write to this file instead of standard output.")
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Show INFO records of steps, and tracebacks of unexpected errors."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only: no progress, no tables of times.")]


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
