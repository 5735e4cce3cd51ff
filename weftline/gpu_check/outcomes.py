"""Execution of parts: outcome, reason, measurements and thresholds.

Shared by the checks that run where a GPU is, this package's and the LLM's own; it imports nothing of Weftline and
nothing that has to be installed. A part is a function that returns figures, or raises Wrong or Skipped. One that may
lose the device or hang runs in another process, which writes its outcome as JSON: in one of its own (`run_apart`), or
in one that runs several parts one after the other, so that libraries are loaded once (`PartsProcess`).

A figure is a number whose name ends in its unit, a text, or the spread of many (`spread`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

RIGHT, WRONG, SKIPPED = "right", "wrong", "skipped"
STATES = (RIGHT, WRONG, SKIPPED)
NOT_SHOWN = 3
"""Exit code when no part is wrong and one was skipped."""
KILLED_MAX_S = 5.0
"""Longest that is waited for a process that was killed."""

_UNITS = {
    "_gb_per_s": "GB/s", "_per_s": "a second", "_mib": "MiB", "_bytes": "bytes", "_ms": "ms", "_us": "us", "_s": "s",
}  # fmt: skip
"""Units by the ending of a figure's name, longer endings first."""

WHY_MAX = 800
"""Longest reason that is kept, in characters."""


class Wrong(Exception):
    """Something is not as it has to be."""


class Skipped(Exception):
    """This machine cannot do the part."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure that has to reach something. met: None where it is not judged, as on a device that is a fake.

    found, wanted: in `unit`; `at_least` says from which side it must be reached.
    """

    name: str
    found: float
    wanted: float
    unit: str
    at_least: bool = False
    met: bool | None = None

    def __str__(self) -> str:
        side = "at least" if self.at_least else "at most"
        text = f"{self.name}: {_number(self.found, 3)} {self.unit}, {side} {_number(self.wanted, 3)} wanted"
        if self.met is None:
            return f"{text}: not judged"
        if self.met or not self.wanted:
            return f"{text}: {'met' if self.met else 'missed'}"
        return f"{text}: missed by {abs(self.found / self.wanted - 1):.0%}"


def judged(name: str, found: float, wanted: float, unit: str, *, at_least: bool = False, judge: bool = True) -> Bar:
    """Return a bar, met or missed; not judged where a figure says nothing about the bar."""
    met = (found >= wanted if at_least else found <= wanted) if judge else None
    return Bar(name, found, wanted, unit, at_least, met)


@dataclass(slots=True)
class CheckOutcome:
    """Outcome of a part. state: one of STATES; why: for the last two. figures: by name.

    call: the number of the call in which it ran.   sources: a digest of the package's files then.
    """

    name: str
    state: str
    why: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)
    seconds: float = 0.0
    call: int = 1
    sources: str = ""


def outcome_from(made: dict[str, Any]) -> CheckOutcome:
    """Return the outcome that another process wrote as JSON."""
    known = {item.name for item in fields(CheckOutcome)}
    given = {name: value for name, value in made.items() if name in known}
    return CheckOutcome(**{**given, "bars": [Bar(**bar) for bar in made.get("bars", ())]})


def outcome_of(name: str, part: Callable[[], CheckOutcome | dict[str, Any]]) -> CheckOutcome:
    """Run a part in this process. It returns its figures, or all of its outcome."""
    try:
        made = part()
    except Wrong as error:
        return CheckOutcome(name, WRONG, str(error)[:WHY_MAX])
    except Skipped as error:
        return CheckOutcome(name, SKIPPED, str(error)[:WHY_MAX])
    except Exception as error:  # whatever a driver, a compiler or a library raises belongs to this part alone
        return CheckOutcome(name, WRONG, f"{type(error).__name__}: {error}"[:WHY_MAX])
    return made if isinstance(made, CheckOutcome) else CheckOutcome(name, RIGHT, figures=made)


def run_apart(
    name: str, command: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None
) -> CheckOutcome:
    """Run a command that writes the outcome of a part to the file named after its `--json`; killed after `limit_s`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcome.json"
        try:
            code, said = run_limited([*command, "--json", str(file)], limit_s, environment)
        except TimeoutError:
            return CheckOutcome(name, WRONG, f"took more than {limit_s:.0f} s")
        if not file.is_file():
            last = " | ".join(said.strip().splitlines()[-3:])
            return CheckOutcome(name, WRONG, f"its process ended with {code}: {last}"[:WHY_MAX])
        outcome = outcome_from(json.loads(file.read_text(encoding="utf-8")))
        outcome.name = name
        return outcome


def run_limited(
    command: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None, *, keep: bool = False
) -> tuple[int, str]:
    """Run a command to its end; return its exit code and what it said, its errors last.

    After `limit_s` it is killed with everything it started, and TimeoutError is raised. What it left running when it
    ended is killed too, unless it is to be kept: a daemon's command ends at once.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=None if environment is None else {**os.environ, **environment}, start_new_session=True,
    )  # fmt: skip
    try:
        out, errors = process.communicate(timeout=limit_s)
        return process.returncode, out + errors
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    finally:
        if not keep or process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it is in the driver, and cannot be killed there
                process.communicate(timeout=KILLED_MAX_S)


class PartsProcess:
    """A process that runs parts one after the other and is started again after one that is wrong or takes too long.

    command: starts it. It is given '--serve' and a descriptor. It reads a JSON object for each part from its standard
             input and writes the outcome as a line of JSON to that descriptor.
    environment: variables that it gets beside this process's own.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._command = command
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._reply = -1
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`

    def run(self, name: str, asked: Mapping[str, Any], limit_s: float) -> CheckOutcome:
        """Run a part and return its outcome under `name`; killed after `limit_s`."""
        process = self._process or self._start()
        try:
            if process.stdin is None:
                raise RuntimeError("a process was started without a pipe to its input")
            process.stdin.write(json.dumps(asked).encode() + b"\n")
            process.stdin.flush()
            line = self._line(limit_s)
        except TimeoutError:
            self.end()
            return CheckOutcome(name, WRONG, f"took more than {limit_s:.0f} s")
        except (BrokenPipeError, EOFError):
            process.wait()
            self._log.seek(0)
            last = " | ".join(self._log.read()[-4000:].decode("utf-8", "replace").strip().splitlines()[-3:])
            self.end()
            return CheckOutcome(name, WRONG, f"its process ended with {process.returncode}: {last}"[:WHY_MAX])
        outcome = outcome_from(json.loads(line))
        outcome.name = name
        if outcome.state == WRONG:
            self.end()  # what went wrong may have left the device in any state
        return outcome

    def end(self) -> None:
        """Kill the process with everything it started; the next part gets a new one."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        os.close(self._reply)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it is in the driver, and cannot be killed there
            process.wait(KILLED_MAX_S)

    def close(self) -> None:
        self.end()
        self._log.close()

    def _start(self) -> subprocess.Popen[bytes]:
        self._log.seek(0)
        self._log.truncate()
        self._reply, theirs = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*self._command, "--serve", str(theirs)], stdin=subprocess.PIPE, stdout=self._log, stderr=self._log,
                pass_fds=[theirs], env=self._environment, start_new_session=True,
            )  # fmt: skip
        except OSError:
            os.close(self._reply)
            raise
        finally:
            os.close(theirs)
        return self._process

    def _line(self, limit_s: float) -> bytes:
        """Return the next line of the reply; TimeoutError after `limit_s`, EOFError when the process is gone."""
        until, got = time.monotonic() + limit_s, b""
        while not got.endswith(b"\n"):
            if not select.select([self._reply], [], [], max(until - time.monotonic(), 0))[0]:
                raise TimeoutError
            more = os.read(self._reply, 1 << 16)
            if not more:
                raise EOFError
            got += more
        return got


def spread(values: Sequence[float], unit: str) -> dict[str, Any]:
    """Return many measurements as one figure: median, 99th percentile, how many, and their unit."""
    return {"p50": quantile(values, 0.5), "p99": quantile(values, 0.99), "count": len(values), "unit": unit}


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that so much of `values` is not above, by nearest rank; NaN of none."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else float("nan")


def describe(outcome: CheckOutcome) -> str:
    """Return the part's lines of the table."""
    lines = [f"{outcome.name:<22} {outcome.state:<8} {outcome.seconds:6.1f} s  {outcome.why}".rstrip()]
    for key, value in outcome.figures.items():
        name, unit = _with_unit(key)
        lines.append(f"    {name:<54} {_shown(value)} {unit}".rstrip())
    lines += [f"    bar  {bar}" for bar in outcome.bars]
    return "\n".join(lines)


def failed(outcomes: Sequence[CheckOutcome]) -> int:
    """Return 1 when any part is wrong or has missed a bar, else 0."""
    return int(any(outcome.state == WRONG or missed(outcome) for outcome in outcomes))


def missed(outcome: CheckOutcome) -> list[Bar]:
    """Return the bars that a part has missed."""
    return [bar for bar in outcome.bars if bar.met is False]


def as_json(outcome: CheckOutcome) -> dict[str, Any]:
    return asdict(outcome)


def _with_unit(key: str) -> tuple[str, str]:
    """Return a figure's name and unit: 'longest wait' and 's' of 'longest wait_s'."""
    for suffix, unit in _UNITS.items():
        if key.endswith(suffix) and key != suffix:
            return key.removesuffix(suffix), unit
    return key, ""


def _shown(value: Any) -> str:
    if isinstance(value, dict) and "p50" in value:
        return f"{_number(value['p50'])} {value['unit']} (p99 {_number(value['p99'])}; {value['count']} times)"
    return _number(value) if isinstance(value, float) else str(value)


def _number(value: float, digits: int = 4) -> str:
    """Return a number with so many digits that count, and never as a power of ten: 0.06317, 1000000."""
    return f"{value:.{digits}g}" if abs(value) < 10 ** (digits - 1) else f"{value:.0f}"
