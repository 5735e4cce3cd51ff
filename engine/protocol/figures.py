"""Collect and validate the statistics of nodes.

The thread that runs a node calls its `figures` between rounds and calls. A heartbeat carries the last result. Node
output is untrusted: a result that is not a bounded set of named, finite numbers is dropped.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping

from weftline.engine.protocol.messages import NodeStats
from weftline.nodes.contract import Node

FIGURES_MAX = 64
"""Limit on the statistics of one node: it keeps heartbeats short."""

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")

_log = logging.getLogger(__name__)


def offers(node: Node) -> bool:
    """Return True if a node overrides `figures`; it is not called on other nodes."""
    return type(node).figures is not Node.figures


def take(step: int, name: str, node: Node) -> NodeStats | None:
    """Return the current statistics of a node; None if it raises or returns invalid ones."""
    try:
        values = {str(key): float(value) for key, value in node.figures().items()}
    except Exception:
        _log.exception("step %s: the node could not say its figures", name)
        return None
    if not sound(values):
        _log.warning("step %s: its figures go nowhere: expected at most %d finite numbers, named like pages_free",
                     name, FIGURES_MAX)  # fmt: skip
        return None
    return NodeStats(step, values)


def sound(values: Mapping[str, float]) -> bool:
    """Return True if statistics are within the limit, validly named and finite."""
    return len(values) <= FIGURES_MAX and all(
        _NAME.fullmatch(key) is not None and math.isfinite(value) for key, value in values.items()
    )
