"""Serialisation of a `Pipeline` to a plain document and to YAML that loads to an equal one.

Defaults are omitted and a type alone is written in its short form, so the output resembles the original file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from weftline.fields import changed_fields, plain
from weftline.pipelines.spec.document import escaped, without_secrets
from weftline.pipelines.spec.graph import Pipeline, Step, write_input
from weftline.pipelines.spec.wire import Wire


def to_document(pipeline: Pipeline) -> dict[str, Any]:
    """Return the pipeline as plain values, in the order of a pipeline file; TypeError when an option is not plain."""
    document: dict[str, Any] = {"weftline": 1, "name": pipeline.name}
    if pipeline.about:
        document["about"] = pipeline.about
    if asked := [one for one in pipeline.inputs if not one.hidden]:
        document["inputs"] = {one.name: write_input(one) for one in asked}
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


def _step(step: Step, constants: Mapping[Wire, Any]) -> dict[str, Any]:
    changed = changed_fields(step)
    what = {key: changed.pop(key) for key in ("node", "pipeline") if key in changed}
    options = {key: plain(value) for key, value in step.options.items()}
    if step.inputs:
        changed["inputs"] = {port: _source(wire, constants) for port, wire in step.inputs.items()}
    return what | options | changed


def _source(wire: Wire, constants: Mapping[Wire, Any]) -> Any:
    return {"value": constants[wire]} if wire in constants else str(wire)


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
