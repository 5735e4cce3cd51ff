"""Load keys: what decides whether steps share a loaded node.

The key of a step is made of the fields that `weftline.fields` classes as part of what is loaded, so that a new one is
in it without further code. Fields that placement decides are no part of it; the stated device and number of instances
are. Steps that share a process by `worker:` have the keys of all of them in theirs, because a process is shared whole.

Values are kept as digests: options and variables may hold secrets.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from weftline.fields import fields_of_part
from weftline.nodes.declared_files import local_path
from weftline.nodes.ports import PortType
from weftline.pipelines.check.checked import CheckedStep
from weftline.pipelines.check.options import load_options
from weftline.pipelines.placement.bare_plan import BarePlan
from weftline.pipelines.placement.plan import PlannedStep
from weftline.pipelines.spec.graph import Step

_PLACED = frozenset({"workers", "device", "devices", "device_inputs", "device_outputs"})
"""Fields of PlannedStep that placement decides; `device` of the written step is part of the key."""


@dataclass(frozen=True, slots=True)
class LoadKey:
    """Digests of all that a step loads. Steps share a node if their keys are equal and share.

    fields: digest of each part by name, sorted.
    shares: False for stateful steps, and for user code without `share: true`.
    apart:  steps of one pipeline have a deployment each, and share with other pipelines only: their nodes load no
            model, and a chain of steps in one process is quicker than a second turn at the same node.
    """

    fields: tuple[tuple[str, str], ...] = field(repr=False)
    shares: bool = True
    apart: bool = field(default=False, compare=False)

    def fits(self, other: LoadKey) -> bool:
        """Return whether steps with these keys share."""
        return self.shares and self == other

    def differences(self, other: LoadKey) -> list[str]:
        """Return the names of the parts that differ."""
        mine, others = dict(self.fields), dict(other.fields)
        return [name for name in dict.fromkeys([*mine, *others]) if mine.get(name) != others.get(name)]


def load_keys(bare: BarePlan, environment: Mapping[str, str]) -> dict[str, LoadKey]:
    """Return the key of each step of a bare plan that a worker runs.

    environment: values of the variables that nodes read.
    """
    plan, checked = bare.plan, bare.checked
    if plan is None:
        return {}
    base_dir = plan.base_dir.absolute()
    own = {
        step.name: _own_key(checked.steps[step.name], step, base_dir, environment)
        for step in plan.steps
        if not step.control
    }
    groups: dict[str, list[LoadKey]] = {}
    for name, key in own.items():
        groups.setdefault(checked.steps[name].step.worker or "", []).append(key)
    return {name: _in_group(key, groups, checked.steps[name].step.worker) for name, key in own.items()}


def _in_group(key: LoadKey, groups: Mapping[str, list[LoadKey]], worker: str | None) -> LoadKey:
    """Return a step's key with those of the steps that state the same worker; its name is no part of it."""
    members = groups[worker] if worker is not None else []
    together = _digest(sorted({str(one.fields) for one in members}))
    shares = key.shares and all(one.shares for one in members)
    return LoadKey((*key.fields, ("worker", together)), shares, key.apart)


def _own_key(one: CheckedStep, step: PlannedStep, base_dir: Path, environment: Mapping[str, str]) -> LoadKey:
    base_dir = step.base_dir.absolute() if step.base_dir is not None else base_dir
    parts = {name: getattr(one.step, name) for name in fields_of_part(Step, "load")}
    parts |= {name: getattr(step, name) for name in fields_of_part(PlannedStep, "load") if name not in _PLACED}
    options = load_options(one.node, one.config)
    parts["options"] = options if one.user_code else _resolved(options, base_dir)
    parts["base_dir"] = base_dir if one.user_code else None
    parts["variables"] = {name: environment.get(name) for name in step.variables}
    del parts["worker"]
    digests = tuple((name, _digest(_plain(value))) for name, value in sorted(parts.items()))
    wanted = one.step.share if one.step.share is not None else not one.user_code
    return LoadKey(digests, wanted and step.sequence is None, apart=not (step.heavy or one.step.share))


def _resolved(value: Any, base_dir: Path) -> Any:
    """Return an option's value with the paths of files and folders that it names: those of two folders are equal."""
    if isinstance(value, str):
        path = local_path(value, base_dir)
        return value if path is None else {"path": str(path)}
    if isinstance(value, Mapping):
        return {key: _resolved(one, base_dir) for key, one in value.items()}
    return [_resolved(one, base_dir) for one in value] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """Return the loaded part of a value as JSON-like values."""
    if isinstance(value, PortType | PurePath):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(getattr(value, name)) for name in fields_of_part(type(value), "load")}
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
