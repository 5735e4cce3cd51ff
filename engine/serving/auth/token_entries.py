"""Token files: their entries, and a parser that reports every mistake at once.

Pure. A problem never quotes a digest, or the value in its place, which may be the token itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from msgspec import Meta

from weftline.errors import PipelineError, Problem
from weftline.fields import Written, worded
from weftline.nodes.contract import ConfigError
from weftline.pipelines.check.validation import read
from weftline.pipelines.spec.document import read_document
from weftline.pipelines.spec.loader import line_of

TOKENS_MAX = 512
"""Most tokens of a file: each is compared for every request, which takes 0.1 us apiece."""

RATE_MAX = 1e9

_OF_NOTHING = hashlib.sha256(b"").digest()
_MAKE_ONE = "make one with `weftline token`"


def _to_digest(value: str) -> bytes:
    sha256 = bytes.fromhex(value)
    if sha256 == _OF_NOTHING:
        raise ConfigError("", "the digest of an empty token", "a token's", _MAKE_ONE)
    return sha256


TokenName = Annotated[
    str, worded("1 to 128 letters, digits, dots, dashes and underscores", pattern=r"^[A-Za-z0-9._-]{1,128}$")
]
_HEX = Annotated[str, worded("64 hexadecimal digits", pattern=r"^[0-9a-fA-F]{64}$")]
Digest = Annotated[bytes, Written(_HEX, _to_digest, bytes.hex)]


@dataclass(frozen=True, slots=True)
class Token:
    """One entry of the file."""

    name: TokenName
    """Its name in logs and figures."""

    sha256: Digest
    """Digest of the token, 32 bytes."""

    models: frozenset[TokenName] | None = None
    """Names of the models it may call, in full (`ocr`, `ocr.detect`); None: every one."""

    admin: bool = False
    """It may load and unload, change settings, and do everything else."""

    memory: bool = False
    """It may register, list, unregister and use shared memory; these tokens share all regions."""

    metrics: bool = False
    """It may read the metrics."""

    requests_per_s: Annotated[float, Meta(gt=0, le=RATE_MAX)] | None = None
    """Average rate of calls; None: unlimited."""

    burst: Annotated[float, Meta(ge=1, le=RATE_MAX)] | None = None
    """Most calls at once after a pause; None: those of a second."""

    @property
    def burst_calls(self) -> float:
        """Most calls at once after a pause."""
        return max(1.0, self.requests_per_s or 1.0) if self.burst is None else self.burst


@dataclass(frozen=True, slots=True)
class _TokenList:
    """The whole file."""

    tokens: Annotated[tuple[Token, ...], Meta(min_length=1, max_length=TOKENS_MAX)]


def read_tokens(text: str, file: str) -> tuple[Token, ...]:
    """Return the entries of a token file's text; PipelineError with every problem in it. `file` is for problems."""
    document = read_document(text, file)
    found, wrong = read(_TokenList, document.value if isinstance(document.value, Mapping) else {})
    wrong = [*map(_without_secret, wrong), *_conflicts(document.value)]
    placed = [replace(one, line=line_of(one.path, document.lines), file=file) for one in wrong]
    if document.problems or placed:
        raise PipelineError([*document.problems, *placed])
    tokens: tuple[Token, ...] = found.tokens
    return tokens


def _without_secret(problem: Problem) -> Problem:
    """Return a problem without a value that may be the token itself: a digest, a whole entry or list."""
    key = problem.path.rpartition(".")[2]
    if key == "sha256" and "digest" not in problem.found:
        return replace(problem, found="missing" if problem.found == "missing" else "no digest", fix=_MAKE_ONE)
    if key == "models":
        return replace(problem, fix="leave it out for every model")
    of_entry = key in ("", "tokens") or key.isdecimal()
    if of_entry and not problem.found.startswith(("a ", "an ", "missing")):
        return replace(problem, found="a single value")
    return problem


def _conflicts(value: Any) -> Iterator[Problem]:
    """Yield problems of entries that have the name or digest of another one, and of keys that need another one."""
    listed = value.get("tokens") if isinstance(value, Mapping) else None
    names: set[str] = set()
    digests: set[str] = set()
    for at, one in enumerate(listed if isinstance(listed, list) else ()):
        if not isinstance(one, Mapping):
            continue
        name, sha256 = str(one.get("name")), str(one.get("sha256")).lower()
        if name in names:
            yield Problem(f"tokens.{at}.name", f"a second {name:.128}", "a name of its own")
        if sha256 in digests:
            yield Problem(f"tokens.{at}.sha256", "the digest of an earlier entry", "a token of its own")
        if "burst" in one and "requests_per_s" not in one:
            yield Problem(f"tokens.{at}.burst", "written without requests_per_s", fix="add requests_per_s")
        names.add(name)
        digests.add(sha256)
