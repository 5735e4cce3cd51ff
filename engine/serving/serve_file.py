"""Serve files and command-line options, merged and checked before a server starts.

    config, plans = assemble(["ocr.yaml"], "serve.yaml", Flags(http_port=8000))
    config.grpc.port

Keys, defaults and bounds are in `config.py`. `assemble` checks all that needs no running process, pipelines included,
and reports all problems at once. Relative paths in a file are relative to its folder.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from weftline.engine.machine import this_machine
from weftline.engine.serving.config import (
    COLLECTOR_PATTERN,
    GROUP_PATTERN,
    HOST_PATTERN,
    MODEL_PATTERN,
    SECTIONS,
    GrpcConfig,
    HttpConfig,
    Logs,
    ServeConfig,
    ServedPipeline,
    Tls,
)
from weftline.errors import InputError, PipelineError, Problem
from weftline.pipelines.check.problems import did_you_mean, from_validation, listed
from weftline.pipelines.placement.place import Machine
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.reservations import JointPlan, Owner, planner
from weftline.pipelines.spec.document import Document, hide_secrets, read_file
from weftline.pipelines.spec.graph import Pipeline
from weftline.pipelines.spec.loader import line_of, load_file
from weftline.pipelines.spec.schema import NAME_PATTERN
from weftline.pipelines.spec.single_step import alone

COMMAND_LINE = "the command line"
"""File name in problems of command-line options."""

_Value = TypeVar("_Value", GrpcConfig, HttpConfig, Logs, ServeConfig)

_SCHEMA = TypeAdapter(ServeConfig)

_EXPECTED = {
    MODEL_PATTERN: "1 to 128 letters, digits, '.', '_' and '-', not starting with a dot",
    NAME_PATTERN: "a step's name",
    HOST_PATTERN: "an address, such as 127.0.0.1, :: or a host name",
    GROUP_PATTERN: "a group's name",
    COLLECTOR_PATTERN: "http://HOST:PORT or https://HOST:PORT, or '' to disable",
}
"""Descriptions of regular expressions, for error messages."""


@dataclass(frozen=True, slots=True)
class ServeFile:
    """A parsed serve file.

    path:  as the user wrote it; '' without a file.
    lines: the 1-based line of each key, by dotted path.
    """

    config: ServeConfig = field(default_factory=lambda: ServeConfig({}))
    path: str = ""
    lines: Mapping[str, int] = field(default_factory=dict)

    def problem(self, key: str, found: str, expected: str = "", fix: str = "") -> Problem:
        """Return a problem of a key with its line; without that key, one of the command line."""
        if key not in self.lines:
            return _flag_problem(key, found, expected, fix)
        return Problem(key, found, expected, fix, line_of(key, self.lines), self.path)


def read_serve_file(path: str | Path) -> ServeFile:
    """Read the serve file at `path`; PipelineError lists every problem in it."""
    return parse_serve_file(read_file(path), str(path), Path(path).parent)


def parse_serve_file(document: Document, path: str, folder: Path) -> ServeFile:
    """Validate a document as a serve file; PipelineError lists every problem in it.

    path:   its name in problems.
    folder: folder of its relative paths.
    """
    try:
        if not isinstance(document.value, Mapping):
            found = "an empty file" if document.value is None else "not a mapping"
            raise PipelineError([*document.problems, Problem("", found, "a mapping with `pipelines:`", file=path)])
        config = _SCHEMA.validate_python(document.value, context=folder)
    except ValidationError as error:
        wrong = [_readable(one) for one in from_validation(error, document.value, "", _known_keys)]
        fresh = [one for one in wrong if one.path not in document.unread]
        placed = [replace(one, file=path, line=line_of(one.path, document.lines)) for one in fresh]
        raise PipelineError(hide_secrets(one, document.secrets) for one in [*document.problems, *placed]) from None
    if document.problems:
        raise PipelineError(document.problems)
    return ServeFile(config, path, document.lines)


def is_serve_file(document: Document) -> bool:
    """Return True for a serve file, False for a pipeline file."""
    return isinstance(document.value, Mapping) and "pipelines" in document.value and "steps" not in document.value


def to_text(config: ServeConfig) -> str:
    """Write a configuration as a serve file, defaults included."""
    return str(yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True, default_flow_style=None, width=100))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: _plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def _known_keys(loc: tuple[str | int, ...]) -> Iterable[str]:
    """Return the keys allowed in the mapping at `loc`."""
    return (one.name for one in dataclasses.fields(SECTIONS[str(loc[0])] if loc else ServeConfig))


def _readable(problem: Problem) -> Problem:
    """Replace a regular expression in a problem by its description."""
    expected = next((text for pattern, text in _EXPECTED.items() if pattern in problem.expected), problem.expected)
    return replace(problem, expected=expected)


@dataclass(frozen=True, slots=True)
class Flags:
    """Options of the command line; None, or empty: not set.

    expose: `step`, or `pipeline.step` where several are served.
    """

    host: str | None = None
    port: int | None = None
    http_port: int | None = None
    socket: Path | None = None
    expose: tuple[str, ...] = ()
    tokens: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    client_ca: Path | None = None
    insecure: bool = False
    shared_memory: bool = False
    processes: int | None = None
    grace_s: float | None = None
    log_format: str | None = None
    log_requests: bool = False
    otlp: str | None = None
    verbose: bool = False


def assemble(
    files: Sequence[str], config: str | None, flags: Flags, machine: Machine | None = None
) -> tuple[ServeConfig, Mapping[str, Plan]]:
    """Return the configuration and the plans of its pipelines; PipelineError lists every problem.

    Pipelines that are loaded at the start, and their exposed steps, are planned jointly: GPU memory that one reserves
    is not free for the next, and the rest is divided.

    files:   pipeline files, and at most one serve file, which is one with `pipelines:`.
    config:  a file that must be a serve file; None: there is none.
    machine: machine to plan for; this one when left out.
    """
    machine = machine or this_machine()
    serve_file, pipelines = _read_all(files, config)
    graphs, problems = _file_graphs(serve_file)
    named, more = _command_line_graphs(pipelines, serve_file)
    problems += more
    graphs |= {name: graph for name, (_, graph) in named.items()}
    own = {name: ServedPipeline(Path(file)) for name, (file, _) in named.items()}
    merged = replace(serve_file.config, pipelines={**serve_file.config.pipelines, **own})
    conflicts: list[Problem] = []
    try:
        merged = merge(merged, flags)
    except PipelineError as error:
        conflicts = [*error.problems]
    plans, not_alone, more = _plans(merged, graphs, machine)
    problems += more
    problems += conflicts or [
        *_process_problems(merged, serve_file, flags),
        *_expose_problems(merged, serve_file, plans, not_alone),
        *_missing_files(merged, serve_file, flags),
    ]
    if problems:
        raise PipelineError(problems)
    return merged, plans


def merge(config: ServeConfig, flags: Flags) -> ServeConfig:
    """Override a configuration by options of the command line; PipelineError for options that do not fit it."""
    grpc, http, logs = config.grpc, config.http, config.logs
    grpc = _override(grpc, host=flags.host, port=flags.port, socket=flags.socket, processes=flags.processes)
    if flags.http_port is not None or http is not None:
        http = _override(http or HttpConfig(), host=flags.host, port=flags.http_port)
    logs = _override(logs, format=flags.log_format, requests=flags.log_requests or None)
    merged = replace(
        config,
        pipelines=_exposing(config.pipelines, flags.expose),
        grpc=grpc,
        http=http,
        tls=_merged_tls(config.tls, flags),
        logs=replace(logs, level="debug") if flags.verbose else logs,
        insecure=config.insecure or flags.insecure,
        shared_memory=config.shared_memory or flags.shared_memory,
    )
    return _override(merged, tokens=flags.tokens, grace_s=flags.grace_s, otlp=flags.otlp)


def _override(value: _Value, **changes: Any) -> _Value:
    """Replace the fields whose new value is not None."""
    return replace(value, **{name: new for name, new in changes.items() if new is not None})


def _merged_tls(tls: Tls | None, flags: Flags) -> Tls | None:
    if not (flags.tls_cert or flags.tls_key or flags.client_ca):
        return tls
    cert, key = flags.tls_cert or (tls and tls.certificate), flags.tls_key or (tls and tls.key)
    if not cert or not key:
        missing = "--tls-key" if cert else "--tls-cert"
        raise PipelineError([_flag_problem(missing, "missing", "--tls-cert and --tls-key, each a PEM file")])
    return Tls(cert, key, flags.client_ca or (tls.client_ca if tls else None))


def _exposing(pipelines: Mapping[str, ServedPipeline], expose: Sequence[str]) -> Mapping[str, ServedPipeline]:
    found = dict(pipelines)
    for one in expose:
        pipeline, _, step = one.rpartition(".")
        if not pipeline and len(found) == 1:
            pipeline = next(iter(found))
        if pipeline not in found:
            known = f"PIPELINE.STEP of {listed(found)}"
            raise PipelineError([_flag_problem("--expose", one[:128], known, did_you_mean(pipeline, found))])
        exposed = dict.fromkeys((*found[pipeline].expose, step))
        found[pipeline] = replace(found[pipeline], expose=tuple(exposed))
    return found


def _read_all(files: Sequence[str], config: str | None) -> tuple[ServeFile, list[str]]:
    """Return the serve file and the paths of pipeline files; PipelineError when a file cannot be read."""
    problems: list[Problem] = []
    pipelines: list[str] = []
    serve_files = [config] if config is not None else []
    for file in files:
        try:
            (serve_files if is_serve_file(read_file(file)) else pipelines).append(file)
        except PipelineError as error:
            problems += error.problems
    found = ServeFile()
    if len(serve_files) > 1:
        found_many = f"{len(serve_files)} serve files: {listed(serve_files)}"
        problems.append(_flag_problem("", found_many, "one", "put them into one"))
    elif serve_files:
        try:
            found = read_serve_file(serve_files[0])
        except PipelineError as error:
            problems += error.problems
    if problems:
        raise PipelineError(problems)
    return found, pipelines


def _file_graphs(serve_file: ServeFile) -> tuple[dict[str, Pipeline], list[Problem]]:
    """Return a serve file's pipelines by name, and the problems of those that are loaded at the start."""
    found: dict[str, Pipeline] = {}
    problems: list[Problem] = []
    for name, one in serve_file.config.pipelines.items():
        if not one.file.is_file():
            if one.load:
                fix = "give the path of a pipeline's YAML file, relative to this file's folder"
                problems.append(serve_file.problem(f"pipelines.{name}", f"there is no file {one.file}", fix=fix))
            continue
        try:
            found[name] = load_file(str(one.file))
        except PipelineError as error:
            problems += error.problems if one.load else ()
    return found, problems


def _command_line_graphs(
    files: Sequence[str], serve_file: ServeFile
) -> tuple[dict[str, tuple[str, Pipeline]], list[Problem]]:
    """Return the pipelines on the command line with their files, by their own names, and their problems."""
    found: dict[str, tuple[str, Pipeline]] = {}
    problems: list[Problem] = []
    for file in files:
        try:
            pipeline = load_file(file)
        except PipelineError as error:
            problems += error.problems
            continue
        if pipeline.name in found or pipeline.name in serve_file.config.pipelines:
            fix = "give each a name of its own under `pipelines:` of a serve file"
            problems.append(Problem("name", f"{pipeline.name} is served already", fix=fix, file=file))
        found.setdefault(pipeline.name, (file, pipeline))
    return found, problems


def _plans(
    config: ServeConfig, graphs: Mapping[str, Pipeline], machine: Machine
) -> tuple[dict[str, Plan], dict[str, Problem], list[Problem]]:
    """Return plans by name, problems of exposed steps that cannot be models (`pipeline.step`), and all others.

    A pipeline that is not loaded at the start is planned for an idle machine.
    """
    joint, numbers, plans = JointPlan(machine), itertools.count(1), dict[str, Plan]()
    not_alone: dict[str, Problem] = {}
    problems: list[Problem] = []

    def plan(name: str, pipeline: Pipeline, load: bool) -> Plan:
        make = planner(pipeline)
        return joint.add(Owner(name, next(numbers)), make) if load else make(machine)

    for name, one in config.pipelines.items():
        try:
            if name in graphs:
                plans[name] = plan(name, graphs[name], one.load)
        except PipelineError as error:
            problems += error.problems if one.load else ()
        known = {step.name for step in plans[name].steps} if name in plans else ()
        for step in (step for step in one.expose if step in known):
            try:
                plan(f"{name}.{step}", alone(graphs[name], step), one.load)
            except PipelineError as error:
                not_alone[f"{name}.{step}"] = error.problems[0]
            except InputError as error:
                not_alone[f"{name}.{step}"] = Problem("", str(error))
    try:
        plans |= {owner.name: made for owner, made in joint.plans().items() if owner.name in plans}
    except PipelineError as error:
        problems += error.problems
    return plans, not_alone, problems


def _process_problems(config: ServeConfig, serve_file: ServeFile, flags: Flags) -> Iterator[Problem]:
    """Yield conflicts between pipelines, processes, shared memory and the Unix socket."""
    processes = config.grpc.processes
    if not config.pipelines:
        yield _flag_problem("", "no pipeline", fix="name a pipeline file, or a serve file with `pipelines:`")
    if config.shared_memory and processes > 1:
        found = f"regions are known to the process that a client reached, and there are {processes}"
        expected = "grpc.processes 0 or 1 beside it"
        if flags.shared_memory:
            yield _flag_problem("--shared-memory", found, expected)
        else:
            yield serve_file.problem("shared_memory", found, expected)
    if config.grpc.socket is not None and processes > 1:
        found = f"a Unix socket belongs to one process, and there are {processes}"
        expected = "0 or 1 beside grpc.socket"
        if flags.processes is not None:
            yield _flag_problem("--processes", found, expected)
        else:
            yield serve_file.problem("grpc.processes", found, expected)
    if config.grpc.socket_group is not None and config.grpc.socket is None:
        fix = "set grpc.socket (--socket), or leave the group out"
        yield serve_file.problem("grpc.socket_group", "a group for a Unix socket, and there is none", fix=fix)


def _expose_problems(
    config: ServeConfig, serve_file: ServeFile, plans: Mapping[str, Plan], not_alone: Mapping[str, Problem]
) -> Iterator[Problem]:
    for name, one in config.pipelines.items():
        steps = [step.name for step in plans[name].steps] if name in plans else list(one.expose)
        key = f"pipelines.{name}.expose"
        for step in one.expose:
            if step not in steps:
                fix = did_you_mean(step, steps)
                yield serve_file.problem(key, f"no step is called {step:.80}", f"one of {listed(steps)}", fix)
            elif f"{name}.{step}" in config.pipelines:
                found = f"a pipeline is called {name}.{step} already"
                yield serve_file.problem(key, found, fix="rename the pipeline")
            elif (why := not_alone.get(f"{name}.{step}")) is not None:
                found = f"step {step} cannot be a model of its own: {why.found}"
                yield serve_file.problem(key, found, fix=why.fix)


def _missing_files(config: ServeConfig, serve_file: ServeFile, flags: Flags) -> Iterator[Problem]:
    tls = config.tls
    rows: list[tuple[str, Path | None, str, Path | None]] = [("tokens", config.tokens, "--tokens", flags.tokens)]
    if tls is not None:
        rows += [
            ("tls.certificate", tls.certificate, "--tls-cert", flags.tls_cert),
            ("tls.key", tls.key, "--tls-key", flags.tls_key),
            ("tls.client_ca", tls.client_ca, "--client-ca", flags.client_ca),
        ]
    for key, file, flag, override in rows:
        if file is None or file.is_file():
            continue
        found = f"there is no file {file}"
        yield serve_file.problem(key, found) if override is None else _flag_problem(flag, found)


def _flag_problem(what: str, found: str, expected: str = "", fix: str = "") -> Problem:
    return Problem(what, found, expected, fix, file=COMMAND_LINE)
