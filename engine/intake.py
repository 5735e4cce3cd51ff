"""Request values on their way in: checked, converted, and put where the first steps can read them.

Everything here happens in the caller's thread, before the scheduler hears of the request: decoding a picture must not
hold up anybody else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from weftline.engine.messages import ABSENT, Value
from weftline.engine.pending import PendingTensor
from weftline.engine.runtime import Runtime
from weftline.engine.values import Packed, pack, pack_pending
from weftline.errors import InputError, LimitReached, SessionClosed, StepError
from weftline.nodes.media import MediaLimits, to_value
from weftline.nodes.ports import PortType
from weftline.nodes.values import array_dtype
from weftline.pipelines.graph import Input
from weftline.pipelines.plan import Plan
from weftline.shm.spec import STAND_INS
from weftline.shm.view import bytes_view

DEADLINE_MS_MAX = 86_400_000
"""Longest deadline, a day: as in a pipeline file. It also keeps every wait inside what the system can count."""


class Intake:
    """Turns what callers bring into values, for one plan. Thread-safe: it keeps nothing but constants."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._asked = {one.name: one for one in plan.inputs if not one.hidden}
        self._limits = {
            paths: {name: media_limits(plan, one, paths) for name, one in self._asked.items()}
            for paths in (True, False)
        }
        self._needed = {name for name, one in self._asked.items() if not one.may_be_left_out}
        self._outputs = [output.name for output in plan.outputs]
        constants = {one.name: self._constant(one) for one in plan.inputs if one.hidden or one.may_be_left_out}
        self._small = {name: ABSENT if one is None else one.inline() for name, one in constants.items() if _small(one)}
        self._large = {name: one for name, one in constants.items() if one is not None and not _small(one)}

    def check_outputs(self, wanted: Sequence[str] | None) -> tuple[str, ...] | None:
        """Return the wanted outputs, None for all; InputError names what the pipeline does not have."""
        if wanted is None:
            return None
        if isinstance(wanted, str) or not all(isinstance(name, str) for name in wanted):
            raise InputError("outputs: expected a list of names")
        unknown = [name for name in wanted if name not in self._outputs]
        if unknown or not wanted:
            known = ", ".join(self._outputs)
            raise InputError(f"no output is called {', '.join(unknown) or 'nothing'}; outputs: {known}")
        return tuple(wanted)

    def budget_ms(self, deadline_ms: float | None) -> float | None:
        """Return the request's time budget: the caller's, else the pipeline's; None when there is none."""
        if deadline_ms is None:
            return self._plan.slo.latency_p99_ms
        if isinstance(deadline_ms, bool) or not isinstance(deadline_ms, int | float):
            raise InputError(f"deadline_ms: found {type(deadline_ms).__name__}, expected a number of milliseconds")
        if not 0 <= deadline_ms <= DEADLINE_MS_MAX:
            raise InputError(f"deadline_ms: found {deadline_ms}, expected 0 to {DEADLINE_MS_MAX} milliseconds")
        return deadline_ms

    def pack(self, inputs: Mapping[str, Any], *, paths: bool = True) -> dict[str, Packed]:
        """Return every input that was brought as its port's type, ready to travel; InputError says which is wrong.

        An optional input that is None is one that was left out.
        paths: files may be named; False for callers outside the process.
        """
        limits = self._limits[paths]
        if not inputs.keys() <= self._asked.keys():
            raise self._wrong_names(inputs)
        packed = {
            name: self._pack_one(self._asked[name], raw, limits[name])
            for name, raw in inputs.items()
            if raw is not None or not self._asked[name].optional
        }
        if not self._needed <= packed.keys():
            raise self._wrong_names(packed)
        total, most = sum([one.size_bytes for one in packed.values()]), self._plan.limits.request_bytes_max
        if total > most:
            raise LimitReached(f"the inputs take {total} bytes; limits.request_bytes_max is {most}")
        return packed

    def place(self, packed: Mapping[str, Packed], runtime: Runtime, job: bool = False) -> dict[str, Value]:
        """Copy large values into the ingress arena (the one copy in); small ones go inside the message.

        What was left out gets its default, or is absent.
        """
        whole = {**self._large, **packed} if self._large else packed
        values, large = dict(self._small), []
        for name, one in whole.items():
            if one.travels_inline:
                values[name] = one.inline()
            else:
                large.append((name, one))
        if not large:
            return values
        blocks = runtime.reserve([one.size_bytes for _, one in large], job)
        try:
            for (name, one), block in zip(large, blocks, strict=True):
                place = block.place(0, one.size_bytes)
                one.write(bytes_view(runtime.fleet.arenas[block.arena], place))
                values[name] = one.at(place)
        except BaseException as error:
            runtime.give_up(blocks)
            if isinstance(error, KeyError | ValueError) and runtime.closed:
                raise SessionClosed("the session was closed while an input was being copied in") from None
            raise
        return values

    def give_up(self, values: Mapping[str, Value], runtime: Runtime) -> None:
        """Give back what `place` reserved for a request that is not brought in."""
        runtime.give_up_keys([key for value in values.values() for key in value.keys])

    def _wrong_names(self, given: Iterable[str]) -> InputError:
        """Return what to raise when inputs are unknown or missing."""
        names = set(given)
        told = [f"unknown: {', '.join(sorted(unknown))}"] if (unknown := names - set(self._asked)) else []
        if missing := [name for name in self._asked if name in self._needed - names]:
            told.append(f"missing: {', '.join(missing)}")
        known = ", ".join(
            f"{name} ({one.type})" if name in self._needed else f"{name} ({one.type}, may be left out)"
            for name, one in self._asked.items()
        )
        return InputError(f"inputs {'; '.join(told)}; the pipeline's inputs are {known or 'none'}")

    def _constant(self, one: Input) -> Packed | None:
        """Return what an input is when nobody brings it; None when it is then absent."""
        return None if one.default is None and one.optional else self._pack_one(one, one.default, MediaLimits())

    def _pack_one(self, given: Input, raw: Any, limits: MediaLimits) -> Packed:
        type, what = self._plan.input_types[given.name], f"input {given.name}"
        if raw.__class__ is PendingTensor:
            return self._pack_pending(raw, type, limits, what)
        if raw.__class__ is np.ndarray and type.kind == "tensor" and raw.nbytes <= limits.bytes_max:
            try:
                return pack(raw, type, what)
            except StepError:
                pass  # what follows says better what is wrong, or converts it
        if type.kind == "tensor" and type.dtype is None and (dtype := array_dtype(raw)) in STAND_INS:
            type = dataclasses.replace(type, dtype=dtype)  # which numpy would forget
        try:
            return pack(to_value(type, raw, limits), type, what)
        except (StepError, InputError) as error:
            text = str(error)
            raise InputError(text if text.startswith(what) else f"{what}: {text}") from None

    def _pack_pending(self, raw: PendingTensor, type: PortType, limits: MediaLimits, what: str) -> Packed:
        """Return a tensor that is read later; what must be looked at before it can travel is read now."""
        size_bytes = raw.spec.size_bytes
        if size_bytes > limits.bytes_max:
            raise InputError(f"{what}: {size_bytes} bytes; the limit is {limits.bytes_max}")
        try:
            if type.kind == "tensor":
                return pack_pending(raw, type, what)
            return pack(to_value(type, raw.read(), limits), type, what)
        except (StepError, InputError) as error:
            text = str(error)
            raise InputError(text if text.startswith(what) else f"{what}: {text}") from None


def _small(one: Packed | None) -> bool:
    return one is None or one.travels_inline


def media_limits(plan: Plan, given: Input, paths: bool = True) -> MediaLimits:
    """Return the limits of one input: its own, else the pipeline's. `paths`: callers inside the process name files."""
    limits = plan.limits
    return MediaLimits(
        given.pixels_max or limits.pixels_max,
        given.seconds_max or limits.seconds_max,
        given.bytes_max or limits.request_bytes_max,
        paths=paths,
    )
