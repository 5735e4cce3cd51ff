"""Merge of command-line flags over the serve file into the server configuration.

`assemble` reads and checks everything that can be known without starting anything, pipelines included, and says all of
what is wrong at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weftline.engine.machine import this_machine
from weftline.engine.serving.config import HttpDoor, ServeConfig, ServedPipeline, Tls
from weftline.engine.serving.settings import ServeSettings, is_serve_file, read_file, read_settings
from weftline.errors import InputError, PipelineError, Problem
from weftline.pipelines.check.problems import did_you_mean, listed
from weftline.pipelines.placement.place import Machine
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.placement.reservations import JointPlan, Owner, planner
from weftline.pipelines.spec.graph import Pipeline
from weftline.pipelines.spec.loader import load_file
from weftline.pipelines.spec.single_step import alone

COMMAND_LINE = "the command line"
"""Where a problem stands that no file has, in its message."""


@dataclass(frozen=True, slots=True)
class Flags:
    """What the command line says; None, or empty: nothing about it.

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


_FLAG_OF: Mapping[str, str] = {
    "tokens": "--tokens",
    "tls.certificate": "--tls-cert",
    "tls.key": "--tls-key",
    "tls.client_ca": "--client-ca",
}


def assemble(
    files: Sequence[str], config: str | None, flags: Flags, machine: Machine | None = None
) -> tuple[ServeConfig, Mapping[str, Plan]]:
    """Return what to serve and the plans of its pipelines; PipelineError lists everything that is wrong.

    Pipelines that are loaded at the start, and their exposed steps, are planned one beside the other, as they are
    loaded: what one claims of a GPU is not free for the next, and what is left they divide.

    files:  pipeline files, and at most one serve file, which is one with `pipelines:`.
    config: a serve file that is named as such; None: there is none.
    machine: what pipelines are planned for; this one when left out.
    """
    machine = machine or this_machine()
    problems: list[Problem] = []
    pipelines: list[str] = []
    served = [config] if config is not None else []
    for file in files:
        try:
            (served if is_serve_file(read_file(file)) else pipelines).append(file)
        except PipelineError as error:
            problems += error.problems
    settings = ServeSettings()
    if len(served) > 1:
        problems.append(_typed("", f"{len(served)} serve files: {listed(served)}", "one", "put them into one"))
    elif served:
        try:
            settings = read_settings(served[0])
        except PipelineError as error:
            problems += error.problems
    if problems:
        raise PipelineError(problems)
    graphs, problems = _graphs(settings)
    named, more = _named(pipelines, settings)
    problems += more
    graphs |= {name: graph for name, (_, graph) in named.items()}
    own = {name: ServedPipeline(Path(file)) for name, (file, _) in named.items()}
    merged, wrong = replace(settings.config, pipelines={**settings.config.pipelines, **own}), list[Problem]()
    try:
        merged = merge(merged, flags)
    except PipelineError as error:
        wrong = [*error.problems]
    plans, hindered, more = _plans(merged, graphs, machine)
    problems += [*more, *(wrong or _problems(merged, settings, flags, plans, hindered))]
    if problems:
        raise PipelineError(problems)
    return merged, plans


def merge(config: ServeConfig, flags: Flags) -> ServeConfig:
    """Return the configuration with what the flags say instead; PipelineError for flags that do not fit it."""
    grpc, http, tls, logs = config.grpc, config.http, config.tls, config.logs
    grpc = replace(grpc, **_said(host=flags.host, port=flags.port, socket=flags.socket, processes=flags.processes))
    if flags.http_port is not None or http is not None:
        http = replace(http or HttpDoor(), **_said(host=flags.host, port=flags.http_port))
    if flags.tls_cert or flags.tls_key or flags.client_ca:
        cert, key = flags.tls_cert or (tls and tls.certificate), flags.tls_key or (tls and tls.key)
        if not cert or not key:
            missing = "--tls-key" if cert else "--tls-cert"
            raise PipelineError([_typed(missing, "missing", "--tls-cert and --tls-key, each a PEM file")])
        tls = Tls(cert, key, flags.client_ca or (tls.client_ca if tls else None))
    logs = replace(logs, **_said(format=flags.log_format, requests=flags.log_requests or None))
    if flags.verbose:
        logs = replace(logs, level="debug")
    return replace(
        config,
        pipelines=_exposing(config.pipelines, flags.expose),
        grpc=grpc,
        http=http,
        tls=tls,
        logs=logs,
        insecure=config.insecure or flags.insecure,
        shared_memory=config.shared_memory or flags.shared_memory,
        **_said(tokens=flags.tokens, grace_s=flags.grace_s, otlp=flags.otlp),
    )


def _said(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _exposing(pipelines: Mapping[str, ServedPipeline], expose: Sequence[str]) -> Mapping[str, ServedPipeline]:
    found = dict(pipelines)
    for one in expose:
        pipeline, _, step = one.rpartition(".")
        if not pipeline and len(found) == 1:
            pipeline = next(iter(found))
        if pipeline not in found:
            known = f"PIPELINE.STEP of {listed(found)}"
            raise PipelineError([_typed("--expose", one[:128], known, did_you_mean(pipeline, found))])
        exposed = dict.fromkeys((*found[pipeline].expose, step))
        found[pipeline] = replace(found[pipeline], expose=tuple(exposed))
    return found


def _graphs(settings: ServeSettings) -> tuple[dict[str, Pipeline], list[Problem]]:
    """Return a serve file's pipelines by name, and the problems of all that have any and are to be loaded."""
    found: dict[str, Pipeline] = {}
    problems: list[Problem] = []
    for name, one in settings.config.pipelines.items():
        if not one.file.is_file():
            if one.load:
                fix = "give the path of a pipeline's YAML file, relative to this file's folder"
                problems.append(settings.problem(f"pipelines.{name}", f"there is no file {one.file}", fix=fix))
            continue
        try:
            found[name] = load_file(str(one.file))
        except PipelineError as error:
            problems += error.problems if one.load else ()
    return found, problems


def _named(files: Sequence[str], settings: ServeSettings) -> tuple[dict[str, tuple[str, Pipeline]], list[Problem]]:
    """Return the pipelines on the command line with their files, by their own names, and what is wrong with them."""
    found: dict[str, tuple[str, Pipeline]] = {}
    problems: list[Problem] = []
    for file in files:
        try:
            pipeline = load_file(file)
        except PipelineError as error:
            problems += error.problems
            continue
        if pipeline.name in found or pipeline.name in settings.config.pipelines:
            fix = "give each a name of its own under `pipelines:` of a serve file"
            problems.append(Problem("name", f"{pipeline.name} is served already", fix=fix, file=file))
        found.setdefault(pipeline.name, (file, pipeline))
    return found, problems


def _plans(
    config: ServeConfig, graphs: Mapping[str, Pipeline], machine: Machine
) -> tuple[dict[str, Plan], dict[str, Problem], list[Problem]]:
    """Return plans by name, why which exposed steps (`pipeline.step`) cannot be models, and all other problems.

    One that is not loaded at the start is planned as if nothing else were open: what will be, nobody knows.
    """
    together, numbers, plans = JointPlan(machine), itertools.count(1), dict[str, Plan]()
    hindered: dict[str, Problem] = {}
    problems: list[Problem] = []

    def plan(name: str, pipeline: Pipeline) -> Plan:
        again = planner(pipeline)
        return together.add(Owner(name, next(numbers)), again) if one.load else again(machine)

    for name, one in config.pipelines.items():
        try:
            if name in graphs:
                plans[name] = plan(name, graphs[name])
        except PipelineError as error:
            problems += error.problems if one.load else ()
        known = {step.name for step in plans[name].steps} if name in plans else ()
        for step in (step for step in one.expose if step in known):
            try:
                plan(f"{name}.{step}", alone(graphs[name], step))
            except PipelineError as error:
                hindered[f"{name}.{step}"] = error.problems[0]
            except InputError as error:
                hindered[f"{name}.{step}"] = Problem("", str(error))
    try:
        plans |= {holder.name: made for holder, made in together.plans().items() if holder.name in plans}
    except PipelineError as error:
        problems += error.problems
    return plans, hindered, problems


def _problems(
    config: ServeConfig,
    settings: ServeSettings,
    flags: Flags,
    plans: Mapping[str, Plan],
    hindered: Mapping[str, Problem],
) -> Iterator[Problem]:
    """Yield what is wrong with the whole: exposed steps, names that meet, files that are not there."""
    if not config.pipelines:
        yield _typed("", "no pipeline", fix="name a pipeline file, or a serve file with `pipelines:`")
    if config.shared_memory and config.grpc.processes > 1:
        found = f"regions are known to the process that a client reached, and there are {config.grpc.processes}"
        yield _placed(
            settings,
            "shared_memory",
            found,
            "grpc.processes 0 or 1 beside it",
            flag="--shared-memory" * flags.shared_memory,
        )
    if config.grpc.socket is not None and config.grpc.processes > 1:
        found = f"a Unix socket belongs to one process, and there are {config.grpc.processes}"
        flag = "--processes" if flags.processes is not None else ""
        yield _placed(settings, "grpc.processes", found, "0 or 1 beside grpc.socket", flag=flag)
    if config.grpc.socket_group is not None and config.grpc.socket is None:
        found = "a group for a Unix socket, and there is none"
        yield _placed(settings, "grpc.socket_group", found, fix="set grpc.socket (--socket), or leave the group out")
    for name, one in config.pipelines.items():
        steps = [step.name for step in plans[name].steps] if name in plans else list(one.expose)
        for step in one.expose:
            path = f"pipelines.{name}.expose"
            if step not in steps:
                fix = did_you_mean(step, steps)
                yield _placed(settings, path, f"no step is called {step:.80}", f"one of {listed(steps)}", fix)
            elif f"{name}.{step}" in config.pipelines:
                fix = "rename the pipeline"
                yield _placed(settings, path, f"a pipeline is called {name}.{step} already", fix=fix)
            elif (why := hindered.get(f"{name}.{step}")) is not None:
                yield _placed(settings, path, f"step {step} cannot be a model of its own: {why.found}", fix=why.fix)
    tls = config.tls
    given = {"tokens": config.tokens} | (
        {"tls.certificate": tls.certificate, "tls.key": tls.key, "tls.client_ca": tls.client_ca} if tls else {}
    )
    for path, file in given.items():
        if file is not None and not file.is_file():
            yield _placed(settings, path, f"there is no file {file}", flag=_overridden(flags, path))


def _overridden(flags: Flags, path: str) -> str:
    """Return the flag that gave this value; '' when none did."""
    flag = _FLAG_OF[path]
    return flag if getattr(flags, flag.removeprefix("--").replace("-", "_")) is not None else ""


def _placed(
    settings: ServeSettings, path: str, found: str, expected: str = "", fix: str = "", flag: str = ""
) -> Problem:
    if flag or not settings.says(path):
        return _typed(flag or path, found, expected, fix)
    return settings.problem(path, found, expected, fix)


def _typed(what: str, found: str, expected: str = "", fix: str = "") -> Problem:
    return Problem(what, found, expected, fix, file=COMMAND_LINE)
