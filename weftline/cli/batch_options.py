"""Options of `weftline batch`, and their conflicts. Those of the job itself are in `weftline.engine.jobs.spec`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

import typer

from weftline.cli.options import Cluster, Verbose, needing, unexpected
from weftline.cli.remote import Remote
from weftline.engine.jobs.spec import JobSpec

ONE_FILE = (".parquet", ".jsonl", ".arrow", ".feather")
"""Suffixes of an output that is one file."""


@dataclass(frozen=True, slots=True)
class Via(Remote):
    """A running server that runs the rows. url: '' for none."""

    url: Annotated[
        str, typer.Option("--via", metavar="HOST:PORT", help="Run the rows on this server, and load no model here.")
    ] = ""
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the model on the server; the pipeline's name by default."),
    ] = None

    def mistakes(self) -> Iterator[str]:
        """Yield the options that need a server."""
        if not self.url:
            yield from needing(self, "--via HOST:PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """Options of `weftline batch`.

    extra:  arguments beyond FILE.
    report: path of the report; None: the default one.
    """

    job: JobSpec
    extra: tuple[str, ...] = ()
    server: Via = field(default_factory=Via)
    cluster: Cluster = field(default_factory=Cluster)
    dry_run: Annotated[bool, typer.Option(help="Show the plan, the columns and three results; write nothing.")] = False
    report: Annotated[
        str | None, typer.Option(metavar="FILE.html", help="Path of the report; OUTPUT/_report.html by default.")
    ] = None
    no_report: Annotated[bool, typer.Option(help="Write no report.")] = False
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the job's statistics as one JSON object on standard output.")
    ] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only: no progress and no summary.")] = False
    verbose: Verbose = False

    @property
    def report_place(self) -> str | None:
        """Path of the report: by default in the output folder, or beside the output file. None: no report."""
        out = self.job.out.out
        default = f"{out}.report.html" if out.endswith(ONE_FILE) else f"{out.rstrip('/')}/_report.html"
        return None if self.no_report else self.report or default

    def mistakes(self) -> Iterator[str]:
        """Yield a sentence for each missing, unexpected or conflicting option."""
        data = self.job.data.data
        if not data:
            yield "--data: missing; name a file, a folder, a glob, a URL, hf:NAME, or - for standard input"
        if data.count("-") > 1:
            yield "--data -: standard input can be read only once"
        if not self.job.out.out:
            yield "--out: missing; name a folder, or one file such as out.parquet"
        yield from unexpected(self.extra, "pass rows with --data, globs in quotes: --data 'rows/*'")
        if self.report is not None and not self.report.endswith((".html", ".htm")):
            yield f"--report {self.report}: expected a name that ends in .html"
        pairs = (
            ("--restart", self.job.restart, "--retry-errors", self.job.retry_errors),
            ("--report", self.report is not None, "--no-report", self.no_report),
            ("--json", self.as_json, "--dry-run", self.dry_run),
            ("--via", bool(self.server.url), "--engine ray", self.cluster.engine == "ray"),
        )
        yield from (f"{one} and {other} exclude each other" for one, wanted, other, too in pairs if wanted and too)
