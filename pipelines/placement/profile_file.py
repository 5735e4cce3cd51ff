"""Profile file with measured costs of steps: `ocr.profile.json` beside `ocr.yaml`.

`weftline profile` writes it and a plan reads it, so that measured memory need not be stated. Measurements hold for one
kind of device ('cpu', 'fake', 'cuda H200') and for a node with its options: the digest of a changed step differs, and
its measurements are ignored.

    {"weftline_profile": 1,
     "context_bytes": {"cuda H200": 534773760},
     "steps": {"see": {"digest": "5d41402abc4b2a76",
                       "on": {"cuda H200": {"open_bytes": 12582912, "peak_bytes": {"1": 41943040, "16": 301989888},
                                            "run_ms": {"1": 4.1, "16": 19.5}, "host_bytes": 912261120}}}}}
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from weftline.errors import PipelineError, Problem
from weftline.fields import Written, worded
from weftline.nodes.json_value import NotJson
from weftline.nodes.strict_json import parse
from weftline.pipelines.check.validation import read
from weftline.pipelines.placement.plan import PlannedStep
from weftline.pipelines.spec.graph import Pipeline
from weftline.shm.device.names import kind_of

BYTES_MAX = 16 << 20
"""Largest profile that is read: more than a thousand steps on ten kinds of devices need."""

DIGEST_CHARS = 16
"""Length of a digest, in hexadecimal digits: it distinguishes versions of one step."""

SUFFIX = ".profile.json"

_PLANNED = ("kv_bytes",)
"""Options that a plan fills in, and that are measured separately."""


def _to_items(value: str) -> int:
    return int(value)


_ITEMS = worded("a number of items, 1 to 999999", pattern=r"^[1-9][0-9]{0,5}$")
Items = Annotated[int, Written(Annotated[str, _ITEMS], _to_items, str)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 50)]
Millis = Annotated[float, Meta(ge=0, le=86_400_000)]
Text = Annotated[str, Meta(min_length=1, max_length=512)]
Digest = Annotated[str, worded(f"{DIGEST_CHARS} hexadecimal digits", pattern=rf"^[0-9a-f]{{{DIGEST_CHARS}}}$")]


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured costs of one instance of a step on one kind of device."""

    open_bytes: Bytes = 0
    """Device memory after opening."""
    peak_bytes: Mapping[Items, Bytes] = field(default_factory=dict)
    """Peak device memory, including open_bytes, by the number of items in a call."""
    run_ms: Mapping[Items, Millis] = field(default_factory=dict)
    """Median time of a call, by the number of items."""
    host_bytes: Bytes = 0
    """Host memory of a process with this step only."""
    kv_bytes: Bytes = 0
    """Part of the device memory that was KV memory, which is planned separately."""

    def device_bytes(self, items: int) -> int:
        """Return the memory of an instance for calls of `items`, without KV memory.

        A size that was not measured uses the next larger one; beyond the largest, memory grows with items.
        """
        most = max(self.peak_bytes, default=0)
        near = min((count for count in self.peak_bytes if count >= items), default=0)
        peak = self.peak_bytes[near] if near else self.peak_bytes.get(most, 0)
        if most and not near:
            peak += max(0, peak - self.open_bytes) * (items - most) // most
        return max(self.open_bytes, peak) - min(self.kv_bytes, self.open_bytes)

    def item_ms(self, items: int) -> float | None:
        """Return the time per item in calls of `items`; None without timed calls.

        It is that of the largest timed number up to `items`, or of the smallest if all are larger.
        """
        if not self.run_ms:
            return None
        near = max((count for count in self.run_ms if count <= items), default=min(self.run_ms))
        return self.run_ms[near] / near


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Profile of one step by kind of device, with the step's digest at that time."""

    digest: Digest
    on: Mapping[Text, Measured] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Profile:
    """Profiles of a pipeline's steps by name, and the base memory of a process on a device.

    context_bytes: by kind of device.
    """

    steps: Mapping[Text, StepProfile] = field(default_factory=dict)
    context_bytes: Mapping[Text, Bytes] = field(default_factory=dict)

    def measured(self, step: str, digest: str, kind: str) -> Measured | None:
        """Return the measurements of the current version of a step, or None."""
        found = self.steps.get(step)
        return found.on.get(kind) if found is not None and found.digest == digest else None


def device_kind(name: str, model: str = "") -> str:
    """Return the kind of a device for measurements: 'cuda H200' of cuda:1, an NVIDIA H200."""
    return f"{kind_of(name)} {model.removeprefix('NVIDIA ')}".strip()


def step_digest(step: PlannedStep) -> str:
    """Return a digest of a step's node and options."""
    return digest_of(step.node, step.options)


def digest_of(node: str, options: Mapping[str, Any]) -> str:
    """Return the digest of a node, by dotted path, with all its options."""
    own = {name: value for name, value in options.items() if name not in _PLANNED}
    text = json.dumps([node, own], sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARS]


def profile_path(pipeline: Pipeline) -> Path:
    """Return the path of a pipeline's profile: beside its file, named like the file, else like the pipeline."""
    path = Path(pipeline.file)
    name = path.stem if path.suffix in (".yaml", ".yml") else pipeline.name
    return pipeline.base_dir / f"{name}{SUFFIX}"


def profile_beside(pipeline: Pipeline) -> Profile | None:
    """Return a pipeline's profile, None when it has none; PipelineError lists what is wrong with it."""
    path = profile_path(pipeline)
    return read_profile(path) if path.is_file() else None


def read_profile(path: str | Path) -> Profile:
    """Return the profile in a file; PipelineError lists everything that is wrong with it."""
    name, path = str(path), Path(path)
    try:
        with path.open("rb") as stream:
            raw = stream.read(BYTES_MAX + 1)
    except OSError as error:
        found = f"cannot be read: {error.strerror}"
        raise PipelineError([Problem("", found, "a profile", _FIX, file=name)]) from None
    if len(raw) > BYTES_MAX:
        raise PipelineError([Problem("", f"more than {BYTES_MAX} bytes", "a smaller file", _FIX, file=name)])
    try:
        document = parse(raw)
    except NotJson as error:
        raise PipelineError([Problem(error.path.removeprefix("."), error.found, "", _FIX, error.line, name)]) from None
    found, problems = read(_ProfileFile, document)
    if problems:
        raise PipelineError(dataclasses.replace(one, file=name, fix=one.fix or _FIX) for one in problems)
    return Profile(found.steps, found.context_bytes)


def to_json(profile: Profile) -> str:
    """Return the text of a profile's file; equal profiles have equal texts."""
    document = {
        "weftline_profile": 1,
        "context_bytes": dict(sorted(profile.context_bytes.items())),
        "steps": {
            name: {"digest": one.digest, "on": {kind: _written(on) for kind, on in sorted(one.on.items())}}
            for name, one in sorted(profile.steps.items())
        },
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _written(measured: Measured) -> dict[str, Any]:
    entry = {one.name: getattr(measured, one.name) for one in dataclasses.fields(measured)}
    for name in ("peak_bytes", "run_ms"):
        entry[name] = {str(items): value for items, value in sorted(entry[name].items())}
    return {name: value for name, value in entry.items() if value}


_FIX = "measure again with `weftline profile`, or remove the file"


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProfileFile(Profile):
    """The whole file."""

    weftline_profile: Literal[1]
