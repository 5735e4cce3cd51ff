"""Token file: callers with hashed tokens, rights and rate limits.

    tokens:
      - {name: web, sha256: 9f86d0..., models: [assistant, ocr], requests_per_s: 100, burst: 200}
      - {name: ops, sha256: 60303a..., admin: true}

Only SHA-256 digests are stored, of tokens with 256 random bits (`new_token`), for which a plain digest is enough. The
file is reloaded when it changes; if the new one is invalid, that is logged and the old tokens stay in force.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path

from weftline.engine.serving.auth.token_entries import Token, read_tokens
from weftline.errors import PipelineError, Problem
from weftline.pipelines.spec.document import TEXT_BYTES_MAX

__all__ = ["TOKEN_CHARS_MAX", "Token", "TokenFile", "digest", "new_token", "read_tokens"]

TOKEN_CHARS_MAX = 512
"""Longest accepted token; generated ones have 46 characters, signed tokens of other systems a few hundred."""

CHECK_S = 1.0
"""Shortest interval between checks of the file for changes: the longest life of a revoked token."""

_log = logging.getLogger("weftline.access")


def new_token() -> str:
    """Return a new token, of 256 random bits. Its prefix lets logs redact it."""
    return "wl_" + secrets.token_urlsafe(32)


def digest(token: str) -> str:
    """Return the SHA-256 of a token for the token file, as 64 hexadecimal digits."""
    return _sha256(token).hex()


class TokenFile:
    """The tokens of one file; PipelineError with every problem if it is invalid at the start."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._checked_s = clock()
        self._seen, self._tokens = _read(path)

    @property
    def tokens(self) -> tuple[Token, ...]:
        return self._tokens

    def find(self, token: str) -> Token | None:
        """Return the entry of a token, in constant time."""
        self._refresh()
        if not 0 < len(token) <= TOKEN_CHARS_MAX:
            return None
        shown, found = _sha256(token), None
        for entry in self._tokens:
            if hmac.compare_digest(entry.sha256, shown):
                found = entry
        return found

    def named(self, name: str) -> Token | None:
        """Return the current entry of a name."""
        self._refresh()
        return next((entry for entry in self._tokens if entry.name == name), None)

    def _refresh(self) -> None:
        now_s = self._clock()
        if now_s - self._checked_s < CHECK_S:
            return
        self._checked_s = now_s
        seen = _signature(self._path)
        if seen == self._seen:
            return
        try:
            self._seen, self._tokens = _read(self._path)
        except PipelineError as error:
            self._seen = seen
            _log.error("the token file has changed and cannot be used; the tokens read before stay in force: %s", error)
        else:
            _log.info("the token file was read again: %d tokens", len(self._tokens))


def _read(path: Path) -> tuple[tuple[int, ...], tuple[Token, ...]]:
    try:
        with open(path, "rb", opener=_opener) as file:
            held = os.fstat(file.fileno())
            _check_mode(path, held)
            data = file.read(TEXT_BYTES_MAX + 1)
        text = data.decode()
    except OSError as error:
        raise PipelineError([Problem("", f"cannot be read: {error.strerror}", file=str(path))]) from None
    except UnicodeDecodeError:
        raise PipelineError([Problem("", "is no UTF-8 text", file=str(path))]) from None
    return _sign(held), read_tokens(text, str(path))


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # opening a FIFO does not block


def _check_mode(path: Path, held: os.stat_result) -> None:
    if not stat.S_ISREG(held.st_mode):
        raise PipelineError([Problem("", "is no regular file", file=str(path))])
    mode = stat.S_IMODE(held.st_mode)
    if mode & 0o026:  # the group may read it: Kubernetes mounts secrets that way
        found, fix = f"others may read or write it (mode {mode:04o})", "chmod 600, or 640"
        raise PipelineError([Problem("", found, "a file for the server's user alone", fix, file=str(path))])


def _signature(path: Path) -> tuple[int, ...]:
    try:
        return _sign(path.stat())
    except OSError:
        return ()


def _sign(held: os.stat_result) -> tuple[int, ...]:
    return (held.st_dev, held.st_ino, held.st_mtime_ns, held.st_size, held.st_mode)


def _sha256(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
