"""What a server is told in the end: files from the command line, one serve file, and flags, which override it.

`assemble` reads and checks everything that can be known without starting anything, pipelines included, and says all of
what is wrong at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weftline.engine.ingress.config import HttpDoor, ServeConfig, ServedPipeline, Tls
from weftline.engine.ingress.settings import Settings, is_serve_file, read_file, read_settings
from weftline.engine.machine import this_machine
from weftline.errors import InputError, PipelineError, Problem
from weftline.pipelines.alone import alone
from weftline.pipelines.graph import Pipeline
from weftline.pipelines.load import load_file
from weftline.pipelines.place import Machine
from weftline.pipelines.plan import Plan
from weftline.pipelines.planning import make_plan
from weftline.pipelines.problems import did_you_mean, listed
from weftline.pipelines.profile_file import profile_beside
from weftline.pipelines.side_by_side import SideBySide

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

    Pipelines that are loaded at the start are planned one beside the other, as they are loaded: what one claims of a
    GPU is not free for the next. What their exposed steps claim is known when they are loaded.

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
    settings = Settings()
    if len(served) > 1:
        problems.append(_typed("", f"{len(served)} serve files: {listed(served)}", "one", "put them into one"))
    elif served:
        try:
            settings = read_settings(served[0])
        except PipelineError as error:
            problems += error.problems
    if problems:
        raise PipelineError(problems)
    together = SideBySide(machine)
    plans, problems = _plans(settings, machine, together)
    named, more = _named(pipelines, settings, together)
    plans |= {name: plan for name, (_, plan) in named.items()}
    own = {name: ServedPipeline(Path(file)) for name, (file, _) in named.items()}
    problems += more
    try:
        merged = merge(replace(settings.config, pipelines={**settings.config.pipelines, **own}), flags)
        problems += _problems(merged, settings, flags, plans, machine)
    except PipelineError as error:
        problems += error.problems
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


def _plans(settings: Settings, machine: Machine, together: SideBySide) -> tuple[dict[str, Plan], list[Problem]]:
    """Return the plans of a serve file's pipelines by name, and the problems of all that have any."""
    plans: dict[str, Plan] = {}
    problems: list[Problem] = []
    for name, one in settings.config.pipelines.items():
        if not one.file.is_file():
            if one.load:
                fix = "give the path of a pipeline's YAML file, relative to this file's folder"
                problems.append(settings.problem(f"pipelines.{name}", f"there is no file {one.file}", fix=fix))
            continue
        try:
            pipeline = load_file(str(one.file))
            plans[name] = together.add(pipeline, name) if one.load else _alone(pipeline, machine)
        except PipelineError as error:
            problems += error.problems if one.load else ()
    return plans, problems


def _named(
    files: Sequence[str], settings: Settings, together: SideBySide
) -> tuple[dict[str, tuple[str, Plan]], list[Problem]]:
    """Return file and plan of the pipelines on the command line, by their own names, and what is wrong with them."""
    found: dict[str, tuple[str, Plan]] = {}
    problems: list[Problem] = []
    for file in files:
        try:
            pipeline = load_file(file)
            plan = together.add(pipeline, pipeline.name)
        except PipelineError as error:
            problems += error.problems
            continue
        if plan.name in found or plan.name in settings.config.pipelines:
            fix = "give each a name of its own under `pipelines:` of a serve file"
            problems.append(Problem("name", f"{plan.name} is served already", fix=fix, file=file))
        found.setdefault(plan.name, (file, plan))
    return found, problems


def _alone(pipeline: Pipeline, machine: Machine) -> Plan:
    """Return a plan as if nothing else were open: what will be, when somebody asks for it, nobody knows."""
    return make_plan(pipeline, machine, profile=profile_beside(pipeline))


def _problems(
    config: ServeConfig, settings: Settings, flags: Flags, plans: Mapping[str, Plan], machine: Machine
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
            elif name in plans and (why := _why_not_alone(one.file, step, machine)):
                yield _placed(settings, path, f"step {step} cannot be a model of its own: {why}")
    tls = config.tls
    given = {"tokens": config.tokens} | (
        {"tls.certificate": tls.certificate, "tls.key": tls.key, "tls.client_ca": tls.client_ca} if tls else {}
    )
    for path, file in given.items():
        if file is not None and not file.is_file():
            yield _placed(settings, path, f"there is no file {file}", flag=_overridden(flags, path))


def _why_not_alone(file: Path, step: str, machine: Machine) -> str:
    """Return why a step cannot be a pipeline of its own; '' when it can."""
    try:
        _alone(alone(load_file(file), step), machine)
    except PipelineError as error:
        return error.problems[0].found
    except InputError as error:
        return str(error)
    return ""


def _overridden(flags: Flags, path: str) -> str:
    """Return the flag that gave this value; '' when none did."""
    flag = _FLAG_OF[path]
    return flag if getattr(flags, flag.removeprefix("--").replace("-", "_")) is not None else ""


def _placed(settings: Settings, path: str, found: str, expected: str = "", fix: str = "", flag: str = "") -> Problem:
    if flag or not settings.says(path):
        return _typed(flag or path, found, expected, fix)
    return settings.problem(path, found, expected, fix)


def _typed(what: str, found: str, expected: str = "", fix: str = "") -> Problem:
    return Problem(what, found, expected, fix, file=COMMAND_LINE)
