"""`python -m weftline.engine.gpu_check`: runs the parts one after the other, prints a table, and writes it as JSON.

    python -m weftline.engine.gpu_check [--device cuda:0] [--json FILE] [--only PART ...] [--quick | --full] [--mps]

Ends with 0 when nothing is wrong, parts that were skipped and bars that were missed included; with 1 when a part is
wrong. The table goes to standard output, progress to standard error, and the JSON is written anew after every part, so
that a run which is cut off leaves what it had.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from weftline.engine.gpu_check.parts import PARTS, Part, chosen
from weftline.engine.gpu_check.processes import Crew, Refused
from weftline.engine.gpu_check.report import machine_facts, report
from weftline.engine.gpu_check.running import SKIPPED, STATES, WRONG, Outcome, Wrong, describe, failed, outcome_of
from weftline.engine.gpu_check.trial import Trial
from weftline.shm.device.names import FAKES, is_fake

MINUTES = 9.0
"""How long all of it may take unless told otherwise: less than the ten minutes a borrowed card is often lent for."""

_DEVICE = re.compile(rf"cuda(:[0-9]{{1,3}})?|({'|'.join(FAKES)}):[0-9]{{1,3}}")

LEFT_MIN_S = 15.0
"""A part is not begun with less time than this."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns what the process ends with."""
    given = _options(arguments)
    parts = chosen(given.only) if given.only else PARTS
    if given.list:
        for part in parts:
            print(f"{part.name:<24} {part.row:<4} {part.about}")
        return 0
    began = time.monotonic()
    machine, options = machine_facts(given.device), {"quick": given.quick, "full": given.full, "mps": given.mps}
    print(_heading(given.device, machine), flush=True)
    kept_from = why_not(given.device) if any(part.needs_device for part in parts) else None
    outcomes: list[tuple[str, Outcome]] = []
    for part in parts:
        left_s = began + given.minutes * 60 - time.monotonic()
        print(f"{part.name}: {part.about}", file=sys.stderr, flush=True)
        outcome = run_part(part, given, kept_from, left_s)
        outcomes.append((part.row, outcome))
        print(describe(outcome), flush=True)
        finished = part is parts[-1]
        made = report(given.device, machine, options, outcomes, time.monotonic() - began, finished)
        if given.json is not None:
            given.json.write_text(json.dumps(made, indent=1), encoding="utf-8")
    print(_summary([outcome for _, outcome in outcomes], is_fake(given.device)))
    return failed([outcome for _, outcome in outcomes])


def run_part(part: Part, given: argparse.Namespace, kept_from: Outcome | None, left_s: float) -> Outcome:
    """Run one part, or say why it is skipped; `kept_from`: what came of opening the device, if that failed."""
    if part.needs_device and kept_from is not None:
        return replace(kept_from, name=part.name)
    if part.asked and not getattr(given, part.asked.lstrip("-")):
        return Outcome(part.name, SKIPPED, f"only with {part.asked}")
    if left_s < LEFT_MIN_S:
        return Outcome(part.name, SKIPPED, f"no time is left of {given.minutes:g} minutes; ask for it by --only")
    began = time.monotonic()
    until_s = began + (left_s if given.full else min(part.limit_s, left_s))
    trial = Trial(part.name, given.device, given.quick, given.full, until_s)
    outcome = outcome_of(part.name, lambda: part.run(trial))
    outcome.seconds = round(time.monotonic() - began, 2)
    return outcome


def why_not(device: str) -> Outcome | None:
    """Return what keeps every part from a device, as a process that opens it sees it; None when it opens.

    A driver, or a package, that is not there is a reason to skip; a fake that does not open is wrong, and so is all
    that nobody expects.
    """
    with Crew(device) as crew:
        try:
            crew.start("a process").ask("open")
        except Refused as error:
            why = " ".join(str(error).removeprefix("a process failed to open: ").split())
            return Outcome("", WRONG if is_fake(device) else SKIPPED, why)
        except Wrong as error:
            return Outcome("", WRONG, str(error))
    return None


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m weftline.engine.gpu_check", description="Prove on a card what Weftline does with one."
    )
    parser.add_argument("--device", default="cuda:0", help="cuda:0, or fake:0 to try the check itself")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything to this file, after every part")
    parser.add_argument("--only", nargs="+", metavar="PART", default=[], help="only these, by name or row (V4)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="how long all may take; %(default)g by default")
    parser.add_argument(
        "--mps", action="store_true", help="also under the multi-process service, with a faulting client"
    )
    parser.add_argument("--list", action="store_true", help="say what the parts are, and run none")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="small counts: for a first look")
    size.add_argument("--full", action="store_true", help="a million leases in each ordering; without limits by part")
    given = parser.parse_args(arguments)
    try:
        chosen(given.only)
    except ValueError as error:
        parser.error(str(error))
    if not _DEVICE.fullmatch(given.device):
        parser.error(f"--device {given.device}: expected a GPU, such as cuda:0, or fake:0")
    if given.json is not None and not given.json.resolve().parent.is_dir():
        parser.error(f"--json {given.json}: its folder does not exist")
    return given


def _heading(device: str, machine: dict[str, str | None]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine.items() if version and name != "gpu")
    what = "a fake: host memory, so no figure here is a GPU's" if is_fake(device) else machine["gpu"] or "unknown card"
    return f"{device}  {what}\n{versions}"


def _summary(outcomes: list[Outcome], fake: bool) -> str:
    counts = {state: sum(outcome.state == state for outcome in outcomes) for state in STATES}
    bars = [bar for outcome in outcomes for bar in outcome.bars if bar.met is not None]
    met = sum(bool(bar.met) for bar in bars)
    judged = "bars are not judged on a fake" if fake else f"{met} of {len(bars)} bars met"
    return ", ".join(f"{count} {state}" for state, count in counts.items()) + f"; {judged}"
