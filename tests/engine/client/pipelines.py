"""Pipelines that return their inputs."""

from __future__ import annotations

from typing import Any

import numpy as np


def echo(name: str, **types: str) -> str:
    """Return a pipeline whose outputs are its inputs, of these types."""
    lines = ["weftline: 1", f"name: {name}", "inputs:"]
    lines += [f'  {port}: "{type}"' for port, type in types.items()]
    lines.append("steps:")
    lines += [
        f'  s_{port}: {{node: echo, type: "{type}", worker: one, inputs: {{value: {port}}}}}'
        for port, type in types.items()
    ]
    lines.append("outputs:")
    return "\n".join([*lines, *(f"  {port}: s_{port}.value" for port in types)]) + "\n"


def of_one_step(name: str, node: str, type: str = "text") -> str:
    """Return a pipeline from `x` to `y` with one step; `node` is written as the step's first keys."""
    return f"""weftline: 1
name: {name}
inputs: {{x: "{type}"}}
steps:
  only: {{node: {node}, inputs: {{value: x}}}}
outputs: {{y: only.value}}
"""


EVERYTHING = {
    "words": "text",
    "facts": "json",
    "blob": "bytes",
    "photo": "image",
    "sound": "audio",
    "numbers": "float32[N, 2]",
    "bits": "bfloat16[N]",
    "names": "list[text]",
    "photos": "list[image]",
    "found": "detections",
}

OPTION_NAMES = ("options", "outputs", "job", "seed", "deadline_ms", "priority", "sequence", "self", "model")
"""Inputs of the pipeline `named`."""

NAMED = f"""weftline: 1
name: named
inputs: {{{", ".join(f"{name}: text" for name in OPTION_NAMES)}}}
steps:
  only: {{node: echo, inputs: {{value: job}}}}
outputs: {{job_out: only.value, {", ".join(f"{name}_out: {name}" for name in OPTION_NAMES if name != "job")}}}
"""

PIPELINES = {
    "everything": echo("everything", **EVERYTHING),
    "bytes": of_one_step("bytes", 'echo, type: "uint8[N]"', "uint8[N]"),
    "trickle": of_one_step("trickle", "trickle, pieces: 4, delay_ms: 5"),
    "endless": of_one_step("endless", "trickle, pieces: 100000, delay_ms: 10"),
    "slow": of_one_step("slow", "echo, delay_ms: 400"),
    "fails": of_one_step("fails", "fail, equals: bad"),
    "named": NAMED,
    "remember": of_one_step("remember", "remember"),
}


def plain() -> dict[str, Any]:
    """Return inputs for `everything`, small and without surprises."""
    return {
        "words": "a",
        "facts": 1,
        "blob": b"",
        "photo": np.zeros((1, 1, 3), np.uint8),
        "sound": np.zeros(9, np.float32),
        "numbers": np.zeros((1, 2), np.float32),
        "bits": np.zeros(1, np.uint16),
        "names": [],
        "photos": [],
        "found": [],
    }
