"""Input parser of `weftline run`: `name=text`, `name=@file` and `name=@-`.

An input that is a list is written once for each element, or once as a JSON list.

Everything is read and decoded before a model is loaded, so that a wrong file fails in milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from weftline.engine.inputs import media_limits
from weftline.errors import InputError
from weftline.nodes.detections import Detections
from weftline.nodes.exact_numbers import numbers
from weftline.nodes.json_value import NotJson
from weftline.nodes.media import MediaLimits, converted_elements, to_value
from weftline.nodes.ports import PortType
from weftline.nodes.strict_json import VALUES, parse
from weftline.pipelines.placement.plan import Plan

STDIN = "@-"


def read_inputs(plan: Plan, written: Sequence[str], stdin: BinaryIO, *, partial: bool = False) -> dict[str, Any]:
    """Return one decoded value for each input of the pipeline; InputError names the wrong one and its remedy.

    partial: inputs may be missing.
    """
    given = _split(written)
    _check_names(plan, given, partial)
    return {name: _value(plan, name, texts, stdin) for name, texts in given.items()}


def _split(written: Sequence[str]) -> dict[str, list[str]]:
    given: dict[str, list[str]] = {}
    for one in written:
        name, equals, text = one.partition("=")
        if not equals or not name:
            raise InputError(f"--input {one!r:.80}: expected NAME=VALUE, NAME=@FILE, or NAME=@- for standard input")
        given.setdefault(name, []).append(text)
    readers = [name for name, texts in given.items() for text in texts if text == STDIN]
    if len(readers) > 1:
        raise InputError(f"--input {' and '.join(readers)} both read standard input; only one can")
    return given


def _check_names(plan: Plan, given: Mapping[str, Sequence[str]], partial: bool) -> None:
    known = [one.name for one in plan.inputs if not one.hidden]
    needed = [] if partial else [one.name for one in plan.inputs if not (one.optional or one.default is not None)]
    unknown = [f"--input {name}: the pipeline has no such input" for name in given if name not in known]
    missing = [f"--input {name} is missing" for name in known if name in needed and name not in given]
    if unknown or missing:
        inputs = ", ".join(f"{name} ({plan.input_types[name]})" for name in known) or "none"
        raise InputError("\n".join([*unknown, *missing, f"    the pipeline's inputs: {inputs}"]))


def _value(plan: Plan, name: str, texts: Sequence[str], stdin: BinaryIO) -> Any:
    given = next(one for one in plan.inputs if one.name == name)
    type, limits = plan.input_types[name], media_limits(plan, given)
    try:
        if type.kind == "list" and (len(texts) > 1 or not texts[0].lstrip().startswith("[")):
            item = type.item or PortType("any")
            return converted_elements(
                texts, lambda text: _converted(item, _raw(item, name, text, limits, stdin), limits)
            )
        if len(texts) > 1:
            raise InputError(f"given {len(texts)} times, and it is no list but {type}\n    fix: give it once")
        return _converted(type, _raw(type, name, texts[0], limits, stdin), limits)
    except InputError as error:
        raise InputError(f"input {name}: {error}") from None


def _raw(type: PortType, name: str, text: str, limits: MediaLimits, stdin: BinaryIO) -> Any:
    """Return what stands behind `text`: bytes, a path, or a Python value."""
    if text == STDIN:
        data = stdin.read(limits.bytes_max + 1)
        if len(data) > limits.bytes_max:
            raise InputError(f"more than {limits.bytes_max} bytes on standard input; that is the limit")
        return data
    if text.startswith("@") and not text.startswith("@@"):
        return Path(text[1:])
    text = text.removeprefix("@")
    if type.kind in ("image", "audio"):
        raise InputError(f"wants {type}, got text\n    fix: --input {name}=@FILE reads a file")
    if type.kind == "bytes":
        return text.encode("utf-8", "surrogateescape")
    if type.kind in ("text", "any"):
        return text
    return _parsed(text)


def _converted(type: PortType, raw: Any, limits: MediaLimits) -> Any:
    if type.kind == "detections":
        return to_detections(to_value(PortType("json"), raw, limits))
    return to_value(type, raw, limits)


def _parsed(text: str) -> Any:
    try:
        return parse(text, VALUES)
    except NotJson as error:
        fix = "\n    fix: quote a text twice: once for json, once for the shell" if error.line else ""
        raise InputError(f"{error.at('')}{fix}") from None


def to_detections(value: Any) -> Detections:
    """Return detections from a list of {"name", "score", "box"}, as `--json` prints them."""
    try:
        names = tuple(dict.fromkeys(str(one["name"]) for one in value))
        boxes = numbers([one["box"] for one in value], "float32").reshape(len(value), 4)
        scores = numbers([one["score"] for one in value], "float32").reshape(len(value))
        classes = np.array([names.index(str(one["name"])) for one in value], np.int32)
    except InputError as error:
        raise InputError(f"wants detections, got {error}") from None
    except (TypeError, KeyError, ValueError, IndexError):
        expected = '[{"name": "cup", "score": 0.9, "box": [x1, y1, x2, y2]}, ...]'
        raise InputError(f"wants detections, as json: {expected}") from None
    return Detections(boxes, scores, classes, names)
