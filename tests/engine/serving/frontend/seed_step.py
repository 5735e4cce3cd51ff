"""A step that answers with the seed and the priority of its item."""

from __future__ import annotations

import weftline


def brought(value: str) -> str:
    """Return 'seed priority'."""
    here = weftline.current()
    return f"{here.seed} {here.priority}"
