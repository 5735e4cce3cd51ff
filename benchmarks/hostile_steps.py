"""The step of benchmarks/ingress_hostile_limits.py whose answer is many times its request."""

import numpy as np


def grows(x: "uint8[N]") -> "uint8[M]":  # noqa: F821 - port types are no names
    """Return 8 MB."""
    return np.full(8 << 20, x[0] if len(x) else 0, np.uint8)
