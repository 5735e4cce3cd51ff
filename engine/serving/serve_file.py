"""Serve files and command-line options, merged and checked before a server starts.

    served = assemble(["ocr.yaml"], "serve.yaml", {"http.port": 8000})
    served.config.grpc.port

Keys, defaults, bounds and the options of keys are in `config.py`. `assemble` checks all that needs no running process,
pipelines included, and reports all problems at once. Relative paths in a file are relative to its folder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from weftline.engine.flags import flag_fields
from weftline.engine.gpus import GpuReservations
from weftline.engine.machine import this_machine
from weftline.engine.planned_pipeline import plan_group
from weftline.engine.serving.config import ServeConfig, ServedPipeline
from weftline.engine.serving.exposed_models import models_with_errors
from weftline.errors import PipelineError, Problem
from weftline.fields import plain
from weftline.pipelines.check.problems import did_you_mean, listed
from weftline.pipelines.check.validation import read
from weftline.pipelines.placement.place import Machine
from weftline.pipelines.placement.sharing import SharedPlan, groups_of
from weftline.pipelines.spec.document import Document, hide_secrets, is_serve_file, read_file
from weftline.pipelines.spec.graph import Pipeline
from weftline.pipelines.spec.loader import line_of, load_file
from weftline.pipelines.spec.single_step import Models, models_of

COMMAND_LINE = "the command line"
"""File name in problems of command-line options."""


@dataclass(frozen=True, slots=True)
class ServeFile:
    """A parsed serve file.

    path:       as the user wrote it; '' without a file.
    lines:      the 1-based line of each key, by dotted path.
    overridden: keys that options of the command line have set.
    """

    config: ServeConfig = field(default_factory=lambda: ServeConfig({}))
    path: str = ""
    lines: Mapping[str, int] = field(default_factory=dict)
    overridden: Collection[str] = ()

    def problem(self, key: str, found: str, expected: str = "", fix: str = "") -> Problem:
        """Return a problem of a key with its line, or one of the option or of the command line that it came from."""
        if key in self.overridden:
            return _flag_problem(_flag_names()[key], found, expected, fix)
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
    if isinstance(document.value, Mapping):
        config, wrong = read(ServeConfig, document.value)
    else:
        found = "an empty file" if document.value is None else "not a mapping"
        config, wrong = None, [Problem("", found, "a mapping with `pipelines:`", file=path)]
    fresh = [one for one in wrong if one.path not in document.unread]
    placed = [replace(one, file=path, line=line_of(one.path, document.lines)) for one in fresh]
    if document.problems or placed:
        raise PipelineError(hide_secrets(one, document.secrets) for one in [*document.problems, *placed])
    return ServeFile(_beneath(folder, config), path, document.lines)


def _beneath(folder: Path, value: Any) -> Any:
    """Return a value with all paths in it relative to a folder."""
    if isinstance(value, Path):
        return folder / value
    if isinstance(value, Mapping):
        return {key: _beneath(folder, one) for key, one in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return replace(value, **{one.name: _beneath(folder, getattr(value, one.name)) for one in fields})
    return value


def to_text(config: ServeConfig) -> str:
    """Write a configuration as a serve file, defaults included."""
    return str(yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True, default_flow_style=None, width=100))


@cache
def _flag_names() -> Mapping[str, str]:
    """Return the option of each key that has one."""
    return {one.key: one.flag.name for one in flag_fields(ServeConfig)}


@dataclass(frozen=True, slots=True)
class Assembled:
    """A checked configuration.

    plans:  what is loaded at the start, exposed steps included: one for each engine.
    failed: problems of pipelines that cannot be loaded, by name.
    """

    config: ServeConfig
    plans: tuple[SharedPlan, ...]
    failed: Mapping[str, Sequence[Problem]]


def assemble(
    files: Sequence[str],
    config: str | None,
    overrides: Mapping[str, Any] = MappingProxyType({}),
    expose: Sequence[str] = (),
    machine: Machine | None = None,
    strict: bool = False,
) -> Assembled:
    """Check what is to be served; PipelineError lists every problem.

    Pipelines that are loaded at the start, and their exposed steps, are planned together. Problems of one of them are
    no reason to refuse the others; problems of the configuration are.

    files:     pipeline files, and at most one serve file, which is one with `pipelines:`.
    config:    a file that must be a serve file; None: there is none.
    overrides: values of options, by the dotted path of the key that each sets.
    expose:    further steps that are models, as `step`, or `pipeline.step` where several are served.
    machine:   machine to plan for; this one when left out.
    strict:    all pipelines or none, as the key `strict`.
    """
    machine = machine or this_machine()
    serve_file, pipelines = _read_all(files, config)
    graphs, failed = _file_graphs(serve_file)
    named, own, problems = _command_line_graphs(pipelines, serve_file, failed)
    graphs |= named
    merged = replace(serve_file.config, pipelines={**serve_file.config.pipelines, **own})
    conflicts: list[Problem] = []
    try:
        merged = merge(merged, overrides, expose)
    except PipelineError as error:
        conflicts = [*error.problems]
    plans, not_alone = _plans(merged, graphs, machine, failed)
    serve_file = replace(serve_file, config=merged, overridden=overrides.keys())
    problems += conflicts or [
        *_process_problems(serve_file),
        *_expose_problems(serve_file, graphs, not_alone),
        *_missing_files(serve_file),
    ]
    none_left = bool(failed) and not any(one.programs for one in plans)
    if problems or none_left or (failed and (strict or merged.strict)):
        problems += [_no_pipeline()] if merged.pipelines and not graphs else []
        raise PipelineError([*(problem for own in failed.values() for problem in own), *problems])
    return Assembled(merged, plans, failed)


def merge(config: ServeConfig, overrides: Mapping[str, Any], expose: Sequence[str] = ()) -> ServeConfig:
    """Override keys of a configuration; PipelineError names the options of values that do not fit."""
    document = plain(replace(config, pipelines=_exposing(config.pipelines, expose)))
    for key, value in overrides.items():
        *sections, last = key.split(".")
        inside = document
        for section in sections:
            inside[section] = inside = inside[section] or {}
        inside[last] = plain(value)
    if config.http is None and "http.port" not in overrides:
        document["http"] = None  # --host alone starts no HTTP server
    try:
        return parse_serve_file(Document(document, {}), COMMAND_LINE, Path()).config
    except PipelineError as error:
        raise PipelineError(map(_of_flag, error.problems)) from None


def _of_flag(problem: Problem) -> Problem:
    """Return a problem of a key as one of the option that sets it, if there is one."""
    name = _flag_names().get(problem.path)
    if name is None:
        return problem
    return replace(problem, path=name, fix=f"add {name}" if problem.found == "missing" else problem.fix)


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
        except PipelineError:  # of a pipeline, unless it is given as a serve file
            pipelines.append(file)
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


_Failed = dict[str, Sequence[Problem]]
"""Problems of pipelines by name."""


def _file_graphs(serve_file: ServeFile) -> tuple[dict[str, Pipeline], _Failed]:
    """Return a serve file's pipelines by name, and the problems of those that are loaded at the start."""
    found: dict[str, Pipeline] = {}
    failed: _Failed = {}
    for name, one in serve_file.config.pipelines.items():
        if not one.file.is_file():
            if one.load:
                fix = "give the path of a pipeline's YAML file, relative to this file's folder"
                failed[name] = [serve_file.problem(f"pipelines.{name}", f"there is no file {one.file}", fix=fix)]
            continue
        try:
            found[name] = load_file(str(one.file))
        except PipelineError as error:
            if one.load:
                failed[name] = error.problems
    return found, failed


def _command_line_graphs(
    files: Sequence[str], serve_file: ServeFile, failed: _Failed
) -> tuple[dict[str, Pipeline], dict[str, ServedPipeline], list[Problem]]:
    """Return the pipelines on the command line by name, what is to be served, and conflicts; add to `failed`.

    One that cannot be read has the name of its file.
    """
    graphs: dict[str, Pipeline] = {}
    served: dict[str, ServedPipeline] = {}
    problems: list[Problem] = []
    for file in files:
        broken: Sequence[Problem] = ()
        try:
            pipeline = load_file(file)
            name = pipeline.name
        except PipelineError as error:
            name, broken = Path(file).stem, error.problems
        if name in served or name in serve_file.config.pipelines:
            fix = "give each a name of its own under `pipelines:` of a serve file"
            problems += broken or [Problem("name", f"{name} is served already", fix=fix, file=file)]
        elif broken:
            failed[name] = broken
        else:
            graphs[name] = pipeline
        served.setdefault(name, ServedPipeline(Path(file)))
    return graphs, served, problems


def _plans(
    config: ServeConfig, graphs: Mapping[str, Pipeline], machine: Machine, failed: _Failed
) -> tuple[tuple[SharedPlan, ...], dict[str, Problem]]:
    """Return the plan of each engine, and problems of exposed steps that cannot be models (`pipeline.step`).

    Pipelines that cannot be planned are added to `failed`. One that is loaded later may have problems now.
    """
    wanted: dict[str, Pipeline] = {}
    not_alone: dict[str, Problem] = {}
    shown = (
        models_of(graphs[name], one.expose) for name, one in config.pipelines.items() if one.load and name in graphs
    )
    alike: Models = frozenset().union(*shown)
    for name, one in config.pipelines.items():
        if name not in graphs:
            continue
        try:
            models, errors = models_with_errors(name, one, graphs[name], alike)
        except PipelineError as error:  # planning it lists its problems, but for those of serving it
            models, errors = {name: graphs[name]}, {}
            failed |= {name: error.problems} if one.load else {}
        not_alone |= {model: Problem("", str(error)) for model, error in errors.items()}
        wanted |= models if one.load else {}
    plans: list[SharedPlan] = []
    gpus = GpuReservations()
    for names in groups_of(wanted):
        hold = gpus.reservation(", ".join(names), gpus.new_session())
        try:
            shared, refused = plan_group({name: wanted[name] for name in names}, machine, hold)
            plans.append(shared)
        except PipelineError as error:
            refused = dict.fromkeys(names, error)
        failed |= {name: error.problems for name, error in refused.items() if isinstance(error, PipelineError)}
    return tuple(plans), not_alone


def _no_pipeline() -> Problem:
    return _flag_problem("", "no pipeline", fix="name a pipeline file, or a serve file with `pipelines:`")


def _process_problems(serve_file: ServeFile) -> Iterator[Problem]:
    """Yield conflicts between pipelines, processes, shared memory and the Unix socket."""
    config = serve_file.config
    processes = config.grpc.processes
    if not config.pipelines:
        yield _no_pipeline()
    if config.shared_memory and processes > 1:
        found = f"regions are known to the process that a client reached, and there are {processes}"
        yield serve_file.problem("shared_memory", found, "grpc.processes 0 or 1 beside it")
    if config.grpc.socket is not None and processes > 1:
        found = f"a Unix socket belongs to one process, and there are {processes}"
        yield serve_file.problem("grpc.processes", found, "0 or 1 beside grpc.socket")
    if config.grpc.socket_group is not None and config.grpc.socket is None:
        fix = "set grpc.socket (--socket), or leave the group out"
        yield serve_file.problem("grpc.socket_group", "a group for a Unix socket, and there is none", fix=fix)


def _expose_problems(
    serve_file: ServeFile, graphs: Mapping[str, Pipeline], not_alone: Mapping[str, Problem]
) -> Iterator[Problem]:
    config = serve_file.config
    for name, one in config.pipelines.items():
        steps = [step.name for step in graphs[name].steps] if name in graphs else list(one.expose)
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


def _missing_files(serve_file: ServeFile) -> Iterator[Problem]:
    tls = serve_file.config.tls
    files = {"tokens": serve_file.config.tokens}
    if tls is not None:
        files |= {"tls.certificate": tls.certificate, "tls.key": tls.key, "tls.client_ca": tls.client_ca}
    for key, file in files.items():
        if file is not None and not file.is_file():
            yield serve_file.problem(key, f"there is no file {file}")


def _flag_problem(what: str, found: str, expected: str = "", fix: str = "") -> Problem:
    return Problem(what, found, expected, fix, file=COMMAND_LINE)
