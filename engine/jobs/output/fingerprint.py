"""Fingerprint of a pipeline's result-determining inputs, and software versions.

In it: the graph, nodes and their options (prompts are options), wires, conditions, fallbacks, `map:`, how batches are
made up, inputs with their defaults and limits, the limits that refuse a row; and what the files hold that it names:
Python files of nodes and functions, models and weights. Not in it: where the pipeline's file lies and what it is
called, comments, `about:`, devices, workers, instances and KV memory, waiting times, retries and timeouts: these move
work about, or decide whether a row is answered at all, and a job may go on, or run its error rows again, with others.

Secrets that came from the environment count as the name of their variable: a new token does not change a job.

What a Python file imports is not looked at, nor is what a hub name stands for.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weftline.engine.jobs.output.manifest import encode
from weftline.errors import InputError
from weftline.nodes.contract import ConfigError
from weftline.nodes.model_file import find_model
from weftline.nodes.user_code import locate
from weftline.pipelines.placement.plan import Plan, PlannedStep
from weftline.pipelines.spec.document import without_secrets

WHOLE_BYTES_MAX = 64 << 20
"""Larger files are known by their size, their beginning and their end."""

ENDS_BYTES = 1 << 20

FOLDER_FILES_MAX = 10_000
"""So many files of a model's folder are looked at, in the order of their names."""

_MOVES_WORK_ABOUT = frozenset({"kv_bytes"})
"""Options that decide how much memory there is, and nothing else."""

_MODEL_FILES = frozenset({".json", ".safetensors", ".onnx", ".pt", ".pth", ".bin", ".gguf", ".model"})
_CODE = re.compile(r"[^\s:]+:[A-Za-z_]\w*")
_PACKAGES = ("weftline", "numpy", "pyarrow", "torch", "onnxruntime", "transformers", "tokenizers", "pillow")


def pipeline_fingerprint(plan: Plan) -> str:
    """Return the SHA-256 of everything that decides the pipeline's results."""
    return pipeline_parts(plan)["fingerprint"]


def pipeline_parts(plan: Plan) -> dict[str, str]:
    """Return what a manifest says of a pipeline: `name`, `fingerprint`, digests of `graph` and of each `file NAME`.

    InputError when a file that it names cannot be read.
    """
    parts = {"graph": hashlib.sha256(encode(without_secrets(_graph(plan), plan.secrets))).hexdigest()}
    for step in plan.steps:
        base_dir = plan.base_dir if step.base_dir is None else step.base_dir
        try:
            for shown, path in _files(step, base_dir):
                digest, name = _digest(path), f"file {shown}"
                same = parts.get(name, digest) == digest  # else two steps' folders have a file of that name
                parts[name if same else f"file {shown} of {step.name}"] = digest
        except OSError as error:
            raise InputError(f"step {step.name}: a file that it names cannot be read: {error}") from None
    fingerprint = hashlib.sha256(encode(sorted(parts.items()))).hexdigest()
    return {"name": plan.name, "fingerprint": fingerprint, **parts}


def versions(plan: Plan | None = None) -> dict[str, str]:
    """Return the versions of what decides bytes, of those that are installed; of a plan the kinds of devices too."""
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


def _graph(plan: Plan) -> dict[str, Any]:
    inputs = [
        (one.name, str(plan.input_types[one.name]), one.default, one.optional, one.hidden, one.seconds_max,
         one.pixels_max, one.bytes_max)
        for one in plan.inputs
    ]  # fmt: skip
    limits = plan.limits
    return {
        "inputs": inputs,
        "steps": [_step(step) for step in plan.steps],
        "outputs": [(one.name, str(one.wire), str(one.type), one.optional) for one in plan.outputs],
        "limits": [limits.request_bytes_max, limits.pixels_max, limits.seconds_max, limits.map_items_max],
    }


def _step(step: PlannedStep) -> dict[str, Any]:
    batch = step.batch
    return {
        "name": step.name,
        "node": step.node,
        "options": {name: value for name, value in step.options.items() if name not in _MOVES_WORK_ABOUT},
        "inputs": [(one.port, str(one.wire), str(one.type), one.optional) for one in step.inputs],
        "outputs": [(one.name, str(one.type)) for one in step.outputs],
        "batch": [batch.items_max, batch.sizes, batch.shapes, batch.pad, batch.pad_value],
        "control": [step.control, step.cases, step.default],
        "when": None if step.when is None else step.when.text,
        "fallback": step.fallback,
        "map": step.map,
        "remembers": step.sequence is not None,
    }


def _files(step: PlannedStep, base_dir: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files that a step names, as it names them."""
    if not step.node.startswith("weftline."):
        yield from _code(step.node, base_dir)
    for option, value in _texts("", step.options):
        if option == "function" or (".py:" in value and _CODE.fullmatch(value)):
            yield from _code(value, base_dir)
        elif value and len(value) < 4096 and "\n" not in value:
            yield from _model(value, base_dir)


def _texts(option: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the texts in an option with the option's innermost name."""
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
    """Yield a file, or the files of a folder that looks like a model's; any text may be the name of some folder."""
    path = find_model(value, base_dir)
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
