"""Command line of the GPU check: runs its parts, prints a table and writes JSON.

    python -m weftline.gpu_check [--device cuda:0] [--json FILE] [--only PART ...] [--quick | --full] [--mps]

A call takes at most `--minutes`. A part begins only when all of its own limit is left, so a call ends with what it had
no time for, and the next call with the same `--json` goes on from there: what is right in FILE is not repeated, nor
what is wrong, unless `--only` names it or `--again` is given.

    0   all parts were shown and are right, and all bars were met
    1   a part is wrong, or a bar was missed
    2   the command was used wrongly
    3   nothing is wrong, but a part was not shown: skipped, or no time was left; 0 with `--allow-skipped`

The table goes to standard output, progress to standard error, and the JSON is written anew after every part, so that a
run which is cut off leaves what it had.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from weftline.gpu_check.context import CheckContext
from weftline.gpu_check.outcomes import (
    NOT_SHOWN,
    RIGHT,
    SKIPPED,
    STATES,
    WRONG,
    CheckOutcome,
    PartsProcess,
    Wrong,
    describe,
    failed,
    missed,
    outcome_of,
)
from weftline.gpu_check.parts import PARTS, CheckPart, chosen
from weftline.gpu_check.processes import DriverRefused, ProcessGroup
from weftline.gpu_check.programs import LLM_COMMAND
from weftline.gpu_check.report import earlier_outcomes, machine_facts, report, sources_digest
from weftline.shm.device.names import FAKES, is_fake

MINUTES, FAKE_MINUTES = 9.0, 45.0
"""Default time limit of a call: less than the ten minutes for which a card is often lent."""

FAKE_PATIENCE = 5.0
"""On a fake a part may take so many times its limit: the machine may be busy with other things."""

_DEVICE = re.compile(rf"cuda(:[0-9]{{1,3}})?|({'|'.join(FAKES)}):[0-9]{{1,3}}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns what the process ends with."""
    parser = _parser()
    given = _options(parser, arguments)
    parts = chosen(given.only) if given.only else PARTS
    if given.list:
        for part in parts:
            print(f"{part.name:<24} {part.row:<4} at most {part.limit_s:3.0f} s  {part.about}")
        return 0
    began = time.monotonic()
    machine, options = machine_facts(given.device), {"quick": given.quick, "full": given.full, "mps": given.mps}
    try:
        earlier = [] if given.json is None else earlier_outcomes(given.json, given.device, machine, options)
    except ValueError as error:
        parser.error(f"--json {given.json}: {error}; name another file, or remove this one")
    if given.triton_cache is not None:
        os.environ["TRITON_CACHE_DIR"] = str(given.triton_cache.resolve())  # for the processes of the check
    print(_heading(given.device, machine), flush=True)
    outcomes = {outcome.name: outcome for outcome in earlier}
    call = max((outcome.call for outcome in earlier), default=0) + 1
    todo = [part for part in parts if given.again or _is_open(outcomes.get(part.name), bool(given.only))]
    for part in parts:
        if part not in todo:
            print(f"{part.name:<22} {outcomes[part.name].state:<8} in call {outcomes[part.name].call}", flush=True)
    kept_from = why_not(given.device) if any(part.needs_device for part in todo) else None
    llm = PartsProcess(LLM_COMMAND)
    with contextlib.closing(llm):
        for part in todo:
            left_s = began + given.minutes * 60 - time.monotonic()
            print(f"{part.name}: {part.about}", file=sys.stderr, flush=True)
            outcome = run_part(part, given, kept_from, left_s, outcomes, llm)
            outcome.call, outcome.sources = call, sources_digest()
            outcomes[part.name] = outcome
            print(describe(outcome), flush=True)
            if given.json is not None:
                seconds, finished = time.monotonic() - began, part is todo[-1]
                made = report(given.device, machine, options, _by_row(outcomes), seconds, finished)
                given.json.write_text(json.dumps(made, indent=1), encoding="utf-8")
    shown = [outcomes[part.name] for part in parts]
    print(_summary(shown, is_fake(given.device)))
    hidden = any(outcome.state == SKIPPED for outcome in shown) and not given.allow_skipped
    return failed(shown) or (NOT_SHOWN if hidden else 0)


def _is_open(outcome: CheckOutcome | None, named: bool) -> bool:
    """Return whether to run a part after this outcome of an earlier call. named: by `--only`."""
    return outcome is None or outcome.state == SKIPPED or (named and (outcome.state == WRONG or bool(missed(outcome))))


def _by_row(outcomes: dict[str, CheckOutcome]) -> list[tuple[str, CheckOutcome]]:
    return [(part.row, outcomes[part.name]) for part in PARTS if part.name in outcomes]


def run_part(
    part: CheckPart, given: argparse.Namespace, kept_from: CheckOutcome | None, left_s: float,
    earlier: Mapping[str, CheckOutcome], llm: PartsProcess,
) -> CheckOutcome:  # fmt: skip
    """Run one part, or say why it is skipped; `kept_from`: what came of opening the device, if that failed."""
    if part.needs_device and kept_from is not None:
        return replace(kept_from, name=part.name)
    if part.asked and not getattr(given, part.asked.lstrip("-")):
        return CheckOutcome(part.name, SKIPPED, f"only with {part.asked}")
    if left_s < part.limit_s:
        left = f"{max(left_s, 0):.0f} s of {given.minutes:g} minutes are left"
        why = f"{left}, it may take {part.limit_s:.0f} s; call again"
        return CheckOutcome(part.name, SKIPPED, why)
    began = time.monotonic()
    limit_s = part.limit_s * (FAKE_PATIENCE if is_fake(given.device) else 1.0)
    until_s = began + (left_s if given.full else limit_s)
    context = CheckContext(part.name, given.device, given.quick, given.full, until_s, earlier=earlier, llm=llm)
    outcome = outcome_of(part.name, lambda: part.run(context))
    outcome.seconds = round(time.monotonic() - began, 2)
    return outcome


def why_not(device: str) -> CheckOutcome | None:
    """Return what keeps every part from a device, as a process that opens it sees it; None when it opens.

    A missing driver or package is a reason to skip; a fake that does not open is wrong, and so is any unexpected error.
    """
    with ProcessGroup(device) as group:
        try:
            group.start("a process").ask("open")
        except DriverRefused as error:
            why = " ".join(str(error).removeprefix("a process failed to open: ").split())
            return CheckOutcome("", WRONG if is_fake(device) else SKIPPED, why)
        except Wrong as error:
            return CheckOutcome("", WRONG, str(error))
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m weftline.gpu_check", description="Prove on a card what Weftline does with one."
    )
    parser.add_argument("--device", default="cuda:0", help="cuda:0, or fake:0 to try the check itself")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write everything to this file; go on from what it has"
    )
    parser.add_argument("--again", action="store_true", help="repeat parts that are in the file already")
    parser.add_argument("--allow-skipped", action="store_true", help="end with 0 although parts were not shown")
    parser.add_argument("--triton-cache", type=Path, metavar="FOLDER", help="keep compiled kernels here between calls")
    parser.add_argument("--only", nargs="+", metavar="PART", default=[], help="only these, by name or row (V4)")
    parser.add_argument("--minutes", type=float, help=f"how long all may take; {MINUTES:g} by default on a card")
    parser.add_argument(
        "--mps", action="store_true", help="also under the multi-process service, with a faulting client"
    )
    parser.add_argument("--list", action="store_true", help="say what the parts are, and run none")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="small counts: for a first look")
    size.add_argument("--full", action="store_true", help="a million leases in each ordering; without limits by part")
    return parser


def _options(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    given = parser.parse_args(arguments)
    try:
        chosen(given.only)
    except ValueError as error:
        parser.error(str(error))
    if not _DEVICE.fullmatch(given.device):
        parser.error(f"--device {given.device}: expected a GPU, such as cuda:0, or fake:0")
    if given.minutes is None:
        given.minutes = FAKE_MINUTES if is_fake(given.device) else MINUTES
    if given.json is not None and not given.json.resolve().parent.is_dir():
        parser.error(f"--json {given.json}: its folder does not exist")
    return given


def _heading(device: str, machine: dict[str, str | None]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine.items() if version and name != "gpu")
    what = "a fake: host memory, so no figure here is a GPU's" if is_fake(device) else machine["gpu"] or "unknown card"
    return f"{device}  {what}\n{versions}"


def _summary(outcomes: list[CheckOutcome], fake: bool) -> str:
    """Return the last lines: what is wrong, what was missed, what was not shown and why, and the counts."""
    wrong = [f"    {outcome.name}: {outcome.why}" for outcome in outcomes if outcome.state == WRONG]
    misses = [f"    {outcome.name}: {bar}" for outcome in outcomes for bar in missed(outcome)]
    hidden = [f"    {outcome.name}: {outcome.why}" for outcome in outcomes if outcome.state == SKIPPED]
    stale = [outcome.name for outcome in outcomes if outcome.state == RIGHT and outcome.sources != sources_digest()]
    lines = []
    for head, found in (("wrong:", wrong), ("bars missed:", misses), ("not shown:", hidden)):
        lines += [head, *found] if found else []
    if stale:
        lines.append(f"shown before the code changed: {', '.join(stale)}")
    counts = {state: sum(outcome.state == state for outcome in outcomes) for state in STATES}
    bars = [bar for outcome in outcomes for bar in outcome.bars if bar.met is not None]
    met = sum(bool(bar.met) for bar in bars)
    judged = "bars are not judged on a fake" if fake else f"{met} of {len(bars)} bars met"
    return "\n".join([*lines, ", ".join(f"{count} {state}" for state, count in counts.items()) + f"; {judged}"])
