"""Job manifest: pipeline, data and settings, compared on resume; pure."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

import msgspec

VERSION = 1

SHOWN_MAX = 10
"""Most differences of one kind that are listed; the rest is counted."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A job.

    pipeline: `name`, `fingerprint`, and, where they are known, `text` and what it is made of: `graph`, and `file NAME`
              for each model and Python file.
    input:    what `Source.fingerprint` says.
    settings: everything else that decides the results, as JSON values; never secrets.
    versions: of Weftline, Python and frameworks; when they differ the job goes on with a warning.
    schema:   the output's columns, as text.
    suffix, single_file, extras: how results lie, as `Store.open` was told.
    """

    version: int = VERSION
    pipeline: dict[str, str]
    input: dict[str, str]
    settings: dict[str, Any] = {}
    versions: dict[str, str] = {}
    schema: str = ""
    suffix: str = ""
    single_file: bool = False
    extras: tuple[str, ...] = ()


def differences(old: Manifest, new: Manifest) -> list[str]:
    """Return why a job that began as `old` cannot go on as `new`, one sentence each; none when it can."""
    found = [*_pipeline(old.pipeline, new.pipeline), *_input(old.input, new.input)]
    found += _settings(_plain(old.settings), _plain(new.settings))
    if old.schema != new.schema and not found:
        found.append("the output's columns are not the ones the job began with")
    if (old.suffix, old.single_file) != (new.suffix, new.single_file) and not found:
        found.append(f"results were written as {_form(old)}, and are now wanted as {_form(new)}")
    return found


def version_differences(old: Manifest, new: Manifest) -> list[str]:
    """Return what the job began with and is not what runs now: its results may then differ in bytes."""
    return [
        f"{name}: {new.versions.get(name, 'none')} now, {old.versions.get(name, 'none')} when the job began"
        for name in sorted({*old.versions, *new.versions})
        if old.versions.get(name) != new.versions.get(name)
    ]


def _pipeline(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    if old.get("fingerprint") == new.get("fingerprint"):
        return []
    files = _changes(
        {name: said for name, said in old.items() if name.startswith("file ")},
        {name: said for name, said in new.items() if name.startswith("file ")},
        "the pipeline's ",
    )
    before, now = old.get("text", ""), new.get("text", "")
    lines = [
        line
        for line in difflib.unified_diff(before.splitlines(), now.splitlines(), lineterm="", n=0)
        if not line.startswith(("---", "+++", "@@"))
    ]
    if not lines or not before or not now:
        return files or [f"the pipeline {new.get('name', '')} has changed"]
    shown = [f"    {line}" for line in lines[:SHOWN_MAX]]
    more = [f"    and {len(lines) - SHOWN_MAX} more lines"] if len(lines) > SHOWN_MAX else []
    return ["\n".join([f"the pipeline {new.get('name', '')} has changed:", *shown, *more]), *files]


def _input(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    return _changes(old, new, "input ")


def _changes(old: Mapping[str, str], new: Mapping[str, str], kind: str) -> list[str]:
    found = [f"{kind}{name} is gone" for name in old if name not in new]
    found += [f"{kind}{name} is new" for name in new if name not in old]
    found += [f"{kind}{name} has changed" for name in old if name in new and old[name] != new[name]]
    return found if len(found) <= SHOWN_MAX else [*found[:SHOWN_MAX], f"and {len(found) - SHOWN_MAX} more of the kind"]


def _settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} is {_said(new.get(name))}, and was {_said(old.get(name))} when the job began"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]


def _said(value: Any) -> str:
    return "not set" if value is None else f"{json.dumps(value, ensure_ascii=False):.200}"


def _form(one: Manifest) -> str:
    return f"one {one.suffix} file" if one.single_file else f"a folder of {one.suffix} files"


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as they come back from a file: tuples as lists, keys as text."""
    plain: dict[str, Any] = json.loads(json.dumps(msgspec.to_builtins(settings, str_keys=True)))
    return plain
