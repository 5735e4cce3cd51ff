"""Error messages for failed writes: cause, state of the results and remedy."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from weftline.errors import OutputFailed

_REMEDIES = {
    errno.ENOSPC: "free space and ",
    errno.EDQUOT: "free space and ",
    errno.EFBIG: "raise the limit on file sizes and ",
    errno.EROFS: "make it writable and ",
    errno.EACCES: "make it writable and ",
    errno.EPERM: "make it writable and ",
    errno.EIO: "see to the disk and ",
}
_REASONS = {errno.ENOSPC: "no space left on device", errno.EDQUOT: "the quota is used up"}


@contextlib.contextmanager
def told(out: str, what: str, committed_rows: int | None = None) -> Iterator[None]:
    """Turn an OSError inside into OutputFailed.

    what:           such as 'part 3 could not be written'.
    committed_rows: rows that are safe; None: nothing is said of them.
    """
    try:
        yield
    except OSError as error:
        safe = "" if committed_rows is None else f"{count(committed_rows)} rows are committed; "
        remedy = _REMEDIES.get(error.errno or 0, "")
        raise OutputFailed(f"{out}: {what}: {reason(error)}; {safe}{remedy}run the same command again") from error


def reason(error: OSError) -> str:
    """Return why a call failed, without paths."""
    if error.errno in _REASONS:
        return _REASONS[error.errno]
    said = error.strerror or (os.strerror(error.errno) if error.errno else "") or str(error) or type(error).__name__
    return said[:1].lower() + said[1:]


def count(number: int) -> str:
    """Return a number with its thousands apart."""
    return f"{number:,}".replace(",", " ")
