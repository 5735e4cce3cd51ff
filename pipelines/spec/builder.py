"""Python pipeline builder, equivalent to the YAML format.

    p = Builder("voice-photo-assistant")
    photo = p.input("photo", "image")
    see = p.step("see", "yolo", image=photo, model="yolo11n.pt", batch={"items_max": 16})
    p.output("detections", see.detections)
    pipeline = p.build()

`input` returns a wire, and so does every attribute of a step. A keyword of `step` whose value is a wire is an input
port; every other keyword is an option of the node. `constant(224)` is a wire that always carries the same value.
Problems name the line of the call.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from weftline.errors import Problem
from weftline.fields import changed_fields, default_of, plain, written_fields
from weftline.nodes.catalog import CATALOG
from weftline.nodes.contract import Node
from weftline.pipelines.spec.condition import Condition
from weftline.pipelines.spec.document import Document
from weftline.pipelines.spec.graph import Pipeline, Step
from weftline.pipelines.spec.loader import to_pipeline
from weftline.pipelines.spec.policy import BatchPolicy, GpuPolicy, IdlePolicy, Limits, Retry, SequencePolicy, Slo
from weftline.pipelines.spec.serialisation import to_yaml
from weftline.pipelines.spec.wire import ConstantWire, StepHandle, Wire, constant

__all__ = ["Builder", "ConstantWire", "StepHandle", "constant"]


class Builder:
    """Collects inputs, steps and outputs; `build` returns the Pipeline.

    base_dir: the folder that relative paths are relative to; the folder of the calling Python file when left out.
    """

    def __init__(
        self,
        name: str,
        *,
        about: str = "",
        base_dir: str | Path | None = None,
        limits: Limits | Mapping[str, Any] | None = None,
        slo: Slo | Mapping[str, Any] | None = None,
        gpu: GpuPolicy | Mapping[str, Any] | None = None,
    ) -> None:
        frame = _caller()
        self._source = frame.f_code.co_filename
        self._base_dir = Path(base_dir) if base_dir is not None else _folder(self._source)
        self._lines: dict[str, int] = {}
        self._problems: list[Problem] = []
        self._unread: set[str] = set()
        self._document: dict[str, Any] = {"weftline": 1, "name": name, "inputs": {}, "steps": {}, "outputs": {}}
        given = {"about": about or None, "limits": _policy(limits), "slo": _policy(slo), "gpu": _policy(gpu)}
        self._document |= {key: value for key, value in given.items() if value}
        for key in self._document:
            self._mark(key, frame)

    def input(
        self,
        name: str,
        type: str,
        *,
        about: str = "",
        seconds_max: float | None = None,
        pixels_max: int | None = None,
        bytes_max: int | None = None,
        default: Any = None,
        optional: bool = False,
    ) -> Wire:
        """Declare an input of the pipeline and return its wire.

        default:  its value when a request omits it.
        optional: a request may omit it; without a default it is then absent.
        """
        more = {"seconds_max": seconds_max, "pixels_max": pixels_max, "bytes_max": bytes_max}
        more["default"] = self._plain(f"inputs.{name}.default", default)
        entry = {"type": type, "about": about, "optional": optional}
        self._put("inputs", name, entry | {key: value for key, value in more.items() if value is not None})
        return Wire(None, name)

    def constant(self, value: Any) -> ConstantWire:
        """Return a constant wire."""
        return constant(value)

    def step(
        self,
        name: str,
        node: str | type[Node] | Any = None,
        /,
        *,
        pipeline: str | Path | None = None,
        inputs: Mapping[str, Wire] | None = None,
        when: str | Condition | None = None,
        batch: BatchPolicy | Mapping[str, Any] | None = None,
        map: str | Sequence[str] = (),
        retry: int | Retry | Mapping[str, Any] | None = None,
        timeout_ms: float | None = None,
        fallback: str | StepHandle | Mapping[str, Any] | None = None,
        idempotent: bool | None = None,
        finite: bool = False,
        sequence: SequencePolicy | Mapping[str, Any] | None = None,
        worker: str | None = None,
        instances: int | Mapping[str, int] = 1,
        reserved: int = 0,
        device: str = "auto",
        threads: int | None = None,
        share: bool | None = None,
        device_bytes: int | None = None,
        idle: float | IdlePolicy | Mapping[str, Any] | None = None,
        run_max_ms: float | None = None,
        **given: Any,
    ) -> StepHandle:
        """Add a step and return it; its attributes are its output ports.

        node:     a reference as in YAML, a node class, or a Config of one (`Yolo.Config(model=...)`).
        pipeline: a pipeline file that runs as this step, instead of a node.
        inputs:   wires of ports whose names are not Python identifiers; use keywords for all others.
        fallback: a step, its name, constants by output port, or "absent".
        given:    a wire is an input port, any other value an option of the node.
        All other keywords are those of a pipeline file.
        """
        keywords, entry = dict(locals()), dict[str, Any]()
        if node is not None:
            named, options = self._node(name, node)
            entry = {"node": named, **options}
        wires: dict[str, Any] = dict(inputs or {})
        if "node" in given:
            self._refuse(f"steps.{name}.node", "set twice", "the node once, as the second argument")
        own = {key: keywords.get(key, usual) for key, usual in _USUAL.items()}
        changed = {key: value for key, value in own.items() if _differs(value, _USUAL[key])}
        for key, value in {**given, **changed}.items():
            if isinstance(value, Wire) or (isinstance(value, StepHandle) and key != "fallback"):
                wires[key] = value
            elif key != "node":
                entry[key] = self._plain(f"steps.{name}.{key}", _policy(value) if key in _USUAL else value)
        entry["inputs"] = {port: self._wired(f"steps.{name}.inputs.{port}", wire) for port, wire in wires.items()}
        self._put("steps", name, entry)
        return StepHandle(name)

    def output(self, name: str, wire: Wire) -> None:
        """Declare output `name` of the pipeline, the value of `wire`."""
        if isinstance(wire, ConstantWire):
            self._refuse(f"outputs.{name}", "a constant", "an output of a step, or an input", "wire it to a step")
        self._put("outputs", name, str(wire))

    def build(self) -> Pipeline:
        """Return the Pipeline. PipelineError lists the problems that an equal file would have."""
        document = Document(self._document, self._lines, tuple(self._problems), frozenset(self._unread))
        return to_pipeline(document, self._file(), self._base_dir)

    def to_yaml(self) -> str:
        """Return the equivalent pipeline file as text."""
        return to_yaml(self.build())

    def _put(self, what: str, name: str, entry: Any) -> None:
        frame, path = _caller(), f"{what}.{name}"
        if name in self._document[what]:
            self._refuse(path, f"written twice, first on line {self._lines.get(path, 0)}", fix="keep one of them")
            return
        self._document[what][name] = entry
        self._mark(path, frame)

    def _mark(self, path: str, frame: FrameType) -> None:
        """Store the line of the user's call, if it is in the builder's source file."""
        if frame.f_code.co_filename == self._source:
            self._lines[path] = frame.f_lineno

    def _node(self, step: str, node: Any) -> tuple[str, dict[str, Any]]:
        """Return the reference and the options of a step's `node` argument."""
        if isinstance(node, str):
            return node, {}
        if inspect.isclass(node) and issubclass(node, Node):
            return reference(node, self._base_dir), {}
        if isinstance(node, Node):
            node, owner = node.config, type(node)
            return reference(owner, self._base_dir), self._changed(step, node)
        found = owners(type(node)) if dataclasses.is_dataclass(node) else []
        if len(found) == 1:
            return reference(found[0], self._base_dir), self._changed(step, node)
        what = "the Config of several nodes" if found else "no node"
        self._refuse(
            f"steps.{step}.node", f"{type(node).__name__} is {what}", "a catalog name, a node class, or a node's Config"
        )
        self._unread.add(f"steps.{step}.node")
        return "", {}

    def _changed(self, step: str, config: Any) -> dict[str, Any]:
        try:
            return changed_fields(config)
        except TypeError as error:
            self._refuse(f"steps.{step}", str(error), "options that a pipeline file can hold")
            return {}

    def _refuse(self, path: str, found: str, expected: str = "", fix: str = "") -> None:
        frame = _caller()
        line = frame.f_lineno if frame.f_code.co_filename == self._source else 0
        self._problems.append(Problem(path, found, expected, fix, line, self._file()))

    def _wired(self, path: str, wire: Any) -> Any:
        """Return the source of a port as a pipeline file writes it."""
        return {"value": self._plain(path, wire.value)} if isinstance(wire, ConstantWire) else str(wire)

    def _plain(self, path: str, value: Any) -> Any:
        try:
            return plain(value)
        except TypeError as error:
            code = inspect.isroutine(value) or inspect.isclass(value)
            fix = f"name it in text: {reference(value, self._base_dir)!r}" if code else ""
            self._refuse(path, str(error), "text, a number, true, false, a list or a mapping", fix)
            self._unread.add(path)
            return None

    def _file(self) -> str:
        """Return the user's Python file, relative to the current folder if inside; '' in an interactive session."""
        path = Path(self._source)
        if not path.is_file():
            return ""
        return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _caller() -> FrameType:
    """Return the nearest frame outside this module: the user's call."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _folder(source: str) -> Path:
    path = Path(source)
    return path.parent if path.is_file() else Path.cwd()


_USUAL = {one.name: default_of(one) for one in written_fields(Step) if one.name not in ("node", "inputs")}
"""Keys of a step that are keywords of `Builder.step`, with their defaults."""
_USUAL["pipeline"] = None


def _differs(value: Any, usual: Any) -> bool:
    return value is not usual and (type(value) is not type(usual) or bool(value != usual))


def _policy(value: Any) -> Any:
    """Return a keyword's value as a file writes it."""
    if isinstance(value, Condition):
        return value.text
    if isinstance(value, StepHandle):
        return str(value)
    if dataclasses.is_dataclass(value):
        return changed_fields(value)
    return dict(value) if isinstance(value, Mapping) else value


def owners(config: type) -> list[type[Node]]:
    """Return the node classes with this Config, from the module that defines it."""
    found = vars(sys.modules.get(config.__module__, sys)).values()
    return [one for one in found if inspect.isclass(one) and issubclass(one, Node) and one.Config is config]


def reference(node: Callable[..., Any], base_dir: Path) -> str:
    """Return a pipeline file's reference to a node class or a function.

    The catalog's name, the file for one of a script, else the module.
    """
    path = f"{node.__module__}:{node.__qualname__}"
    for short, dotted in CATALOG.items():
        if dotted == path:
            return short
    module = sys.modules.get(node.__module__)
    file = getattr(module, "__file__", None)
    if file and (node.__module__ == "__main__" or node.__module__.startswith("weftline_user_")):
        source, folder = Path(file).resolve(), base_dir.resolve()
        name = source.relative_to(folder) if source.is_relative_to(folder) else source
        return f"{name.as_posix()}:{node.__qualname__}"
    return path
