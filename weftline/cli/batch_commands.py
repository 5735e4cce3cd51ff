"""Command `weftline batch`: options, validation and help.

`BatchOptions` declares every option once: typer's parameters are generated from its fields.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from weftline.cli.remote import Remote
from weftline.engine.jobs.spec import DataSpec, ErrorsMax, JobSpec, OutSpec

ONE_FILE = (".parquet", ".jsonl", ".arrow", ".feather")
"""Suffixes of an output that is one file."""


class DataFormat(StrEnum):
    """Formats of the input."""

    parquet = "parquet"
    jsonl = "jsonl"
    csv = "csv"
    arrow = "arrow"
    files = "files"
    webdataset = "webdataset"
    delta = "delta"
    hf = "hf"


class OutFormat(StrEnum):
    """Formats of the output."""

    parquet = "parquet"
    jsonl = "jsonl"
    arrow = "arrow"
    hf = "hf"


class Media(StrEnum):
    """Storage of images and audio in the results."""

    files = "files"
    inline = "inline"


class Engine(StrEnum):
    """Engine that runs the pipeline."""

    local = "local"
    ray = "ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """The command line of `weftline batch`: parameters, types and help texts.

    extra: arguments beyond FILE.
    """

    file: Annotated[str, typer.Argument(metavar="FILE", help="The pipeline's YAML file.")]
    extra: tuple[str, ...] = ()
    data: Annotated[
        tuple[str, ...],
        typer.Option(
            metavar="INPUT",
            help="Input rows: a file, a folder, a quoted glob, a URL, hf:NAME, or - for standard input; repeatable.",
        ),
    ] = ()
    out: Annotated[
        str | None, typer.Option(metavar="OUTPUT", help="Output: a folder, or one file such as out.parquet.")
    ] = None
    format: Annotated[DataFormat | None, typer.Option(help="Format of INPUT; by default from its name.")] = None
    maps: Annotated[
        tuple[str, ...],
        typer.Option(
            "--map",
            metavar="INPUT=COLUMN",
            help="Column of a pipeline input, where the names differ; repeatable.",
        ),
    ] = ()
    id: Annotated[
        str | None, typer.Option("--id", metavar="COLUMN", help="Column with the row ids; FILE#ROW by default.")
    ] = None
    where: Annotated[
        tuple[str, ...],
        typer.Option(
            metavar="COND",
            help="Select rows that match this condition, such as \"lang == 'en'\"; repeatable, all must hold.",
        ),
    ] = ()
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of rows.")] = None
    shuffle: Annotated[int | None, typer.Option(metavar="SEED", min=0, help="Shuffle the rows with this seed.")] = None
    shard: Annotated[str | None, typer.Option(metavar="I/N", help="Process shard I of N only.")] = None
    split: Annotated[str | None, typer.Option(metavar="NAME", help="Split of a Hugging Face data set.")] = None
    separator: Annotated[
        str | None,
        typer.Option(metavar="SIGN", help="Separator of CSV, such as ';', '|' or tab; by default a comma."),
    ] = None
    table_version: Annotated[
        int | None, typer.Option("--table-version", metavar="N", min=0, help="Version of a Delta table.")
    ] = None
    storage: Annotated[
        tuple[str, ...],
        typer.Option(metavar="KEY=VALUE", help="fsspec option of the file system behind URLs; repeatable."),
    ] = field(default=(), repr=False)
    media_root: Annotated[
        tuple[str, ...],
        typer.Option(
            "--media-root",
            metavar="FOLDER",
            help="Folder or URL below which rows may name files, beside the data's own folder; repeatable.",
        ),
    ] = ()
    media_urls: Annotated[
        bool, typer.Option("--media-urls", help="Rows may name files by http and https URL on public addresses.")
    ] = False
    out_format: Annotated[
        OutFormat | None, typer.Option(help="Format of OUTPUT; by default from its name, else parquet.")
    ] = None
    outputs: Annotated[
        tuple[str, ...],
        typer.Option(
            "--output", "-o", metavar="NAME", help="Compute this output only, with the steps it needs; repeatable."
        ),
    ] = ()
    keep: Annotated[
        tuple[str, ...],
        typer.Option(
            metavar="COLUMN",
            help="Copy this input column to the output; repeatable. none: no column; all, the default: all but media.",
        ),
    ] = ()
    media: Annotated[Media, typer.Option(help="Store images and audio beside the table, or in it.")] = Media.files
    part_rows: Annotated[
        int | None, typer.Option(min=1, help="Rows per commit; chosen for the pipeline by default.")
    ] = None
    block_rows: Annotated[
        int | None, typer.Option(min=1, help="Rows per block; chosen for the pipeline by default.")
    ] = None
    errors_max: Annotated[
        str | None,
        typer.Option(metavar="N|P%", help="Stop above this number or share of error rows, such as 100 or 1%."),
    ] = None
    restart: Annotated[
        bool, typer.Option("--restart", help="Delete the results of an earlier run at OUTPUT, and start again.")
    ] = False
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Run only the error rows of a finished job again.")
    ] = False
    seed: Annotated[int, typer.Option(min=0, help="Base seed for steps that draw random numbers.")] = 0
    via: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Run the rows on this server, and load no model here."),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the model on the server; the pipeline's name by default."),
    ] = None
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", metavar="FILE", help="File that contains the access token only."),
    ] = None
    tls: Annotated[
        bool, typer.Option("--tls", help="Connect with TLS, with the certificate authorities of this machine.")
    ] = False
    ca: Annotated[
        Path | None, typer.Option(metavar="PEM", help="Connect with TLS, with this certificate authority.")
    ] = None
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", metavar="PEM", help="Client certificate, for servers that require one.")
    ] = None
    tls_key: Annotated[
        Path | None, typer.Option("--tls-key", metavar="PEM", help="Private key of the client certificate.")
    ] = None
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow the token to be sent to another machine without TLS.")
    ] = False
    engine: Annotated[Engine, typer.Option(help="Run on this machine, or on a Ray cluster.")] = Engine.local
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Ray: number of replicas of the pipeline; 1 by default.")
    ] = None
    gpus_per_replica: Annotated[float | None, typer.Option(min=0.0, help="Ray: GPUs per replica; 0 by default.")] = None
    address: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Ray: address of the cluster; by default a local one is started."),
    ] = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan, the columns and three results; write nothing.")
    ] = False
    report: Annotated[
        str | None, typer.Option(metavar="FILE.html", help="Path of the report; OUTPUT/_report.html by default.")
    ] = None
    no_report: Annotated[bool, typer.Option("--no-report", help="Write no report.")] = False
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the job's statistics as one JSON object on standard output.")
    ] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only: no progress and no summary.")] = False
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Show INFO records of steps, and tracebacks of unexpected errors."),
    ] = False


@dataclass(frozen=True, slots=True)
class ServerTarget:
    """A running server. model: its name there; None: the pipeline's name."""

    remote: Remote
    model: str | None = None


@dataclass(frozen=True, slots=True)
class RayTarget:
    """A Ray cluster. address: None starts a local one."""

    replicas: int = 1
    gpus_per_replica: float = 0.0
    address: str | None = None


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A parsed command line.

    where:  where the rows run: a server, a cluster, or (None) this machine.
    report: path of the report; None: no report.
    """

    spec: JobSpec
    where: ServerTarget | RayTarget | None = None
    report: str | None = None
    dry_run: bool = False
    as_json: bool = False
    quiet: bool = False


def parse(options: BatchOptions) -> tuple[BatchRequest | None, Sequence[str]]:
    """Validate the options; return the request, or None and one sentence for each mistake."""
    mistakes = [*_missing(options), *_exclusions(options)]
    maps = _pairs("--map", "INPUT=COLUMN", options.maps, mistakes)
    storage = _pairs("--storage", "KEY=VALUE", options.storage, mistakes)
    shard = _shard(options.shard, mistakes)
    errors_max = _errors_max(options.errors_max, mistakes)
    if mistakes:
        return None, mistakes
    data = DataSpec(
        options.data, options.format, maps, options.id, options.where, options.shuffle, shard, options.limit,
        options.split, storage, options.media_root, options.media_urls, options.separator, options.table_version,
    )  # fmt: skip
    out = OutSpec(
        options.out or "", options.out_format, options.outputs or None, _kept(options.keep), options.media,
        options.part_rows, storage,
    )  # fmt: skip
    spec = JobSpec(
        Path(options.file), data, out, errors_max, options.restart, options.retry_errors, options.seed,
        options.block_rows,
    )  # fmt: skip
    report = None if options.no_report else options.report or report_place(out.out)
    return BatchRequest(spec, _where(options), report, options.dry_run, options.as_json, options.quiet), ()


def report_place(out: str) -> str:
    """Return the default path of the report: in the output folder, or beside the output file."""
    if out.endswith(ONE_FILE):
        return out + ".report.html"
    return out.rstrip("/") + "/_report.html"


def _missing(options: BatchOptions) -> list[str]:
    found = []
    if not options.data:
        found.append("--data: missing; name a file, a folder, a glob, a URL, hf:NAME, or - for standard input")
    if options.data.count("-") > 1:
        found.append("--data -: standard input can be read only once")
    if not options.out:
        found.append("--out: missing; name a folder, or one file such as out.parquet")
    if options.extra:
        words = " ".join(options.extra[:3]) + (" ..." if len(options.extra) > 3 else "")
        found.append(f"{words}: one pipeline FILE is expected; pass rows with --data, globs in quotes: --data 'rows/*'")
    if options.report is not None and not options.report.endswith((".html", ".htm")):
        found.append(f"--report {options.report}: expected a name that ends in .html")
    return found


def _exclusions(options: BatchOptions) -> list[str]:
    """Return one sentence for each conflicting option and each option without its prerequisite."""
    pairs = (
        ("--restart", options.restart, "--retry-errors", options.retry_errors),
        ("--report", options.report is not None, "--no-report", options.no_report),
        ("--json", options.as_json, "--dry-run", options.dry_run),
        ("--via", options.via is not None, "--engine ray", options.engine == "ray"),
    )
    found = [f"{one} and {other} exclude each other" for one, wanted, other, too in pairs if wanted and too]
    for_server = {
        "--model": options.model, "--token-file": options.token_file, "--tls": options.tls, "--ca": options.ca,
        "--tls-cert": options.tls_cert, "--tls-key": options.tls_key, "--insecure": options.insecure,
    }  # fmt: skip
    for_ray = {
        "--replicas": options.replicas, "--gpus-per-replica": options.gpus_per_replica, "--address": options.address,
    }  # fmt: skip
    if options.via is None:
        found += _idle(for_server, "--via HOST:PORT")
    if options.engine != "ray":
        found += _idle(for_ray, "--engine ray")
    if {"none", "all"} & set(options.keep) and len(options.keep) > 1:
        found.append("--keep: none and all stand alone")
    return found


def _idle(options: Mapping[str, object], needed: str) -> list[str]:
    return [f"{name} needs {needed}" for name, value in options.items() if value is not None and value is not False]


def _pairs(option: str, form: str, given: Sequence[str], mistakes: list[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for one in given:
        key, equals, value = one.partition("=")
        if not key or not equals or not value:
            mistakes.append(f"{option} {one:.80}: expected {form}")
        elif key in pairs:
            mistakes.append(f"{option} {key}: given twice")
        else:
            pairs[key] = value
    return pairs


def _shard(text: str | None, mistakes: list[str]) -> tuple[int, int] | None:
    if text is None:
        return None
    place, _, count = text.partition("/")
    if place.isdecimal() and count.isdecimal() and 1 <= int(place) <= int(count):
        return int(place), int(count)
    mistakes.append(f"--shard {text:.80}: expected I/N with I from 1 to N, such as 2/8")
    return None


def _errors_max(text: str | None, mistakes: list[str]) -> ErrorsMax:
    if text is None:
        return ErrorsMax()
    if text.isdecimal():
        return ErrorsMax(rows=int(text))
    try:
        percent = float(text.removesuffix("%")) if text.endswith("%") else math.nan
    except ValueError:
        percent = math.nan
    if 0 <= percent <= 100:
        return ErrorsMax(share=percent / 100)
    mistakes.append(f"--errors-max {text:.80}: expected a number of rows such as 100, or a share such as 1%")
    return ErrorsMax()


def _kept(given: Sequence[str]) -> tuple[str, ...] | None:
    if not given or tuple(given) == ("all",):
        return None
    return () if tuple(given) == ("none",) else tuple(given)


def _where(options: BatchOptions) -> ServerTarget | RayTarget | None:
    if options.via is not None:
        remote = Remote(
            options.via,
            options.token_file,
            options.tls,
            options.ca,
            options.tls_cert,
            options.tls_key,
            options.insecure,
        )
        return ServerTarget(remote, options.model)
    if options.engine == "ray":
        return RayTarget(options.replicas or 1, options.gpus_per_replica or 0.0, options.address)
    return None


def batch(context: typer.Context, **given: Any) -> None:
    """Run a pipeline over a data set. The same command again resumes an interrupted run.

    Results are committed in parts, every row exactly once. Rows that fail are stored apart, with the reason. Ctrl-C
    stops the job after committing complete parts; a second Ctrl-C stops it at once. Standard output is the path of the
    results. The exit code is 0 when every row has a result, and 5 when the job finished with error rows.

    \b
    Examples:
      weftline batch assistant.yaml --data questions.jsonl --out answers --dry-run
      weftline batch assistant.yaml --data 'rows/*.parquet' --map question=text --id key --out answers.parquet
      weftline batch detect.yaml --data photos/ --out found --errors-max 1% --keep none
      weftline batch assistant.yaml --data s3://bucket/rows/ --shard 2/8 --out s3://bucket/answers-2
      weftline batch assistant.yaml --data questions.jsonl --out answers --via localhost:8001
    """
    from weftline.cli.batch import run_batch

    values: dict[str, Any] = {
        name: tuple(value or ()) if name in _REPEATABLE else value for name, value in given.items()
    }
    request, mistakes = parse(BatchOptions(extra=tuple(context.args), **values))
    if request is None:
        raise typer.BadParameter("\n  ".join(mistakes))
    if code := run_batch(request, sys.stdout, sys.stderr):
        raise typer.Exit(code)


_TYPES = {
    name: hint
    for name, hint in get_type_hints(BatchOptions, include_extras=True).items()
    if get_origin(hint) is Annotated
}
_REPEATABLE = {name for name, hint in _TYPES.items() if get_origin(get_args(hint)[0]) is tuple}


def _parameters() -> Iterator[inspect.Parameter]:
    """Yield the parameters of the command: the context, and one for each field with an option."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    yield inspect.Parameter("context", keyword, annotation=typer.Context)
    for one in fields(BatchOptions):
        if one.name not in _TYPES:
            continue
        annotation, default = _TYPES[one.name], one.default
        if one.name in _REPEATABLE:  # typer supports lists only
            annotation, default = Annotated[list[str] | None, get_args(annotation)[1]], None
        default = inspect.Parameter.empty if default is MISSING else default
        yield inspect.Parameter(one.name, keyword, default=default, annotation=annotation)


_PARAMETERS = tuple(_parameters())
batch.__signature__ = inspect.Signature(_PARAMETERS)  # type: ignore[attr-defined]  # read by typer
batch.__annotations__ = {one.name: one.annotation for one in _PARAMETERS}
