"""Checks and times everything of the LLM engine that is different on a GPU, in one command.

    python -m weftline.engine.llm.gpu.check [--json FILE] [--only NAME ...] [--quick]

Needs torch, triton, transformers, numpy and safetensors; models have random weights and nothing is downloaded. Each
part runs in a process of its own, so that one that fails, or loses the device, hides none of the others. Prints a table
and one line of JSON; ends with 1 when a part is wrong, with 0 and the reasons where parts had to be skipped.

Where a part gives tokens a second, `bound` is what reading all weights once a round, and all keys and values, allows at
the GPU's nominal bandwidth: nobody decodes faster without reading less.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PART_MAX_S = 900
"""Longest a part may take: models of 70 billion weights are made and compiled kernels are not kept."""


@dataclass(slots=True)
class Outcome:
    """What became of a part. state: 'right', 'wrong' or 'skipped'; why: for the last two. figures: by name."""

    name: str
    state: str
    why: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


def parts() -> dict[str, Callable[[bool], dict[str, Any]]]:
    """Return the parts by name; each is told whether to be quick and returns figures."""
    from weftline.engine.llm.gpu import parts as gpu_parts

    return {
        "kernels": gpu_parts.check_kernels,
        "fused": gpu_parts.check_fused,
        "graphs": gpu_parts.check_graphs,
        "decode 8b": gpu_parts.time_decode_8b,
        "together 8b": gpu_parts.time_together_8b,
        "transformers 8b": gpu_parts.time_transformers_8b,
        "together 70b fp8": gpu_parts.time_together_70b,
    }


def why_not() -> str | None:
    """Return why nothing can be checked on this machine, or None."""
    try:
        import torch
        import transformers
    except ImportError as error:
        return f"package {error.name} is not installed"
    from weftline.engine.llm.kernels.availability import available

    del transformers
    return available(torch.device("cuda:0"))


def run_part(name: str, quick: bool) -> Outcome:
    """Run one part in this process."""
    from weftline.engine.llm.gpu.parts import Skipped, Wrong

    try:
        return Outcome(name, "right", figures=parts()[name](quick))
    except Wrong as error:
        return Outcome(name, "wrong", str(error))
    except Skipped as error:
        return Outcome(name, "skipped", str(error))
    except Exception as error:  # whatever a driver, a compiler or a library raises belongs to this part alone
        return Outcome(name, "wrong", f"{type(error).__name__}: {error}"[:800])


def run_apart(name: str, quick: bool) -> Outcome:
    """Run one part in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcome.json"
        command = [sys.executable, "-m", "weftline.engine.llm.gpu.check", "--part", name, "--json", str(file)]
        try:
            done = subprocess.run(
                command + ["--quick"] * quick, capture_output=True, text=True, timeout=PART_MAX_S, check=False
            )
        except subprocess.TimeoutExpired:
            return Outcome(name, "wrong", f"took more than {PART_MAX_S} s")
        if not file.is_file():
            last = (done.stderr or done.stdout).strip().splitlines()[-3:]
            return Outcome(name, "wrong", f"its process ended with {done.returncode}: {' | '.join(last)}"[:800])
        return Outcome(**json.loads(file.read_text(encoding="utf-8")))


def describe(outcome: Outcome, seconds: float) -> str:
    """Return the part's lines of the table."""
    lines = [f"{outcome.name:<20} {outcome.state:<8} {seconds:6.0f} s  {outcome.why}".rstrip()]
    lines += [f"    {key:<44} {value}" for key, value in outcome.figures.items()]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns what the process ends with."""
    names = list(parts())
    parser = argparse.ArgumentParser(
        prog="python -m weftline.engine.llm.gpu.check", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--json", type=Path, help="write the outcomes to this file as well")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="fewer rounds: for a first look")
    parser.add_argument("--part", choices=names, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.part is not None:
        given.json.write_text(json.dumps(asdict(run_part(given.part, given.quick))), encoding="utf-8")
        return 0
    reason = why_not()
    outcomes = []
    for name in given.only:
        started = time.monotonic()
        outcome = Outcome(name, "skipped", reason) if reason is not None else run_apart(name, given.quick)
        print(describe(outcome, time.monotonic() - started), flush=True)
        outcomes.append(outcome)
    report = {**_machine(), "parts": [asdict(outcome) for outcome in outcomes]}
    print(json.dumps(report))
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return int(any(outcome.state == "wrong" for outcome in outcomes))


def _machine() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"python": sys.version.split()[0], "torch": torch.__version__}
    for name in ("transformers", "triton"):
        try:
            found[name] = __import__(name).__version__
        except ImportError:
            found[name] = None
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
        found["memory_bytes"] = torch.cuda.get_device_properties(0).total_memory
    return found


if __name__ == "__main__":
    sys.exit(main())
