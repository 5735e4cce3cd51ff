"""Command line: the table of commands, and how the process ends.

A module has the options, the help and the implementation of a command. It is imported when its command runs, so that
`--help` and shell completion answer at once and `check` works where no framework is installed. Results go to standard
output, everything else to standard error.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from weftline.cli.exit import exit_codes, open_closed_streams, run_command

COMMANDS = {
    "check": ("weftline.cli.check:check", "List every problem of pipeline files."),
    "plan": ("weftline.cli.plan:plan", "Show which steps would run, and where."),
    "fetch": ("weftline.cli.fetch:fetch", "Download the models that pipeline files name by URL."),
    "run": ("weftline.cli.run:run", "Run one request through a pipeline."),
    "chat": ("weftline.cli.chat:chat", "Chat with a pipeline's language model."),
    "bench": ("weftline.cli.bench:bench", "Measure a pipeline under load."),
    "nodes": ("weftline.cli.nodes:nodes", "List nodes, or show one."),
    "schema": ("weftline.cli.schema:schema", "Print the JSON Schema of pipeline files."),
    "profile": ("weftline.cli.profile:profile", "Measure the time and memory of each step, for later plans."),
    "batch": ("weftline.cli.batch:batch", "Run a pipeline over a data set."),
    "serve": ("weftline.cli.serve:serve", "Serve pipelines over gRPC and HTTP."),
    "token": ("weftline.cli.serve:token", "Create a token for a client of a server."),
    "status": ("weftline.cli.remote:status", "Show the models of a running server."),
    "load": ("weftline.cli.remote:load", "Load a pipeline on a running server."),
    "unload": ("weftline.cli.remote:unload", "Unload a pipeline of a running server."),
}
"""Function and one-line help of each command, in the order of `--help`."""


def command(name: str) -> Any:
    """Import a command and return it with its options, as a click command."""
    from weftline.cli.command import as_command, takes_extra

    home, about = COMMANDS[name]
    module, _, name_there = home.partition(":")
    run = getattr(import_module(module), name_there)
    alone = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
    settings = {"allow_extra_args": takes_extra(run)}
    alone.command(name, short_help=about, context_settings=settings)(as_command(run))
    return typer.main.get_command(alone)


class CommandGroup(TyperGroup):
    """Group whose commands are placeholders, imported when one of them is invoked."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, placeholder, rest = super().resolve_command(ctx, args)
        return (name, command(name), rest) if name in COMMANDS else (name, placeholder, rest)


def _epilog() -> str:
    return "\b\nExit codes:\n" + "\n".join(f"  {code:>3}  {meaning}" for code, meaning in exit_codes().items())


app = typer.Typer(
    name="weftline",
    cls=CommandGroup,
    help="Check, plan, run, measure and serve pipelines of models.",
    epilog=_epilog(),
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        import weftline

        typer.echo(f"weftline {weftline.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show INFO records of steps, and tracebacks of unexpected errors.")
    ] = False,
) -> None:
    """Check, plan, run, measure and serve pipelines of models."""


def _placeholder() -> None:
    """Do nothing: `CommandGroup` replaces this command when it is invoked."""


for _name, (_, _about) in COMMANDS.items():
    app.command(_name, short_help=_about)(_placeholder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; no exception leaves it."""
    open_closed_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    verbose = not {"--verbose", "-v"}.isdisjoint(words)
    if verbose:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    return run_command(lambda: _dispatch(words), verbose=verbose)


def _dispatch(arguments: list[str]) -> int:
    """Return the exit code of the command; usage errors are printed by typer."""
    try:
        typer.main.get_command(app)(args=arguments, prog_name="weftline")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return 0
