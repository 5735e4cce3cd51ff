"""Expansion of shorthand in a pipeline: templates, prompts, constants, fallbacks and sub-pipelines.

A `template` step names its inputs in its text: `{{ see.detections | describe }}` or `{{ question }}`. Each name becomes
an input port and is wired; the port is named like the wire, with `__` for the dot (`see__detections`). An `llm` step
with a `prompt:` becomes two steps: a template step named `<step>_prompt`, and the LLM step that reads its text. Where
the prompt shows pictures, which are pipeline inputs or the step's input `images`, the template step passes them on, and
likewise videos.

Constant fallbacks become steps that pass constants on, and a step that runs a pipeline file is replaced by the steps
of that file. Names of generated steps and inputs contain a `/` or end with `_prompt`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.defaults import DEFAULT_NAMESPACE

from weftline.nodes.catalog import CATALOG, dotted, with_engine
from weftline.nodes.ports import PortType
from weftline.nodes.template import SEPARATOR
from weftline.nodes.template_sandbox import TEMPLATE_CHARS_MAX
from weftline.pipelines.check.problems import Origin, Report, did_you_mean, listed
from weftline.pipelines.spec.fallbacks import expand_fallbacks
from weftline.pipelines.spec.graph import Pipeline, Step
from weftline.pipelines.spec.subpipelines import Constraint, expand_subpipelines
from weftline.pipelines.spec.wire import Wire


class _AnyName(dict[str, Any]):
    """Mapping that contains every name: the template node checks filters and tests itself."""

    def get(self, key: str, default: Any = None) -> Any:
        return str


_ENVIRONMENT = jinja2.Environment()  # only ever parses; nothing is rendered in this file
_ENVIRONMENT.filters = _ENVIRONMENT.tests = _AnyName()

PREFIX_CHARS_MIN = 64
"""Shorter prefixes fill less than a page of KV memory and are not recorded in the plan."""
_MARKUP = re.compile(r"\{[{%#]")
_MEDIA: Mapping[str, Callable[[PortType], bool]] = {
    "images": lambda type: type.kind == "image",
    "videos": lambda type: type.dtype == "uint8" and type.dims is not None and type.dims[3:] == (3,),
}
"""Inputs of an llm step that its prompt may show, with the types of pipeline inputs that are shown there too, as they
are or in a list. The template step has an option and an output of the same name."""
_READS_FILES = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


@dataclass(frozen=True, slots=True)
class Reading:
    """One name that a template reads: `name` alone, or `name.port`; `line` is 1-based in the template."""

    name: str
    port: str | None
    line: int

    def __str__(self) -> str:
        return self.name if self.port is None else f"{self.name}.{self.port}"


def port_of(wire: Wire) -> str:
    """Return the name of a template's input port for `wire`."""
    return str(wire).replace(".", SEPARATOR)


def expand_prompts(
    pipeline: Pipeline, report: Report, catalog: Mapping[str, Any] = CATALOG
) -> tuple[Pipeline, dict[str, Origin]]:
    """Return the pipeline with wired templates and with a step for every prompt, and the origins of these steps.

    Problems go to `report`.
    """
    origins: dict[str, Origin] = {}
    steps: list[Step] = []
    for step in pipeline.steps:
        path = f"steps.{step.name}"
        if _is(step, "template", catalog) and isinstance(step.options.get("template"), str):
            wires = _wires(step.options["template"], f"{path}.template", step, pipeline, report)
            steps.append(dataclasses.replace(step, inputs={**step.inputs, **wires}))
        elif _is(step, "llm", catalog) and "prompt" in step.options:
            steps += _prompted(step, pipeline, report, origins, catalog)
        else:
            steps.append(step)
    return dataclasses.replace(pipeline, steps=tuple(steps)), origins


def readings(text: str) -> list[Reading]:
    """Return the free variables of a template, in order. ValueError (message, line): invalid template."""
    if len(text) > TEMPLATE_CHARS_MAX:
        raise ValueError(f"a template of {len(text)} characters; the most is {TEMPLATE_CHARS_MAX}", 1)
    try:
        tree = _ENVIRONMENT.parse(text)
        for found in tree.find_all(_READS_FILES):
            raise ValueError("a template reads no other files", found.lineno)
        free = meta.find_undeclared_variables(tree)
        return _free_readings(tree, free)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"no template: {error.message}", error.lineno) from None
    except RecursionError:
        raise ValueError("a template nested too deeply", 1) from None


def _free_readings(tree: nodes.Template, free: set[str]) -> list[Reading]:
    local = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    found: dict[Reading, None] = {}
    parts: set[int] = set()  # names that are the first part of a dotted one
    for node in tree.find_all((nodes.Getattr, nodes.Getitem, nodes.Name)):
        if isinstance(node, nodes.Name):
            if id(node) not in parts and node.name in free and node.ctx == "load":
                found[Reading(node.name, None, node.lineno)] = None
            continue
        if not isinstance(node, nodes.Getattr | nodes.Getitem):
            continue
        port = _attribute(node)
        if isinstance(node.node, nodes.Name) and port is not None and node.node.name in free:
            parts.add(id(node.node))
            found[Reading(node.node.name, port, node.lineno)] = None
    for reading in found:
        if reading.name in local:
            raise ValueError(f"sets {reading.name} and also reads it from outside; rename one of them", reading.line)
    return list(found)


def _attribute(node: nodes.Getattr | nodes.Getitem) -> str | None:
    if isinstance(node, nodes.Getattr):
        return node.attr
    return node.arg.value if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str) else None


def _is(step: Step, name: str, catalog: Mapping[str, Any]) -> bool:
    return step.node == name or dotted(step.node, catalog) == CATALOG[name]


def _prompted(
    step: Step, pipeline: Pipeline, report: Report, origins: dict[str, Origin], catalog: Mapping[str, Any]
) -> list[Step]:
    path, name = f"steps.{step.name}", f"{step.name}_prompt"
    options = {key: value for key, value in step.options.items() if key != "prompt"}
    text = step.options["prompt"]
    if not isinstance(text, str):
        report.add(f"{path}.prompt", f"{type(text).__name__} value", "text", "put it in quotes")
    elif "prompt" in step.inputs:
        report.add(f"{path}.prompt", "written beside inputs.prompt", "one of the two", "remove one of them")
    elif pipeline.step(name) or any(one.name == name for one in pipeline.inputs):
        report.add(f"{path}.prompt", f"makes a step named {name}, and that name is taken", fix=f"rename {name}")
    else:
        wires = _wires(text, f"{path}.prompt", step, pipeline, report)
        own = {port: wire for port, wire in step.inputs.items() if port in _names(text)}
        node = "template" if "template" in catalog else CATALOG["template"]
        shown = {port: one for port in _MEDIA if (one := _shown(port, text, step, pipeline))}
        for port in shown.keys() & step.inputs.keys() - own.keys():
            found, fix = (
                f"shows {shown[port]}, and inputs.{port} is wired beside it",
                f"show {{{{ {port} }}}} there too",
            )
            report.add(f"{path}.prompt", found, f"{port} from one of the two", fix)
        origins[f"steps.{name}"] = Origin(f"{path}.prompt")
        own_engine = with_engine(step.node, step.options, catalog) == dotted(step.node, catalog)
        options = {**(_fixed(text) if own_engine else {}), **options}
        inputs = {port: wire for port, wire in step.inputs.items() if port not in own}
        listed_own = tuple(port for port in step.map if port in own)  # a list is rendered item by item
        rest = tuple(port for port in step.map if port not in own)
        made = {"prompt": Wire(name, "text"), **{port: Wire(name, port) for port in shown}}
        return [
            Step(
                name,
                node,
                {"template": text, **dict.fromkeys(shown, True)},
                {**own, **wires},
                when=step.when,
                map=listed_own,
            ),
            dataclasses.replace(
                step,
                options=options,
                inputs={**inputs, **made},
                map=(*rest, *made) if listed_own else rest,
            ),
        ]
    return [dataclasses.replace(step, options=options, inputs={**step.inputs, "prompt": Wire(None, "")})]


def _shown(port: str, text: str, step: Step, pipeline: Pipeline) -> str:
    """Return the name of the first picture that a prompt shows, or video for port `videos`; '' for none."""
    types = {one.name: one.type for one in pipeline.inputs}
    for name in _names(text, bare=True):
        wire = step.inputs.get(name, Wire(None, name))
        if name in _MEDIA and name in step.inputs:
            if name == port:
                return name
        elif wire.step is None and _is_media(port, types.get(wire.port)):
            return name
    return ""


def _is_media(port: str, type: str | None) -> bool:
    try:
        parsed = PortType.parse(type or "")
    except ValueError:
        return False  # a problem of the input's own
    return _MEDIA[port](parsed.item if parsed.kind == "list" and parsed.item is not None else parsed)


def _fixed(text: str) -> dict[str, str]:
    """Return the constant prefix of the template's prompts, as an option of the llm step."""
    fixed = _MARKUP.split(text, maxsplit=1)[0]
    return {"prefix": fixed} if len(fixed) >= PREFIX_CHARS_MIN else {}


def _names(text: str, bare: bool = False) -> list[str]:
    """Return the names that a template reads, in order. bare: only those read without a dot."""
    try:
        return [reading.name for reading in readings(text) if not bare or reading.port is None]
    except ValueError:
        return []


def _wires(text: str, path: str, step: Step, pipeline: Pipeline, report: Report) -> dict[str, Wire]:
    """Return a wire for every variable of the template that the step does not wire itself."""
    start = pipeline.lines.get(path, 0)  # unknown in Python, where only the call's line is known
    offset = 0 if "\n" in text else -1  # a block of text starts on the line after its key
    try:
        found = readings(text)
    except ValueError as error:
        report.add(path, error.args[0], line=start and start + error.args[1] + offset)
        return {}
    wires: dict[str, Wire] = {}
    for reading in found:
        if reading.name in step.inputs:
            continue
        wire, problem = _wire(reading, pipeline)
        if problem:
            report.add(path, f"reads {problem[0]}", fix=problem[1], line=start and start + reading.line + offset)
        elif wire:
            wires[port_of(wire)] = wire
    return wires


def _wire(reading: Reading, pipeline: Pipeline) -> tuple[Wire | None, tuple[str, str] | None]:
    """Return the wire of a variable, or its problem and a fix; neither for a Jinja global."""
    name = reading.name
    inputs, steps = [one.name for one in pipeline.inputs], [one.name for one in pipeline.steps]
    if name in inputs:
        wire = Wire(None, name)  # `photo.shape` is an attribute of the input's value
    elif name in steps and reading.port is not None:
        wire = Wire(name, reading.port)
    elif name in steps:
        return None, (f"{name}, a step with outputs of its own", f"name one of its outputs, like {name}.text")
    elif name in DEFAULT_NAMESPACE:
        return None, None
    else:
        dashed = [one for one in [*inputs, *steps] if "-" in one and name in one.split("-")]
        if dashed:
            return None, (
                f"{dashed[0]} with a - in it, which is minus in a template",
                f"rename {dashed[0]} to {dashed[0].replace('-', '_')}",
            )
        fix = did_you_mean(name, [*inputs, *steps]) or f"known here: {listed([*inputs, *steps])}"
        return None, (f"{reading}, and no step and no input is named {name}", fix)
    if SEPARATOR in str(wire):
        return None, (
            f"{reading}, where {SEPARATOR} in a name is ambiguous with a dot",
            f"rename {name} without {SEPARATOR}",
        )
    return wire, None


__all__ = ["Constraint", "Expansion", "expand"]


@dataclass(frozen=True, slots=True)
class Expansion:
    """An expanded pipeline.

    pipeline:    a step that still names a pipeline file could not be expanded; the report has the problem.
    origins:     source locations of generated steps and inputs.
    constraints: types of wires besides those of their ports: the declared inputs of sub-pipelines. Such a wire counts
                 as read even if no remaining step reads it.
    """

    pipeline: Pipeline
    origins: Mapping[str, Origin] = field(default_factory=dict)
    constraints: tuple[Constraint, ...] = ()


def expand(pipeline: Pipeline, report: Report, catalog: Mapping[str, Any] = CATALOG) -> Expansion:
    """Return the expanded pipeline; problems and origins go to `report`."""
    pipeline, origins = expand_prompts(pipeline, report, catalog)
    pipeline, more = expand_fallbacks(pipeline)
    report.origins = {**origins, **more}
    pipeline, constraints = expand_subpipelines(pipeline, report, catalog)
    return Expansion(pipeline, report.origins, constraints)
