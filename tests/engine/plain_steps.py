"""Functions for random pipelines: pure, so that calling them in plain Python says what the engine must answer."""

# ruff: noqa: F821 - port types are no names

import numpy as np


def mark(a: str) -> str:
    return f"({a})" if len(a) < 40 else a[-20:]


def both(a: str, b: str) -> str:
    return f"{a}+{b}"[-40:]


def maybe(a: str, b: str | None = None) -> str:
    return f"{a}|{b}"[-40:]


def picky(a: str) -> str:
    if len(a) % 3 == 0:
        raise ValueError("a multiple of three")
    return f"ok {a}"[-40:]


def together(a: str) -> str:
    """Called with all items of a batch, and unable to tell them apart."""
    if any(len(text) % 4 == 0 for text in a):
        raise ValueError("a multiple of four in the batch")
    return [f"all {text}"[-40:] for text in a]


def kind(a: str) -> str:
    return ("x", "y", "z")[len(a) % 3]


def parts(a: str) -> "list[text]":
    return [a[:place] for place in range(len(a) % 5)]


def joined(a: "list[text]") -> str:
    return ",".join(a)[-40:]


def signal(a: str) -> "float32[N]":
    """As many numbers as the text has letters, sometimes more than travel inside a message."""
    return np.arange(len(a) * (2000 if a.endswith("g") else 1), dtype=np.float32)


def scaled(x: "float32[N]") -> "float32[N]":
    return x * 2 + 1


def described(x: "float32[N]") -> str:
    return f"{len(x)}: {float(x.sum()):.0f}"
