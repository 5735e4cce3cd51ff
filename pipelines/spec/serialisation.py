"""Serialisation of a `Pipeline` to a plain document and to YAML that loads to an equal one.

Defaults are omitted and a type alone is written in its short form, so the output resembles the original file.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import yaml

from weftline.fields import plain
from weftline.pipelines.spec.document import escaped, without_secrets
from weftline.pipelines.spec.graph import Input, Pipeline, Step
from weftline.pipelines.spec.policy import BatchPolicy, IdlePolicy, Retry, SequencePolicy
from weftline.pipelines.spec.wire import Wire


def to_document(pipeline: Pipeline) -> dict[str, Any]:
    """Return the pipeline as plain values, in the order of a pipeline file; TypeError when an option is not plain."""
    document: dict[str, Any] = {"weftline": 1, "name": pipeline.name}
    if pipeline.about:
        document["about"] = pipeline.about
    if asked := [one for one in pipeline.inputs if not one.hidden]:
        document["inputs"] = {one.name: _input(one) for one in asked}
    constants = {Wire(None, one.name): plain(one.default) for one in pipeline.inputs if one.hidden}
    document["steps"] = {step.name: _step(step, constants) for step in pipeline.steps}
    document["outputs"] = {name: str(wire) for name, wire in pipeline.outputs.items()}
    for name, value in (("limits", pipeline.limits), ("slo", pipeline.slo), ("gpu", pipeline.gpu)):
        if changed := changed_fields(value):
            document[name] = changed
    return document


def to_yaml(pipeline: Pipeline) -> str:
    """Return the pipeline as the text of a pipeline file; secrets as the environment variables they came from."""
    document = without_secrets(escaped(to_document(pipeline)), pipeline.secrets)
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def changed_fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass value that differ from their defaults, as plain values."""
    changed = {}
    for field in dataclasses.fields(value):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        current = getattr(value, field.name)
        if current != default or type(current) is not type(default):
            changed[field.name] = plain(current)
    return changed


def _input(one: Input) -> Any:
    entry = changed_fields(one)
    entry.pop("name")
    return entry["type"] if len(entry) == 1 else entry


def _step(step: Step, constants: Mapping[Wire, Any]) -> dict[str, Any]:
    what = {"node": step.node, "pipeline": step.pipeline}
    entry: dict[str, Any] = {key: value for key, value in what.items() if value}
    entry |= {key: plain(value) for key, value in step.options.items()}
    if step.inputs:
        entry["inputs"] = {port: _source(wire, constants) for port, wire in step.inputs.items()}
    if step.when is not None:
        entry["when"] = step.when.text
    if step.batch is not None:
        entry["batch"] = changed_fields(step.batch) or {"items_max": BatchPolicy().items_max}
    if step.map:
        entry["map"] = step.map[0] if len(step.map) == 1 else list(step.map)
    if step.retry is not None:
        entry["retry"] = _retry(step.retry)
    if step.sequence is not None:
        entry["sequence"] = changed_fields(step.sequence) or {"live_max": SequencePolicy().live_max}
    if step.idle is not None:
        entry["idle"] = _idle(step.idle)
    return entry | {key: value for key, value in changed_fields(step).items() if key in _PLAIN_KEYS}


_PLAIN_KEYS = (
    *("timeout_ms", "fallback", "idempotent", "finite", "worker", "instances", "reserved", "device", "threads"),
    *("device_bytes", "run_max_ms"),
)


def _source(wire: Wire, constants: Mapping[Wire, Any]) -> Any:
    return {"value": constants[wire]} if wire in constants else str(wire)


def _retry(retry: Retry) -> Any:
    changed = changed_fields(retry)
    return changed if set(changed) - {"attempts"} else retry.attempts


def _idle(idle: IdlePolicy) -> Any:
    usual = idle.keep == IdlePolicy(idle.after_s).keep
    return plain(idle.after_s) if usual else {"after_s": plain(idle.after_s), "keep": idle.keep}


class _Dumper(yaml.SafeDumper):
    """YAML dumper: multi-line text as a block, no aliases, quotes around text that YAML 1.1 or 1.2 misreads."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_NOT_PLAIN = re.compile(r"^(?:0o[0-7]+|[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?)$")

_ODD_BREAKS = re.compile("[\r\x85\u2028\u2029\ufeff]")


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    if _ODD_BREAKS.search(text):  # other styles write them raw, and a reader folds them into spaces
        style: str | None = '"'
    else:
        style = "|" if "\n" in text else "'" if _NOT_PLAIN.match(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
