"""Validation of names of models, versions and other resources.

A name is a key of a registry and never part of a path; that it also could not be one is the second fence.
"""

from __future__ import annotations

import re

from weftline.errors import InputError

NAME_CHARS_MAX = 128
"""Longest name."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)


def check_name(name: object, what: str = "model") -> str:
    """Return `name` when it is one: 1 to 128 letters, digits, dots, dashes and underscores. InputError otherwise.

    what: what it names, for the message, which shows none of it: a name nobody could have given may be anything.
    """
    if isinstance(name, str) and _NAME.fullmatch(name):
        return name
    found = f"a name of {len(name)} characters" if isinstance(name, str) else "something that is no text"
    raise InputError(f"{what}: found {found}, expected 1 to {NAME_CHARS_MAX} of A-Z a-z 0-9 . _ -")


def check_version(version: object) -> str:
    """Return `version` when it is '' (the one that serves) or a name; InputError otherwise."""
    return "" if version == "" else check_name(version, "model version")
