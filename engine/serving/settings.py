"""Loader of serve files into `ServeConfig`; reports every problem with its line.

    settings = read_settings("serve.yaml")
    settings.config.grpc.port

Relative paths in a file are relative to its folder. What flags change, and whether the pipelines themselves are sound,
is `assembly`'s.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from weftline.engine.serving.config import (
    GrpcDoor,
    HttpDoor,
    Logs,
    ServeConfig,
    ServedPipeline,
    ServeLimits,
    Tls,
)
from weftline.engine.serving.keys import (
    COLLECTOR_PATTERN,
    ENTRIES,
    GROUP_PATTERN,
    HOST_PATTERN,
    MODEL_PATTERN,
    ServeFile,
)
from weftline.errors import PipelineError, Problem
from weftline.pipelines.check.problems import from_validation
from weftline.pipelines.spec.document import TEXT_BYTES_MAX, Document, hide_secrets, read_document
from weftline.pipelines.spec.loader import line_of
from weftline.pipelines.spec.schema import NAME_PATTERN

_WORDS = {
    MODEL_PATTERN: "1 to 128 letters, digits, '.', '_' and '-', not starting with a dot",
    NAME_PATTERN: "a step's name",
    HOST_PATTERN: "an address, such as 127.0.0.1, :: or a host name",
    GROUP_PATTERN: "a group's name",
    COLLECTOR_PATTERN: "http://HOST:PORT or https://HOST:PORT, or '' for nowhere",
}
"""What the regular expressions stand for."""


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What a serve file says.

    file:  as the user named it; '' when there is none.
    lines: the 1-based line of each key in it, by dotted path.
    """

    config: ServeConfig = field(default_factory=lambda: ServeConfig({}))
    file: str = ""
    lines: Mapping[str, int] = field(default_factory=dict)

    def says(self, path: str) -> bool:
        """Whether the file has this key."""
        return path in self.lines

    def problem(self, path: str, found: str, expected: str = "", fix: str = "") -> Problem:
        """Return a problem with its line."""
        return Problem(path, found, expected, fix, line_of(path, self.lines), self.file)


def read_settings(path: str | Path) -> ServeSettings:
    """Return what the YAML file at `path` says; PipelineError lists everything that is wrong with it."""
    return to_settings(read_file(path), str(path), Path(path).parent)


def to_settings(document: Document, file: str, folder: Path) -> ServeSettings:
    """Return what a document says; PipelineError lists everything that is wrong with it.

    file:   its name in problems.
    folder: what relative paths in it are relative to.
    """
    try:
        if not isinstance(document.value, Mapping):
            found = "an empty file" if document.value is None else "no mapping"
            raise PipelineError([*document.problems, Problem("", found, "a mapping with `pipelines:`", file=file)])
        model = ServeFile.model_validate(document.value)
    except ValidationError as error:
        wrong = [_spoken(one) for one in from_validation(error, document.value, "", _known)]
        fresh = [one for one in wrong if one.path not in document.unread]
        placed = [dataclasses.replace(one, file=file, line=line_of(one.path, document.lines)) for one in fresh]
        raise PipelineError(hide_secrets(one, document.secrets) for one in [*document.problems, *placed]) from None
    if document.problems:
        raise PipelineError(document.problems)
    return ServeSettings(_config(model, folder), file, document.lines)


def is_serve_file(document: Document) -> bool:
    """Whether a document is a serve file, rather than a pipeline's."""
    return isinstance(document.value, Mapping) and "pipelines" in document.value and "steps" not in document.value


def read_file(path: str | Path) -> Document:
    """Return the YAML document at `path`; PipelineError when it cannot be read."""
    name = str(path)
    try:
        with Path(path).open("rb") as stream:
            raw = stream.read(TEXT_BYTES_MAX + 1)
        return read_document(raw.decode("utf-8"), name, os.environ)
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        problem = Problem("", "not UTF-8", fix="save the file as UTF-8", line=line, file=name)
    except FileNotFoundError:
        problem = Problem("", "there is no such file", fix="give the path of a YAML file", file=name)
    except OSError as error:
        problem = Problem("", f"cannot be read: {error.strerror}", file=name)
    raise PipelineError([problem])


def to_text(config: ServeConfig) -> str:
    """Return a configuration as a serve file that says the same, defaults included."""
    return str(yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True, default_flow_style=None, width=100))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: _plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def _config(model: Any, folder: Path) -> ServeConfig:
    def inside(path: Path | None) -> Path | None:
        return None if path is None else folder / path

    pipelines = {}
    for name, entry in model.pipelines.items():
        pipelines[name] = ServedPipeline(folder / entry.file, entry.expose, entry.load)
    tls = None
    if model.tls is not None:
        tls = Tls(folder / model.tls.certificate, folder / model.tls.key, inside(model.tls.client_ca))
    return ServeConfig(
        pipelines=pipelines,
        grpc=GrpcDoor(**dict(model.grpc) | {"socket": inside(model.grpc.socket)}),
        http=HttpDoor(**dict(model.http)) if model.http is not None else None,
        tls=tls,
        tokens=inside(model.tokens),
        insecure=model.insecure,
        shared_memory=model.shared_memory,
        grace_s=model.grace_s,
        limits=ServeLimits(**dict(model.limits)),
        logs=Logs(**dict(model.logs)),
        otlp=model.otlp,
    )


def _known(loc: tuple[str | int, ...]) -> Iterable[str]:
    """Return the keys allowed in the mapping at `loc`."""
    entry: type[BaseModel] = ENTRIES[str(loc[0])] if loc else ServeFile
    return entry.model_fields


def _spoken(problem: Problem) -> Problem:
    """Return the problem with regular expressions put into words, and validators' errors without their preamble."""
    expected = next((text for pattern, text in _WORDS.items() if pattern in problem.expected), problem.expected)
    return dataclasses.replace(problem, expected=expected)
