"""Preparation common to all runners: inputs, seed and error of a row."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from weftline.engine.jobs.rows import RowBlock, RowError, Unusable
from weftline.errors import WeftlineError, traceback_of
from weftline.nodes.urgency import SEEDS

_STEP = re.compile(r"^step ([A-Za-z_][\w.-]*): ")


def usable(block: RowBlock, row: int, errors: dict[int, RowError]) -> dict[str, Any] | None:
    """Return a row's inputs; None when one of them cannot be had, which is then its error."""
    given = {name: values[row] for name, values in block.inputs.items()}
    for name, value in given.items():
        if isinstance(value, Unusable):
            errors[row] = RowError("", "InputError", f"input {name}: {value.reason}")
            return None
    return {name: value for name, value in given.items() if value is not None}


def row_seed(seed: int, place: int) -> int:
    """Return what chance in a row is drawn from: its own in every run, and unlike its neighbours'."""
    return int.from_bytes(hashlib.blake2b(b"%d/%d" % (seed, place), digest_size=8).digest()) % SEEDS


def row_error(error: WeftlineError) -> RowError:
    """Return what a row's error says: the step at fault apart from the reason."""
    text = str(error)
    found = _STEP.match(text)
    step = getattr(error, "step", "") or (found[1] if found else "")
    reason = text[found.end() :] if found and found[1] == step else text
    return RowError(step, type(error).__name__, " ".join(reason.split()), traceback_of(error))
