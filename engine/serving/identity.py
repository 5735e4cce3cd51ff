"""Name and version of the server in all protocols."""

from __future__ import annotations

from importlib import metadata

NAME = "weftline"


def version() -> str:
    """Return the installed version; '' in a clone that is not installed."""
    try:
        return metadata.version(NAME)
    except metadata.PackageNotFoundError:
        return ""
