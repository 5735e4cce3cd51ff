"""LLM part of the GPU check, in a process of its own; `weftline.gpu_check` runs it.

    python -m weftline.gpu_check.llm --only PART [--device cuda:0] [--json FILE] [--quick | --full]

Needs torch, triton, transformers and numpy; models have random weights and nothing is downloaded. Prints the part's
outcome, and writes it to FILE; ends with 1 when the part is wrong. On a fake device ('fake:0') the GPU's code runs on
the CPU with tiny models, and what needs a card is skipped.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weftline.gpu_check.outcomes import SKIPPED, WRONG, CheckOutcome, as_json, describe, failed, outcome_of


def parts() -> dict[str, Callable[[Any], CheckOutcome | dict[str, Any]]]:
    """Return the parts by name; each is given a `Setup`."""
    from weftline.gpu_check import llm_engine, llm_parts, llm_served

    return {
        "kernels": llm_parts.check_kernels,
        "graphs": llm_parts.check_graphs,
        "fused": llm_parts.check_fused,
        "decode 8b": llm_parts.time_decode_8b,
        "together 8b": llm_engine.time_together_8b,
        "transformers 8b": llm_parts.time_transformers_8b,
        "profile 8b": llm_parts.profile_8b,
        "sleep": llm_engine.check_sleep,
        "refused prompt": llm_engine.check_refused,
        "KV resize": llm_engine.check_resize,
        "mixed rounds": llm_engine.check_rounds,
        "long prompt": llm_engine.check_long_prompt,
        "open as served": llm_served.open_as_served,
        "features": llm_served.check_features,
        "families": llm_parts.check_families,
        "together 70b fp8": llm_engine.time_together_70b,
    }


def why_not(device: str) -> str | None:
    """Return why nothing can be checked on `device`, or None."""
    try:
        import torch
        import transformers
    except ImportError as error:
        return f"package {error.name} is not installed"
    from weftline.engine.llm.kernels.availability import available
    from weftline.shm.device.names import is_fake

    del transformers
    return None if is_fake(device) else available(torch.device(device))


def run_part(name: str, device: str, quick: bool = False, full: bool = False) -> CheckOutcome:
    """Run one part in this process."""
    reason = why_not(device)
    if reason is not None:
        return CheckOutcome(name, SKIPPED, reason)
    from weftline.engine.llm.gpu.models import Setup

    if device != "cpu" and not device.startswith("cuda"):
        sys.modules["torch"].set_num_threads(1)  # a fake's models are tiny: two threads wait for each other
    return outcome_of(name, lambda: parts()[name](Setup.of(device, quick, full)))


def serve(reply: int) -> None:
    """Run the parts that are asked for on standard input; see `PartsProcess`."""
    with os.fdopen(reply, "wb", 0) as out:
        for line in sys.stdin:
            outcome = run_part(**json.loads(line))
            gc.collect()  # a fused model is freed no sooner: its forwards refer to its modules
            torch = sys.modules.get("torch")
            if torch is not None and outcome.state != WRONG and torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            out.write(json.dumps(as_json(outcome)).encode() + b"\n")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns what the process ends with."""
    parser = argparse.ArgumentParser(prog="python -m weftline.gpu_check.llm")
    parser.add_argument("--only", metavar="PART", help="which part; a wrong name lists them")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--json", type=Path, help="write the outcome to this file")
    parser.add_argument("--serve", type=int, metavar="FD", help=argparse.SUPPRESS)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="smaller counts: for a first look")
    size.add_argument("--full", action="store_true", help="more rounds")
    given = parser.parse_args(arguments)
    if given.serve is not None:
        serve(given.serve)
        return 0
    reason = why_not(given.device)
    if reason is None and given.only not in parts():
        parser.error(f"no part is called {given.only!r}; there are {', '.join(parts())}")
    outcome = run_part(given.only, given.device, given.quick, given.full)
    print(describe(outcome), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(as_json(outcome)), encoding="utf-8")
    return failed([outcome])


if __name__ == "__main__":
    sys.exit(main())
