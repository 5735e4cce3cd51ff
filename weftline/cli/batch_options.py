"""Options of `weftline batch`, and their conflicts. Those of the job itself are in `weftline.engine.jobs.spec`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from weftline.cli.command import needing, unexpected
from weftline.cli.options import Verbose
from weftline.cli.remote import Cluster, Remote
from weftline.engine.flags import Flag
from weftline.engine.jobs.spec import JobSpec

ONE_FILE = (".parquet", ".jsonl", ".arrow", ".feather")
"""Suffixes of an output that is one file."""


@dataclass(frozen=True, slots=True)
class Via(Remote):
    """A running server that runs the rows. url: '' for none."""

    url: Annotated[str, Flag("--via", "HOST:PORT")] = ""
    """Run the rows on this server, and load no model here."""

    model: Annotated[str | None, Flag("--model", "NAME")] = None
    """Name of the model on the server; the pipeline's name by default."""

    def mistakes(self) -> Iterator[str]:
        """Yield the options that need a server."""
        if not self.url:
            yield from needing(self, "--via HOST:PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """Options of `weftline batch`. extra: arguments beyond FILE."""

    job: JobSpec
    extra: tuple[str, ...] = ()
    server: Via = field(default_factory=Via)
    cluster: Cluster = field(default_factory=Cluster)
    dry_run: Annotated[bool, Flag("--dry-run")] = False
    """Show the plan, the columns and three results; write nothing."""

    report: Annotated[str | None, Flag("--report", "FILE.html")] = None
    """Path of the report; OUTPUT/_report.html by default."""

    no_report: Annotated[bool, Flag("--no-report")] = False
    """Write no report."""

    as_json: Annotated[bool, Flag("--json")] = False
    """Print the job's statistics as one JSON object on standard output."""

    quiet: Annotated[bool, Flag("--quiet", short="-q")] = False
    """Print errors only: no progress and no summary."""

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
