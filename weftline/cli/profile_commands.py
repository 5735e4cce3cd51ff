"""Command `weftline profile`: options and help. `cli_profile` implements it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def add_to(app: typer.Typer) -> None:
    """Give a command line the command of this file."""
    app.command(short_help="Measure what each step takes, for later plans.")(profile)


def profile(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The pipeline's YAML file.")],
    steps: Annotated[
        list[str] | None,
        typer.Option("--steps", metavar="NAME", help="Only this step; repeatable. What is known of others is kept."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Write here instead of NAME.profile.json beside the pipeline.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=3600.0, help="About how long to measure each step, in seconds.")
    ] = 5.0,
    seed: Annotated[int, typer.Option(min=0, help="For inputs, which are made up.")] = 0,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Show INFO records of steps, and tracebacks of unexpected errors."),
    ] = False,
) -> None:
    """Open each step by itself, call it with 1, 2, 4 and up to items_max made-up inputs, and write what that took.

    Plans read the file from then on: memory that was measured need not be stated. Measure on a machine, and a GPU, that
    nothing else uses meanwhile.

    \b
    Examples:
      weftline profile assistant.yaml
      weftline profile assistant.yaml --steps see --seconds 20
    """
    from weftline.cli.profile import Profiling, run_profile

    run_profile(Profiling(file, tuple(steps or ()), out, seconds, seed), sys.stdout, sys.stderr)
