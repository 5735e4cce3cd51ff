"""Trace and log settings that clients can change at run time, under Triton's names.

A trace is a log line (`weftline.ingress.trace`) for each sampled request, with its total time and the times of its
steps. Trace settings are for all models, or for one. Log settings change the level of the `weftline` logger. Common to
gRPC and REST.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weftline.engine.scheduler.request import StepTiming
from weftline.engine.serving.backend import Ask
from weftline.errors import InputError

_trace_log = logging.getLogger("weftline.ingress.trace")

SILENT = logging.CRITICAL + 10
"""A level above every other."""

LogValue = bool | int | str


@dataclass(frozen=True, slots=True)
class TraceRule:
    """Sampling of traces.

    on:    traces are written.
    rate:  every N-th request.
    count: number of requests left to trace; -1: no limit.
    """

    on: bool = False
    rate: int = 1000
    count: int = -1


class TraceSettings:
    """Trace settings. Those of a model override those for all models."""

    def __init__(self) -> None:
        self._all = TraceRule()
        self._models: dict[str, TraceRule] = {}
        self._seen: dict[str, int] = {}
        self.active = False
        """True if any request may be traced; checked first, since it is nearly always False."""

    def get(self, model: str = "") -> dict[str, tuple[str, ...]]:
        """Return the settings in v2's form: a list of texts by name."""
        one = self._models.get(model, self._all)
        return {
            "trace_file": ("",),
            "trace_level": ("TIMESTAMPS" if one.on else "OFF",),
            "trace_rate": (str(one.rate),),
            "trace_count": (str(one.count),),
            "log_frequency": ("0",),
            "trace_mode": ("triton",),
        }

    def set(self, changes: Mapping[str, Sequence[str]], model: str = "") -> None:
        """Change settings, all of them or none; one without a value is reset to that for all models.

        InputError for an unknown setting or value, or one reserved for the operator.
        """
        fallback = self._all if model else TraceRule()
        changed = self._models.get(model, self._all) if model else self._all
        for name, values in changes.items():
            changed = _with_trace(changed, fallback, name, tuple(values))
        if model:
            self._models[model] = changed
        else:
            self._all = changed
        self._seen.clear()
        self.active = self._all.on or any(one.on for one in self._models.values())

    def note(self, ask: Ask, timings: Sequence[StepTiming], total_ms: float) -> None:
        """Log the trace of a finished request if it is sampled."""
        key = ask.model if ask.model in self._models else ""
        one = self._models.get(key, self._all)
        if not one.on or not one.count:
            return
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        if (seen - 1) % one.rate:
            return
        if one.count > 0:
            left = replace(one, count=one.count - 1)
            if key:
                self._models[key] = left
            else:
                self._all = left
        steps = ", ".join(f"{step.step}: queued {step.queued_ms:.3f}, ran {step.run_ms:.3f}" for step in timings)
        _trace_log.info("trace of %s %r: %.3f ms (%s)", ask.model, ask.id, total_ms, steps)


class LogSettings:
    """The level of a logger as switches. The lowest enabled switch decides."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger("weftline")

    def get(self) -> dict[str, LogValue]:
        level = self._logger.getEffectiveLevel()
        return {
            "log_file": "",
            "log_info": level <= logging.INFO,
            "log_warning": level <= logging.WARNING,
            "log_error": level <= logging.ERROR,
            "log_verbose_level": int(level <= logging.DEBUG),
            "log_format": "default",
        }

    def set(self, changes: Mapping[str, LogValue]) -> None:
        """Change settings, all of them or none; InputError as for trace settings."""
        now = self.get() | {name: _log_value(name, value) for name, value in changes.items()}
        if now["log_verbose_level"]:
            level = logging.DEBUG
        elif now["log_info"]:
            level = logging.INFO
        elif now["log_warning"]:
            level = logging.WARNING
        else:
            level = logging.ERROR if now["log_error"] else SILENT
        if changes:
            self._logger.setLevel(level)


def _with_trace(one: TraceRule, fallback: TraceRule, name: str, values: tuple[str, ...]) -> TraceRule:
    match name:
        case "trace_level":
            if not values:
                return replace(one, on=fallback.on)
            if any(value not in ("OFF", "TIMESTAMPS") for value in values):
                raise InputError("trace_level: expected OFF or TIMESTAMPS; tensors are never written to a log")
            return replace(one, on="TIMESTAMPS" in values)
        case "trace_rate":
            return replace(one, rate=_whole(name, values, 1) if values else fallback.rate)
        case "trace_count":
            return replace(one, count=_whole(name, values, -1) if values else fallback.count)
        case "trace_file":
            raise InputError("trace_file: only the operator can set it; traces are in the server's log")
        case "log_frequency" if values in ((), ("0",)):
            return one
        case "trace_mode" if values in ((), ("triton",)):
            return one
        case "log_frequency" | "trace_mode":
            raise InputError(f"{name}: this server supports one value only, which the trace settings show")
        case _:
            raise InputError(f"{name!r:.80}: no such trace setting; there are trace_level, trace_rate and trace_count")


def _whole(name: str, values: tuple[str, ...], least: int) -> int:
    text = values[0] if len(values) == 1 else ""
    if not text.removeprefix("-").isascii() or not text.removeprefix("-").isdigit() or len(text) > 10:
        raise InputError(f"{name}: expected one whole number from {least} to 2147483647")
    number = int(text)
    if not least <= number < 1 << 31:
        raise InputError(f"{name}: expected one whole number from {least} to 2147483647, found {number}")
    return number


def _log_value(name: str, value: LogValue) -> LogValue:
    match name:
        case "log_info" | "log_warning" | "log_error":
            if not isinstance(value, bool):
                raise InputError(f"{name}: expected true or false")
            return value
        case "log_verbose_level":
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InputError(f"{name}: expected a whole number from 0")
            return value
        case "log_format" if value == "default":
            return value
        case "log_file" | "log_format":
            raise InputError(f"{name}: only the operator can set the destination and format of the log")
        case _:
            known = "log_info, log_warning, log_error and log_verbose_level"
            raise InputError(f"{name!r:.80}: no such log setting; there are {known}")
