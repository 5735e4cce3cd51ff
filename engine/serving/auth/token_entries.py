"""Parser of token files that reports every mistake at once.

Pure. A problem never quotes a digest, or the value in its place, which may be the token itself.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from weftline.errors import PipelineError, Problem
from weftline.pipelines.check.problems import did_you_mean
from weftline.pipelines.spec.document import read_document

TOKENS_MAX = 512
"""Most tokens of a file: each is compared for every request, which takes 0.1 us apiece."""

RATE_MAX = 1e9

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_OF_NOTHING = hashlib.sha256(b"").hexdigest()
_KEYS = ("name", "sha256", "models", "admin", "memory", "metrics", "requests_per_s", "burst")


@dataclass(frozen=True, slots=True)
class Token:
    """One entry of the file.

    name:           for logs and figures.
    sha256:         digest of the token, 32 bytes.
    models:         names of the models it may call, in full (`ocr`, `ocr.detect`); None: every one.
    admin:          it may load and unload, change settings, and do everything else.
    memory:         it may register, list, unregister and use shared memory; these tokens share all regions.
    metrics:        it may read the metrics.
    requests_per_s: average rate of calls; None: unlimited.
    burst:          most calls at once after a pause.
    """

    name: str
    sha256: bytes
    models: frozenset[str] | None = None
    admin: bool = False
    memory: bool = False
    metrics: bool = False
    requests_per_s: float | None = None
    burst: float = 1.0


def read_tokens(text: str, file: str) -> tuple[Token, ...]:
    """Return the entries of a token file's text; PipelineError with every problem in it. `file` is for problems."""
    document = read_document(text, file)
    found = list(_entries(document.value))
    problems = [*document.problems]
    for path, one in found:
        if isinstance(one, Problem):
            line = document.lines.get(one.path) or document.lines.get(path, 0)
            problems.append(Problem(one.path, one.found, one.expected, one.fix, line, file))
    if problems:
        raise PipelineError(problems)
    return tuple(one for _, one in found if isinstance(one, Token))


def _entries(value: Any) -> Iterator[tuple[str, Token | Problem]]:
    listed = value.get("tokens") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(listed, list):
        yield "", Problem("tokens", "missing" if listed is None else "no list", "a list of mappings, tokens: [...]")
        return
    for key in value:
        if key != "tokens":
            yield key, Problem(key, "unknown key", fix=did_you_mean(key, ["tokens"]))
    if not 1 <= len(listed) <= TOKENS_MAX:
        yield "tokens", Problem("tokens", f"{len(listed)} entries", f"1 to {TOKENS_MAX}")
    names: set[str] = set()
    digests: set[str] = set()
    for at, one in enumerate(listed):
        path = f"tokens.{at}"
        if not isinstance(one, Mapping):
            yield path, Problem(path, "no mapping", "{name: ..., sha256: ...}")
            continue
        wrong = [*_problems(path, one), *_twice(path, one, names, digests)]
        if wrong:
            yield from ((path, problem) for problem in wrong)
        else:
            yield path, _token(one)


def _twice(path: str, one: Mapping[str, Any], names: set[str], digests: set[str]) -> Iterator[Problem]:
    name, sha256 = str(one.get("name")), str(one.get("sha256")).lower()
    if name in names:
        yield Problem(f"{path}.name", f"a second {name:.128}", "a name of its own")
    if sha256 in digests:
        yield Problem(f"{path}.sha256", "the digest of an earlier entry", "a token of its own")
    names.add(name)
    digests.add(sha256)


def _problems(path: str, one: Mapping[str, Any]) -> Iterator[Problem]:
    for key in one:
        if key not in _KEYS:
            yield Problem(f"{path}.{key}", "unknown key", f"one of {', '.join(_KEYS)}", did_you_mean(key, _KEYS))
    name, sha256, models = one.get("name"), one.get("sha256"), one.get("models")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        yield Problem(f"{path}.name", _found(name), "1 to 128 letters, digits, dots, dashes and underscores")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        # The value may be the token itself, which must not appear in a terminal.
        found = "missing" if sha256 is None else "no digest"
        yield Problem(f"{path}.sha256", found, "64 hexadecimal digits", "make one with `weftline token`")
    elif sha256.lower() == _OF_NOTHING:
        yield Problem(f"{path}.sha256", "the digest of an empty token", "a token's", "make one with `weftline token`")
    if "models" in one and not (
        isinstance(models, list) and all(isinstance(each, str) and _NAME.fullmatch(each) for each in models)
    ):
        yield Problem(f"{path}.models", _found(models), "a list of names", "leave it out for every model")
    for key in ("admin", "memory", "metrics"):
        if key in one and not isinstance(one[key], bool):
            yield Problem(f"{path}.{key}", _found(one[key]), "true or false")
    for key in ("requests_per_s", "burst"):
        if key in one and not _is_rate(one[key], 1 if key == "burst" else 0):
            least = "at least 1" if key == "burst" else "above 0"
            yield Problem(f"{path}.{key}", _found(one[key]), f"a number {least}")
    if "burst" in one and "requests_per_s" not in one:
        yield Problem(f"{path}.burst", "written without requests_per_s", fix="add requests_per_s")


def _is_rate(value: object, least: float) -> bool:
    return type(value) in (int, float) and max(least, 1e-6) <= value <= RATE_MAX  # type: ignore[operator]  # NaN is not


def _found(value: object) -> str:
    if value is None:
        return "missing"
    shown = repr(value) if isinstance(value, str | int | float | bool) else f"a {type(value).__name__}"
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _token(one: Mapping[str, Any]) -> Token:
    per_s = one.get("requests_per_s")
    models = one.get("models")
    return Token(
        one["name"],
        bytes.fromhex(one["sha256"]),
        None if models is None else frozenset(models),
        one.get("admin", False),
        one.get("memory", False),
        one.get("metrics", False),
        None if per_s is None else float(per_s),
        float(one.get("burst", max(1.0, per_s or 1.0))),
    )
