"""Steps of benchmarks/ingress_hostile_limits.py: an answer many times its request, and inputs that are decoded."""

import numpy as np


def grows(x: "uint8[N]") -> "uint8[M]":  # noqa: F821 - port types are no names
    """Return 8 MB."""
    return np.full(8 << 20, x[0] if len(x) else 0, np.uint8)


def shape_of(x: "image") -> "json":  # noqa: F821
    """Return the sizes of a picture."""
    return list(x.shape)


def length_of(x: "audio") -> "json":  # noqa: F821
    """Return the number of samples of a recording."""
    return len(x)
