"""Fingerprint of a pipeline's result-determining inputs, and software versions.

Included: every field of the plan whose class changes results (`weftline.fields`), that is the graph, nodes and their
options (prompts are options), wires, conditions, fallbacks, `map:`, `finite`, batch formation, inputs with defaults and
limits, the limits that refuse a row; and the content of the files it names: Python files of nodes and functions, models
and weights. Not included: path and name of the pipeline's file, comments, `about:`, devices, workers, instances, KV
memory, waiting times, retries and timeouts. A job can resume, or retry its error rows, with other values of these.

Secrets from the environment count by the name of their variable: a new token does not change a job. Imports of Python
files and the content of Hub models are not included.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weftline.engine.jobs.output.manifest import encode
from weftline.errors import InputError
from weftline.fields import LOAD, result_fields
from weftline.nodes.catalog import resolve
from weftline.nodes.contract import ConfigError
from weftline.nodes.model_file import find_model
from weftline.nodes.ports import PortType
from weftline.nodes.user_code import locate
from weftline.pipelines.placement.plan import Plan, PlannedStep
from weftline.pipelines.spec.condition import Condition
from weftline.pipelines.spec.document import without_secrets
from weftline.pipelines.spec.wire import Wire

WHOLE_BYTES_MAX = 64 << 20
"""Larger files are hashed by size, beginning and end."""

ENDS_BYTES = 1 << 20

FOLDER_FILES_MAX = 10_000
"""Most files of a model folder that are hashed, in the order of their names."""

_MODEL_FILES = frozenset({".json", ".safetensors", ".onnx", ".pt", ".pth", ".bin", ".gguf", ".model"})
_CODE = re.compile(r"[^\s:]+:[A-Za-z_]\w*")
_PACKAGES = ("weftline", "numpy", "pyarrow", "torch", "onnxruntime", "transformers", "tokenizers", "pillow")


def pipeline_parts(plan: Plan) -> dict[str, str]:
    """Return a manifest's pipeline entry: `name`, `fingerprint`, digests of `graph` and of each `file NAME`.

    InputError if a file that it names cannot be read.
    """
    parts = {"graph": hashlib.sha256(encode(without_secrets(_graph(plan), plan.secrets))).hexdigest()}
    for step in plan.steps:
        base_dir = plan.base_dir if step.base_dir is None else step.base_dir
        try:
            for shown, path in _files(step, base_dir):
                digest, name = _digest(path), f"file {shown}"
                same = parts.get(name, digest) == digest  # two steps' folders can have files of one name
                parts[name if same else f"file {shown} of {step.name}"] = digest
        except OSError as error:
            raise InputError(f"step {step.name}: a file that it names cannot be read: {error}") from None
    fingerprint = hashlib.sha256(encode(sorted(parts.items()))).hexdigest()
    return {"name": plan.name, "fingerprint": fingerprint, **parts}


def versions(plan: Plan | None = None) -> dict[str, str]:
    """Return the versions of installed packages that determine bytes, and the kinds of a plan's devices."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if plan is not None:
        kinds = {device.partition(":")[0] for step in plan.steps for device in step.devices if device}
        found["devices"] = ", ".join(sorted(kinds)) or "none"
    return found


def _compared(value: Any) -> Any:
    """Return plain data of what determines results in a value of a plan; the class of a field decides."""
    if isinstance(value, Condition):
        return value.text
    if isinstance(value, Wire | PortType):
        return str(value)
    if dataclasses.is_dataclass(value):
        return {name: _compared(getattr(value, name)) for name in sorted(result_fields(type(value)))}
    if isinstance(value, Mapping):
        return {name: _compared(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_compared(one) for one in value]
    return value


def _graph(plan: Plan) -> Any:
    found = _compared(plan)
    for planned, step in zip(plan.steps, found["steps"], strict=True):
        unchanged = _resource_options(planned, plan.base_dir)
        step["options"] = {name: one for name, one in step["options"].items() if name not in unchanged}
    return found


def _resource_options(step: PlannedStep, base_dir: Path) -> set[str]:
    """Return the options of a step that do not change results; none if its node cannot be imported."""
    try:
        config = resolve(step.node, step.base_dir or base_dir).Config
    except ConfigError:
        return set()
    return {one.name for one in dataclasses.fields(config)} - set(result_fields(config, LOAD))


def _files(step: PlannedStep, base_dir: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files that a step names, with their written names."""
    if not step.node.startswith("weftline."):
        yield from _code(step.node, base_dir)
    for option, value in _texts("", step.options):
        if option == "function" or (".py:" in value and _CODE.fullmatch(value)):
            yield from _code(value, base_dir)
        elif value and len(value) < 4096 and "\n" not in value:
            yield from _model(value, base_dir)


def _texts(option: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the texts in an option, with the innermost option name."""
    if isinstance(value, str):
        yield option, value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from _texts(str(name), one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(option, one)


def _code(reference: str, base_dir: Path) -> Iterator[tuple[str, Path]]:
    try:
        yield reference.rpartition(":")[0], locate(reference, base_dir, "node").path
    except ConfigError:
        return


def _model(value: str, base_dir: Path) -> Iterator[tuple[str, Path]]:
    """Yield a file, or the files of a model folder; other folders may share a name with any text."""
    try:
        path = find_model(value, base_dir)
    except ConfigError:  # a URL that names no fetched model
        return
    if path is None:
        return
    if path.is_file():
        yield value, path
    elif not base_dir.resolve().is_relative_to(path) and any(one.suffix in _MODEL_FILES for one in path.iterdir()):
        inside = sorted(one for one in path.rglob("*") if one.is_file() and one.suffix != ".md")
        for one in inside[:FOLDER_FILES_MAX]:
            if not any(part.startswith(".") for part in one.relative_to(path).parts):
                yield f"{value.rstrip('/')}/{one.relative_to(path).as_posix()}", one


def _digest(path: Path) -> str:
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        if size_bytes <= WHOLE_BYTES_MAX:
            return hashlib.file_digest(file, "sha256").hexdigest()
        sha256 = hashlib.sha256(file.read(ENDS_BYTES))
        file.seek(-ENDS_BYTES, 2)
        sha256.update(file.read(ENDS_BYTES))
    return f"{size_bytes} bytes, ends {sha256.hexdigest()}"
