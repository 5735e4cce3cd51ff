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
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weftline.engine.gpu_check import running
from weftline.engine.gpu_check.running import SKIPPED, Outcome, as_json, describe, failed, outcome_of

PART_MAX_S = 900
"""Longest a part may take: models of 70 billion weights are made and compiled kernels are not kept."""


def parts() -> dict[str, Callable[[bool], dict[str, Any]]]:
    """Return the parts by name; each is told whether to be quick and returns figures."""
    from weftline.engine.llm.gpu import parts as gpu_parts
    from weftline.engine.llm.gpu.sleep import check_sleep

    return {
        "kernels": gpu_parts.check_kernels,
        "fused": gpu_parts.check_fused,
        "graphs": gpu_parts.check_graphs,
        "sleep": check_sleep,
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
    return outcome_of(name, lambda: parts()[name](quick))


def run_apart(name: str, quick: bool) -> Outcome:
    """Run one part in a process of its own."""
    command = [sys.executable, "-m", "weftline.engine.llm.gpu.check", "--part", name, *["--quick"] * quick]
    return running.run_apart(name, command, PART_MAX_S)


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
    reason = why_not()
    if given.part is not None:
        one = run_part(given.part, given.quick) if reason is None else Outcome(given.part, SKIPPED, reason)
        given.json.write_text(json.dumps(as_json(one)), encoding="utf-8")
        return 0
    outcomes = []
    for name in given.only:
        started = time.monotonic()
        outcome = Outcome(name, SKIPPED, reason) if reason is not None else run_apart(name, given.quick)
        outcome.seconds = round(time.monotonic() - started, 3)
        print(describe(outcome), flush=True)
        outcomes.append(outcome)
    report = {**_machine(), "parts": [as_json(outcome) for outcome in outcomes]}
    print(json.dumps(report))
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return failed(outcomes)


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
