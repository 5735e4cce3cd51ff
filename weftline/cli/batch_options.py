"""Validation of the options of `weftline batch`: reports all mistakes; pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from weftline.cli.remote import Remote
from weftline.engine.jobs.spec import DataSpec, ErrorsMax, JobSpec, OutSpec

ONE_FILE = (".parquet", ".jsonl", ".arrow", ".feather")
"""Endings of an output that is one file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """One use of `weftline batch`, as typed; what each means is in its help."""

    file: str
    extra: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    out: str | None = None
    format: str | None = None
    maps: tuple[str, ...] = ()
    id: str | None = None
    where: tuple[str, ...] = ()
    limit: int | None = None
    shuffle: int | None = None
    shard: str | None = None
    split: str | None = None
    storage: tuple[str, ...] = field(default=(), repr=False)
    out_format: str | None = None
    outputs: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    media: str = "files"
    part_rows: int | None = None
    block_rows: int | None = None
    errors_max: str | None = None
    restart: bool = False
    retry_errors: bool = False
    seed: int = 0
    via: str | None = None
    model: str | None = None
    token_file: Path | None = None
    tls: bool = False
    ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False
    engine: str = "local"
    replicas: int | None = None
    gpus_per_replica: float | None = None
    address: str | None = None
    dry_run: bool = False
    report: str | None = None
    no_report: bool = False
    as_json: bool = False
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class Via:
    """The server that answers: where it is, and what it calls the pipeline (None: by its own name)."""

    remote: Remote
    model: str | None = None


@dataclass(frozen=True, slots=True)
class OnRay:
    """The cluster that answers: copies of the pipeline, GPUs of each, and where the cluster is (None: started here)."""

    replicas: int = 1
    gpus_per_replica: float = 0.0
    address: str | None = None


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One use of `weftline batch`, understood.

    where:   who answers: a server, a cluster, or (None) an engine in this machine's processes.
    report:  where the report goes; None: nowhere.
    """

    spec: JobSpec
    where: Via | OnRay | None = None
    report: str | None = None
    dry_run: bool = False
    as_json: bool = False
    quiet: bool = False


def understood(typed: Typed) -> tuple[BatchRequest | None, Sequence[str]]:
    """Return what was asked for; or None, and every mistake as a sentence that names its option."""
    mistakes = [*_missing(typed), *_exclusions(typed)]
    maps = _pairs("--map", "INPUT=COLUMN", typed.maps, mistakes)
    storage = _pairs("--storage", "KEY=VALUE", typed.storage, mistakes)
    shard = _shard(typed.shard, mistakes)
    errors_max = _errors_max(typed.errors_max, mistakes)
    if mistakes:
        return None, mistakes
    data = DataSpec(
        typed.data, typed.format, maps, typed.id, typed.where, typed.shuffle, shard, typed.limit, typed.split, storage
    )
    out = OutSpec(
        typed.out or "",
        typed.out_format,
        typed.outputs or None,
        _kept(typed.keep),
        typed.media,
        typed.part_rows,
        storage,
    )
    spec = JobSpec(
        Path(typed.file),
        data,
        out,
        errors_max,
        typed.restart,
        typed.retry_errors,
        typed.seed,
        typed.block_rows,
    )
    report = None if typed.no_report else typed.report or report_place(out.out)
    return BatchRequest(spec, _where(typed), report, typed.dry_run, typed.as_json, typed.quiet), ()


def report_place(out: str) -> str:
    """Return where a job's report goes when nobody says: into the folder, or beside the one file."""
    if out.endswith(ONE_FILE):
        return out + ".report.html"
    return out.rstrip("/") + "/_report.html"


def _missing(typed: Typed) -> list[str]:
    found = []
    if not typed.data:
        found.append("--data: say where rows are: a file, a folder, a glob, a URL, hf:NAME, or - for standard input")
    if typed.data.count("-") > 1:
        found.append("--data -: standard input can be read once only")
    if not typed.out:
        found.append("--out: say where results go: a folder, or one file such as out.parquet")
    if typed.extra:
        words = " ".join(typed.extra[:3]) + (" ..." if len(typed.extra) > 3 else "")
        found.append(f"{words}: one pipeline FILE is expected; rows go with --data, a glob in quotes: --data 'rows/*'")
    if typed.report is not None and not typed.report.endswith((".html", ".htm")):
        found.append(f"--report {typed.report}: expected a name that ends in .html")
    return found


def _exclusions(typed: Typed) -> list[str]:
    """Return the options that exclude each other, and those that mean nothing without another."""
    pairs = (
        ("--restart", typed.restart, "--retry-errors", typed.retry_errors),
        ("--report", typed.report is not None, "--no-report", typed.no_report),
        ("--json", typed.as_json, "--dry-run", typed.dry_run),
        ("--via", typed.via is not None, "--engine ray", typed.engine == "ray"),
    )
    found = [f"{one} and {other} exclude each other" for one, wanted, other, too in pairs if wanted and too]
    for_server = {
        "--model": typed.model, "--token-file": typed.token_file, "--tls": typed.tls, "--ca": typed.ca,
        "--tls-cert": typed.tls_cert, "--tls-key": typed.tls_key, "--insecure": typed.insecure,
    }  # fmt: skip
    for_ray = {
        "--replicas": typed.replicas, "--gpus-per-replica": typed.gpus_per_replica, "--address": typed.address,
    }  # fmt: skip
    if typed.via is None:
        found += _idle(for_server, "--via HOST:PORT")
    if typed.engine != "ray":
        found += _idle(for_ray, "--engine ray")
    if {"none", "all"} & set(typed.keep) and len(typed.keep) > 1:
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


def _where(typed: Typed) -> Via | OnRay | None:
    if typed.via is not None:
        remote = Remote(typed.via, typed.token_file, typed.tls, typed.ca, typed.tls_cert, typed.tls_key, typed.insecure)
        return Via(remote, typed.model)
    if typed.engine == "ray":
        return OnRay(typed.replicas or 1, typed.gpus_per_replica or 0.0, typed.address)
    return None
