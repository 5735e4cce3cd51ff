"""What nodes count of themselves, on its way to whoever reads figures: taken in the worker, kept by the crew.

A node that offers figures is asked between its rounds and calls, by the thread that runs them; a beat only carries what
was taken last. Nodes are not trusted to stay small: what is no bounded set of named, finite numbers goes nowhere.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping

from weftline.engine.messages import Figures
from weftline.nodes.contract import Node

FIGURES_MAX = 64
"""Most figures of one node: a beat of a worker stays a short message."""

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")

_log = logging.getLogger(__name__)


def offers(node: Node) -> bool:
    """Whether a node has figures of its own; the others are never asked."""
    return type(node).figures is not Node.figures


def take(step: int, name: str, node: Node) -> Figures | None:
    """Return a node's figures now; None when it cannot say, or says what cannot be passed on."""
    try:
        values = {str(key): float(value) for key, value in node.figures().items()}
    except Exception:
        _log.exception("step %s: the node could not say its figures", name)
        return None
    if not sound(values):
        _log.warning("step %s: its figures go nowhere: expected at most %d finite numbers, named like pages_free",
                     name, FIGURES_MAX)  # fmt: skip
        return None
    return Figures(step, values)


def sound(values: Mapping[str, float]) -> bool:
    """Whether these are few enough, well named, and all finite."""
    return len(values) <= FIGURES_MAX and all(
        _NAME.fullmatch(key) is not None and math.isfinite(value) for key, value in values.items()
    )
