"""Exit codes and error messages of the command line.

An exception of a step's code comes with its traceback; other errors come without one."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from weftline import errors

EXIT_FAILED = errors.WeftlineError.exit_code
"""Also used when the reader of the output has closed it, as `head` does; typer exits with it too."""

EXIT_UNEXPECTED = 70
"""An unexpected error: EX_SOFTWARE of sysexits.h."""

EXIT_INTERRUPTED = 130
"""Ctrl-C: 128 + SIGINT, as shells have it."""


def exit_codes() -> dict[int, str]:
    """Return every exit code with its meaning, from the error classes."""
    codes = {
        0: "success",
        EXIT_FAILED: "any other error with a message; or the reader of the output closed it",
        EXIT_UNEXPECTED: "an unexpected error, which is a bug",
        EXIT_INTERRUPTED: "interrupted with Ctrl-C, or cancelled; everything is closed",
    }
    kinds: list[type[errors.WeftlineError]] = [errors.PipelineError, *errors.BY_NAME.values(), errors.AccessDenied]
    kinds += [errors.JobChanged, errors.TooManyErrors, errors.OutputFailed]
    for kind in kinds:
        codes.setdefault(kind.exit_code, _first_clause(kind.__doc__ or ""))
    codes[errors.PipelineError.exit_code] += "; or the command line is wrong"
    return dict(sorted(codes.items()))


def _first_clause(doc: str) -> str:
    clause = re.split(r"[;.](\s|$)", doc, maxsplit=1)[0]
    return clause[:1].lower() + clause[1:]


def run_command(command: Callable[[], int], *, verbose: bool) -> int:
    """Run the command and return its exit code; an exception is printed and mapped to one.

    verbose: print the traceback of an unexpected error.
    """
    try:
        code = command()
        sys.stdout.flush()
        return code
    except errors.PipelineError as error:
        return _print_error(str(error), error.exit_code)
    except errors.WeftlineError as error:
        return _print_error("\n".join(filter(None, (errors.traceback_of(error), f"error: {error}"))), error.exit_code)
    except KeyboardInterrupt:
        return _print_error("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        return _discard_output()
    except Exception as error:
        if verbose:
            traceback.print_exc()
        what = " ".join(f"{type(error).__name__}: {error}".split())
        hint = "" if verbose else "; run it again with --verbose for the traceback"
        return _print_error(f"unexpected error: {what:.300}{hint}", EXIT_UNEXPECTED)


def open_closed_streams() -> None:
    """Open /dev/null for standard streams that were closed at start, as some services do."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the lowest free descriptor is taken, so that no socket gets its number
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115


def _print_error(message: str, code: int) -> int:
    from weftline.cli.show import printable  # imports numpy

    try:
        print(printable(message), file=sys.stderr, flush=True)
    except OSError:  # standard error is closed
        pass
    return code


def _discard_output() -> int:
    """Redirect buffered output to /dev/null, so that the interpreter does not fail on it at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return EXIT_FAILED
