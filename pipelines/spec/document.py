"""Safe YAML parser that keeps the line of every path and expands environment variables.

The parser's event stream is composed here without recursion, so that every limit is checked before anything is built:
size, nesting, number of events. Features that a pipeline file does not need are refused: anchors and aliases (332 bytes
of them can stand for a thousand million values), tags, merge keys, several documents. PyYAML's own composers are not
used: they recurse, and the C one crashes the process on deep nesting.

Plain scalars follow the YAML 1.2 core schema, so `on`, `yes` and `12:30` are text and `012` is twelve. Keys are always
text.

Environment variables in values are `${NAME}` and `${NAME:-default}`:

    model: ${MODELS}/detector.onnx
    otlp: ${COLLECTOR:-http://localhost:4317}

A variable that is unset, or empty where a default is written, has the default as its value; without one that is a
problem. `$${` is the text `${`. Keys are never expanded, and neither are texts for models (`LITERAL_KEYS`).

A variable whose name contains KEY, TOKEN, SECRET, PASSWORD, PASSWD or CREDENTIAL is a secret: wherever Weftline prints
or stores a pipeline, its value is written as `${NAME}` again, and it is excluded from a job's fingerprint.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from weftline.errors import PipelineError, Problem, first_line

LITERAL_KEYS = frozenset({"about", "prompt", "template", "when"})
"""Keys below which nothing is expanded: documentation, texts for models, and expressions."""

_VARIABLE = re.compile(r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<default>:-[^{}]*)?\}")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Return True when the value of a variable of that name must not be printed or passed on."""
    return _SECRET.search(name) is not None


class UnsetVariable(ValueError):
    """A variable is not set and has no default; the message is its name."""


@dataclass(slots=True)
class Variables:
    """The environment that a document is read with.

    secrets: the secret values that were used, each with its printed replacement.
    """

    values: Mapping[str, str] = field(default_factory=dict, repr=False)
    secrets: dict[str, str] = field(default_factory=dict, repr=False)

    def expand(self, text: str) -> str:
        """Return `text` with its variables replaced; UnsetVariable for the first one that has no value."""
        return _VARIABLE.sub(self._value, text)

    def _value(self, match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        if name is None:
            return "${"
        value = self.values.get(name)
        if default is not None and not value:
            return default[2:]
        if value is None:
            raise UnsetVariable(name)
        if value and is_secret(name):
            self.secrets[value] = f"${{{name}}}"
        return value


def escaped(value: Any) -> Any:
    """Escape plain values for a document, so that reading it expands nothing in them."""
    if isinstance(value, str):
        return value.replace("${", "$${")
    if isinstance(value, Mapping):
        return {key: one if key in LITERAL_KEYS else escaped(one) for key, one in value.items()}
    return [escaped(one) for one in value] if isinstance(value, list | tuple) else value


def without_secrets(value: Any, secrets: Mapping[str, str]) -> Any:
    """Replace every secret in a text, or in plain values, by its variable."""
    if not secrets:
        return value
    if isinstance(value, str):
        for secret in sorted(secrets, key=len, reverse=True):
            value = value.replace(secret, secrets[secret])
        return value
    if isinstance(value, Mapping):
        return {without_secrets(key, secrets): without_secrets(one, secrets) for key, one in value.items()}
    return [without_secrets(one, secrets) for one in value] if isinstance(value, list | tuple) else value


def hide_secrets(problem: Problem, secrets: Mapping[str, str]) -> Problem:
    """Replace every secret in a problem by its variable."""
    if not secrets:
        return problem
    texts = {name: without_secrets(getattr(problem, name), secrets) for name in ("path", "found", "expected", "fix")}
    return dataclasses.replace(problem, **texts)


TEXT_BYTES_MAX = 1_000_000
"""Largest file read; the largest sensible pipeline is a few tens of kilobytes."""

DEPTH_MAX = 32
"""Deepest nesting of mappings and lists; the format itself needs five."""

EVENTS_MAX = 10_000
"""Most YAML events (scalars, starts and ends) of a file: some 500 steps, and read in under 0.1 s."""

DIGITS_MAX = 32
"""Longest plain number read as a number, in characters."""

_INT = re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$")
_WORDS: dict[str, Any] = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
    ".inf": float("inf"), "+.inf": float("inf"), "-.inf": float("-inf"), ".nan": float("nan"),
}  # fmt: skip
_PARSER: Any = getattr(
    yaml, "CSafeLoader", yaml.SafeLoader
)  # libyaml's event stream does not recurse, and is 10x faster


@dataclass(frozen=True, slots=True)
class Document:
    """The values of a file, the 1-based line of each dotted path, and its non-fatal problems.

    unread:  paths with null for a value that could not be read; its problem is in `problems`.
    secrets: secret values from the environment, each with its printed replacement.
    """

    value: Any
    lines: dict[str, int]
    problems: tuple[Problem, ...] = ()
    unread: frozenset[str] = frozenset()
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(slots=True)
class _Open:
    """A mapping or list that is being read."""

    value: dict[str, Any] | list[Any]
    path: str
    key: str | None = None  # of a mapping: the key whose value comes next
    skips: bool = False  # the next value is dropped: its key was refused


@dataclass(slots=True)
class _Reader:
    file: str
    variables: Variables | None = None
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)
    stack: list[_Open] = field(default_factory=list)
    root: Any = None
    documents: int = 0

    def read(self, events: Iterator[Any]) -> None:
        for count, event in enumerate(events):
            if count > EVENTS_MAX:
                raise self._fatal(event, f"more than {EVENTS_MAX} YAML events", "a smaller file")
            self._read_event(event)

    def _read_event(self, event: Any) -> None:
        if isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            self.stack.pop()
        elif isinstance(event, yaml.AliasEvent):
            self._refuse(event, f"an alias, *{event.anchor:.40}", "write the value out; aliases are not followed")
            self.unread.add(self._place(None, event))
        elif isinstance(event, yaml.NodeEvent):
            self._read_node(event)
        elif isinstance(event, yaml.DocumentStartEvent):
            self.documents += 1
            if self.documents > 1:
                raise self._fatal(event, "a second document starts here", "one pipeline a file")

    def _read_node(self, event: Any) -> None:
        if event.anchor is not None:
            self._refuse(event, f"an anchor, &{event.anchor:.40}", "remove it; aliases are not followed")
        if event.tag is not None:
            self._refuse(event, f"a tag, {event.tag:.60}", "remove it; types follow from the schema")
        if isinstance(event, yaml.ScalarEvent):
            if not self._read_key(event):
                self._place(self._scalar(event), event)
            return
        value: dict[str, Any] | list[Any] = {} if isinstance(event, yaml.MappingStartEvent) else []
        self.stack.append(_Open(value, self._place(value, event)))
        if len(self.stack) > DEPTH_MAX:
            raise self._fatal(event, f"nested deeper than {DEPTH_MAX}", f"at most {DEPTH_MAX} levels")

    def _read_key(self, event: Any) -> bool:
        """Consume a scalar as the key of the open mapping, if a key comes next."""
        top = self.stack[-1] if self.stack else None
        if top is None or not isinstance(top.value, dict) or top.key is not None or top.skips:
            return False
        key, path = event.value, _join(top.path, event.value)
        if key == "<<" and event.implicit[0]:
            self._refuse(event, "a merge key, <<", "write the keys out", path)
            top.skips = True
        elif key in top.value:
            self._refuse(event, f"written twice, first on line {self.lines[path]}", "keep one of them", path)
            top.skips = True
        else:
            self.lines[path] = _line(event)
            top.key = key
        return True

    def _place(self, value: Any, event: Any) -> str:
        """Store `value` at the current position and return its path."""
        if not self.stack:
            self.root = value
            return ""
        top = self.stack[-1]
        if isinstance(top.value, list):
            path = _join(top.path, str(len(top.value)))
            self.lines[path] = _line(event)
            top.value.append(value)
        elif top.skips:
            path, top.skips = top.path, False
        elif top.key is None:
            raise self._fatal(event, "a list or mapping as a key", "text as a key")
        else:
            path = _join(top.path, top.key)
            top.value[top.key], top.key = value, None
        return path

    def _scalar(self, event: Any) -> Any:
        text = event.value
        if self.variables is not None and "${" in text:
            text = self._expanded(event, self.variables)
        if not event.implicit[0]:  # quoted, or a block of text
            return text
        if text in _WORDS:
            return _WORDS[text]
        is_int = bool(_INT.match(text))
        if not is_int and not _FLOAT.match(text):
            return text
        if len(text) > DIGITS_MAX:
            self._refuse(event, f"a number of {len(text)} characters", "put it in quotes if it is text")
            self.unread.add(self._path())
            return None
        return int(text, 0 if text[:2] in ("0o", "0x") else 10) if is_int else float(text)

    def _expanded(self, event: Any, variables: Variables) -> str:
        path = self._path()
        if not LITERAL_KEYS.isdisjoint(path.split(".")):
            return str(event.value)
        try:
            return variables.expand(event.value)
        except UnsetVariable as error:
            found = f"the environment variable {error} is not set"
            self._refuse(
                event, found, f"set it, give a default as ${{{error}:-default}}, or write $${{ for the text ${{"
            )
            self.unread.add(path)
            return ""

    def _refuse(self, event: Any, found: str, fix: str, path: str | None = None) -> None:
        self.problems.append(
            Problem(self._path() if path is None else path, found, fix=fix, line=_line(event), file=self.file)
        )

    def _fatal(self, event: Any, found: str, expected: str) -> PipelineError:
        path = self._path() if self.documents < 2 and len(self.stack) <= DEPTH_MAX else ""
        problem = Problem(path, found, expected, line=_line(event), file=self.file)
        return PipelineError([*self.problems, problem])

    def _path(self) -> str:
        """Return the path of the value that comes next."""
        if not self.stack:
            return ""
        top = self.stack[-1]
        return _join(top.path, str(len(top.value)) if isinstance(top.value, list) else top.key or "")


def read_file(path: str | Path) -> Document:
    """Return the YAML document at `path`, with this process's environment; PipelineError when it cannot be read."""
    name, path = str(path), Path(path)
    try:
        with path.open("rb") as stream:
            raw = stream.read(TEXT_BYTES_MAX + 1)
    except OSError as error:
        found = "there is no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise PipelineError([Problem("", found, fix="give the path of a YAML file", file=name)]) from None
    if path.suffix == ".py":
        fix = "write the YAML of a pipeline built in Python to a file: Path('pipeline.yaml').write_text(p.to_yaml())"
        raise PipelineError([Problem("", "is a Python file", "a YAML file", fix, file=name)])
    if len(raw) > TEXT_BYTES_MAX:
        raise PipelineError([Problem("", f"more than {TEXT_BYTES_MAX} bytes", "a smaller file", file=name)])
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        found = f"byte 0x{raw[error.start]:02x} is not UTF-8"
        raise PipelineError([Problem("", found, fix="save the file as UTF-8", line=line, file=name)]) from None
    return read_document(text, name, os.environ)


def read_document(text: str, file: str, environment: Mapping[str, str] | None = None) -> Document:
    """Return the plain values of YAML `text`. PipelineError: not YAML, or a YAML feature that is not allowed.

    environment: values of `${NAME}`; None: variables are not expanded.

    `file` is only used in problems. Duplicate keys, tags, anchors, aliases and merge keys are listed in `problems`
    (a duplicate's first value counts, an alias is null); all other errors raise.
    """
    if len(text) > TEXT_BYTES_MAX or len(text.encode("utf-8", "replace")) > TEXT_BYTES_MAX:
        raise PipelineError([Problem("", f"more than {TEXT_BYTES_MAX} bytes", "a smaller file", file=file)])
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise PipelineError([Problem("", "a NUL character", "text", "save the file as UTF-8 text", line, file)])
    reader = _Reader(file, None if environment is None else Variables(environment))
    try:
        reader.read(iter(yaml.parse(text.removeprefix("\ufeff"), Loader=_PARSER)))
    except yaml.MarkedYAMLError as error:
        raise PipelineError([*reader.problems, _syntax(error, file, text)]) from None
    except (yaml.YAMLError, UnicodeError) as error:
        raise PipelineError([*reader.problems, Problem("", f"not YAML: {first_line(error):.120}", file=file)]) from None
    secrets = reader.variables.secrets if reader.variables is not None else {}
    return Document(reader.root, reader.lines, tuple(reader.problems), frozenset(reader.unread), secrets)


def _syntax(error: yaml.MarkedYAMLError, file: str, text: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    found = " ".join(part for part in (error.context, error.problem) if part) or "not YAML"
    lines = text.splitlines()
    line = lines[mark.line] if mark and mark.line < len(lines) else ""
    tab = "\t" in line[: len(line) - len(line.lstrip())]
    fix = "indent with spaces" if tab else "check indentation, colons and quotes here and on the line above"
    return Problem("", f"not YAML: {found}", fix=fix, line=mark.line + 1 if mark else 0, file=file)


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def _join(path: str, key: str) -> str:
    """Return the path of `key` under `path`; long keys are shortened for display."""
    key = key if len(key) <= 80 else key[:77] + "..."
    return f"{path}.{key}" if path and key else path or key


def is_serve_file(document: Document) -> bool:
    """Return True for a serve file, False for a pipeline file."""
    return isinstance(document.value, Mapping) and "pipelines" in document.value and "steps" not in document.value
