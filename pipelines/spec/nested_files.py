"""Nesting of pipeline files as steps, with cycle detection.

Looked at before any of them is loaded: only the `pipeline:` keys of the files are read here, and a file that cannot be
read names no others.
"""

from __future__ import annotations

import os
from pathlib import Path

from weftline.errors import PipelineError
from weftline.nodes.contract import ConfigError
from weftline.pipelines.spec.document import TEXT_BYTES_MAX, read_document

DEPTH_MAX = 8
"""Deepest nesting of pipelines: how many files may stand on the way from the outermost to the innermost."""


def check_nesting(path: Path, inside: tuple[Path, ...]) -> None:
    """Raise ConfigError about `pipeline` when the file at `path` runs itself, or files too deep inside each other.

    inside: the files around it, outermost first, as resolved paths.
    """
    _height(path.resolve(), inside, {})


def _height(path: Path, inside: tuple[Path, ...], known: dict[Path, int]) -> int:
    """Return how many files stand inside each other from `path` on."""
    if path in inside:
        names = [one.name for one in (*inside[inside.index(path) :], path)]
        raise ConfigError("pipeline", f"runs in a circle: {' -> '.join(names)}", fix="remove one of these steps")
    if path not in known:
        deeper = (*inside, path)
        if len(deeper) <= DEPTH_MAX:
            known[path] = 1 + max((_height(one, deeper, known) for one in _named_in(path)), default=0)
    if path not in known or len(inside) + known[path] > DEPTH_MAX:
        way = " -> ".join(one.name for one in (*inside, path))
        raise ConfigError("pipeline", f"{way}: pipelines nested too deep", f"at most {DEPTH_MAX} inside each other")
    return known[path]


def _named_in(path: Path) -> list[Path]:
    """Return the files that the steps of a pipeline file name, as resolved paths."""
    try:
        with path.open("rb") as stream:
            raw = stream.read(TEXT_BYTES_MAX + 1)
        value = read_document(raw.decode("utf-8"), path.name, os.environ).value
    except (OSError, UnicodeDecodeError, PipelineError):
        return []
    steps = value.get("steps") if isinstance(value, dict) else None
    entries = steps.values() if isinstance(steps, dict) else ()
    named = [step.get("pipeline") for step in entries if isinstance(step, dict)]
    paths = [path.parent / one for one in named if isinstance(one, str) and "\0" not in one]
    return [found for one in paths if (found := _resolved(one)) is not None]


def _resolved(path: Path) -> Path | None:
    """Return where a path leads; None when its links run in a circle."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return None
