"""Inputs of requests: check them, convert them, and place them where the first steps read them.

All of this happens before the scheduler receives the request, in the caller's thread or in a thread pool, never for
long in an event loop. `try_inline` converts inputs that are small and need no work. For all others, `pack` checks and
converts, and `place` copies into the ingress arena. Images and audio are measured by their headers in `pack`. They
wait, fair by caller, for a turn to decode within `limits.decode_bytes_max`, and then for room in the arena, into which
they are decoded: quick ones in a thread, others in a process. Quick and other ones have turns of their own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import numpy as np

from weftline.engine.protocol.messages import ABSENT, Value
from weftline.engine.protocol.packed import PendingTensor
from weftline.engine.protocol.values import ARRAYS, LIST_ITEMS_MAX, Packed, is_of, pack, pack_pending
from weftline.engine.request import options_hint
from weftline.engine.runtime.byte_budget import RETRY_S, ByteBudget
from weftline.engine.runtime.decode_process import DecodeProcess, DecodeThreads, Interest
from weftline.engine.runtime.event_loop import Runtime
from weftline.errors import DeadlineExceeded, InputError, LimitReached, SessionClosed, StepError
from weftline.nodes.json_value import encode_json
from weftline.nodes.media import QUICK_MS, Encoded, MediaLimits, encoded, to_value
from weftline.nodes.ports import PortType
from weftline.nodes.values import array_dtype
from weftline.pipelines.placement.plan import Plan
from weftline.pipelines.spec.graph import Input
from weftline.shm.block import INLINE_BYTES_MAX, Block
from weftline.shm.spec import STAND_INS
from weftline.shm.view import bytes_view

WAIT_MAX_S = 30.0
"""Longest wait of a request without a deadline for room and memory for images and audio."""

_JOBS = ("jobs",)
"""Key of the rows of jobs in the queues for decoding: a caller of their own."""

DECODE_NICE = 10
"""Nice value of decoding threads: on busy cores, requests that are decoded already run first."""

_SCALARS = frozenset({str, int, bool})
"""JSON values that need no check but that of their encoding."""

_ENCODED = (bytes, bytearray, memoryview, str, Path)

T = TypeVar("T")


class RequestInputs:
    """Converts the inputs of requests into values, for one plan. Thread-safe.

    program: id of the program in the runtime that values are placed for.
    media:   names of the image and audio inputs, for which a str is the path of a file.
    """

    def __init__(self, plan: Plan, program: int = 0) -> None:
        self._plan = plan
        self._program = program
        self._ports = {one.name: one for one in plan.inputs if not one.hidden}
        self._limits = {
            paths: {name: media_limits(plan, one, paths) for name, one in self._ports.items()}
            for paths in (True, False)
        }
        self._required = {name for name, one in self._ports.items() if not one.may_be_left_out}
        self.media = {one.name for one in plan.inputs if plan.input_types[one.name].kind in ("image", "audio")}
        self._outputs = [output.name for output in plan.outputs]
        constants = {one.name: self._constant(one) for one in plan.inputs if one.hidden or one.may_be_left_out}
        at_a_time = max(1, plan.cores - 1)  # one core stays free for everything else
        self._quick_decoding = ByteBudget(
            "limits.decode_bytes_max",
            plan.decode_bytes_max,
            holders_max=at_a_time,
            waiting_max=plan.limits.requests_max,
        )
        # One more than a caller may use, so that the large inputs of one do not stop those of others.
        self._decoding = ByteBudget(
            "limits.decode_bytes_max",
            plan.decode_bytes_max,
            holders_max=at_a_time + 1,
            holders_max_of_each=at_a_time,
            waiting_max=plan.limits.requests_max,
        )
        # A separate pool: each thread reuses freed memory for its next image, and a slow image does not delay copies.
        # On Linux nice(2) is per thread.
        self._decoders = ThreadPoolExecutor(at_a_time, "weftline-decode", os.nice, (DECODE_NICE,))
        self._processes = DecodeThreads()
        self._small = {name: ABSENT if one is None else one.inline() for name, one in constants.items() if _small(one)}
        self._large = {name: one for name, one in constants.items() if one is not None and not _small(one)}

        self._inline_max = {
            name: (plan.input_types[name], min(INLINE_BYTES_MAX, self._limits[True][name].bytes_max))
            for name in self._ports
        }

    def try_inline(self, inputs: Mapping[str, Any]) -> dict[str, Value] | None:
        """Return the values of a request if all of them are plain and small, else None; checks nothing else.

        It converts the common cases in one pass; `pack` and `place` give the same values.
        """
        if self._large or not self._required <= inputs.keys():
            return None
        values = dict(self._small)
        size_bytes = 0
        for name, raw in inputs.items():
            if name not in self._inline_max:
                return None
            type, bytes_max = self._inline_max[name]
            kind = type.kind
            try:
                if raw.__class__ is np.ndarray and kind == "tensor" and raw.nbytes <= bytes_max:
                    value = pack(raw, type, name).inline()
                elif raw.__class__ is str and kind == "text":
                    value = Value(kind, data=raw.encode())
                elif raw.__class__ in _SCALARS and kind == "json":
                    value = Value(kind, data=encode_json(raw))
                else:
                    return None
            except (ValueError, OverflowError, StepError):
                return None
            added = len(value.data or b"")
            if added > bytes_max:
                return None
            size_bytes += added
            values[name] = value
        return values if size_bytes <= self._plan.limits.request_bytes_max else None

    def check_outputs(self, wanted: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """Return the wanted outputs, None for all; InputError names what the pipeline does not have."""
        if wanted is None:
            return None
        unknown = [name for name in wanted if name not in self._outputs]
        if unknown or not wanted:
            known = ", ".join(self._outputs)
            raise InputError(f"no output is called {', '.join(unknown) or 'nothing'}; outputs: {known}")
        return wanted

    def budget_ms(self, deadline_ms: float | None) -> float | None:
        """Return the request's time budget: the caller's, else the pipeline's; None when there is none."""
        if deadline_ms is None:
            return self._plan.limits.deadline_ms
        return None if self._plan.debug else deadline_ms

    def pack(self, inputs: Mapping[str, Any], *, paths: bool = True) -> dict[str, Packed]:
        """Check and convert the inputs to their ports' types, ready to be placed; InputError names the invalid one.

        An optional input that is None counts as left out.
        paths: accept paths of files; False for callers outside the process.
        """
        limits = self._limits[paths]
        if not inputs.keys() <= self._ports.keys():
            raise self._wrong_names(inputs)
        packed = {
            name: self._pack_one(self._ports[name], raw, limits[name])
            for name, raw in inputs.items()
            if raw is not None or not self._ports[name].optional
        }
        if not self._required <= packed.keys():
            raise self._wrong_names(packed)
        self._check_total(packed)
        return packed

    def _check_total(self, packed: Mapping[str, Packed]) -> None:
        """Refuse inputs that are too large in total; recordings that are not measured count nothing yet."""
        most = self._plan.limits.request_bytes_max
        total = sum([one.size_bytes for one in packed.values() if one.measured])
        if total > most:
            raise LimitReached(f"the inputs take {total} bytes; limits.request_bytes_max is {most}")

    def place(self, packed: Mapping[str, Packed], runtime: Runtime, job: bool = False) -> dict[str, Value]:
        """Copy large values into the ingress arena (their only copy); small ones go inside the message.

        Inputs that were left out have their default, or are absent. LimitReached when the arena has no room now.
        """

        def reserve(sizes: Sequence[int]) -> list[Block]:
            return runtime.reserve(self._program, sizes, job)

        if needs_decoding(packed):
            return self._decoded(packed, reserve, runtime, DecodeTimeout(None), _JOBS if job else "")
        values, large = self._split(packed)
        if large:
            blocks = reserve([one.size_bytes for one in large.values()])
            with _released_on_error(blocks, runtime):
                values |= _written(large, blocks, runtime)
        return values

    def place_in_turn(self, packed: Mapping[str, Packed], runtime: Runtime, left: DecodeTimeout) -> dict[str, Value]:
        """Place values that are decoded: wait, fair by caller, for memory to decode and room in the arena."""

        def reserve(sizes: Sequence[int]) -> list[Block]:
            return runtime.reserve_in_turn(self._program, sizes).wait(left.seconds())

        return self._decoded(packed, reserve, runtime, left, "")

    def _decoded(
        self,
        packed: Mapping[str, Packed],
        reserve: Callable[[Sequence[int]], list[Block]],
        runtime: Runtime,
        left: DecodeTimeout,
        caller: Hashable,
    ) -> dict[str, Value]:
        """Wait for memory to decode, then decode and place values: quick ones in the calling thread."""
        decoding = _Decoding.of(packed, left)
        budget = self._budget(decoding)
        with left:
            taken = budget.enter(decoding.working_bytes, caller, decoding.cost_ms).wait(left.seconds())
            try:
                if decoding.has_parts_to_prepare:
                    packed = self._run(decoding, partial(self._prepared, packed))
                values, large = self._split(packed)
                if large:
                    blocks = reserve([one.size_bytes for one in large.values()])
                    with _released_on_error(blocks, runtime):
                        values |= self._run(decoding, partial(_written, large, blocks, runtime))
                return values
            finally:
                budget.give_back(taken, caller)

    async def place_in_turn_async(
        self, packed: Mapping[str, Packed], runtime: Runtime, left: DecodeTimeout, caller: str = ""
    ) -> dict[str, Value]:
        """Await `place_in_turn`, decoding in a thread.

        A cancellation kills the process that decodes, if there is one, and is raised when the thread has ended.
        """
        decoding = _Decoding.of(packed, left)
        budget = self._budget(decoding)
        with left:
            taken = await budget.enter(decoding.working_bytes, caller, decoding.cost_ms).wait_async(left.seconds())
            try:
                if decoding.has_parts_to_prepare:
                    packed = await self._run_async(decoding, partial(self._prepared, packed))
                values, large = self._split(packed)
                if large:
                    ticket = runtime.reserve_in_turn(self._program, [one.size_bytes for one in large.values()], caller)
                    blocks = await ticket.wait_async(left.seconds())
                    with _released_on_error(blocks, runtime):
                        values |= await self._run_async(decoding, partial(_written, large, blocks, runtime))
                return values
            finally:
                budget.give_back(taken, caller)

    def _budget(self, decoding: _Decoding) -> ByteBudget:
        return self._quick_decoding if decoding.quick else self._decoding

    def _prepared(self, packed: Mapping[str, Packed]) -> dict[str, Packed]:
        """Return values with those decoded that travel inside the message; recordings are measured already."""
        self._check_total(packed)
        return {
            name: one.decoded() if one.travels_inline and one.working_bytes else one for name, one in packed.items()
        }

    def _run(self, decoding: _Decoding, work: Callable[[], T]) -> T:
        """Run `work` in this thread where it is quick, else in one with a decoding process."""
        if decoding.quick:
            return work()
        running = self._processes.submit(partial(decoding.run, work))
        try:
            return running.result()
        except BaseException:
            decoding.cancelled.set()
            wait([running])
            raise

    async def _run_async(self, decoding: _Decoding, work: Callable[[], T]) -> T:
        """Run `work` in a decoding thread. A cancellation is raised when the thread no longer uses its memory."""
        if decoding.quick:
            running = asyncio.wrap_future(self._decoders.submit(work))
        else:
            running = asyncio.wrap_future(self._processes.submit(partial(decoding.run, work)))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            decoding.cancelled.set()
            while not running.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
            if not running.cancelled():
                running.exception()  # mark it as retrieved, else asyncio logs it
            raise

    def close(self) -> None:
        """End the decoding processes; called when no request is left. Safe to call twice."""
        self._processes.close()
        self._decoders.shutdown(wait=False)

    def _split(self, packed: Mapping[str, Packed]) -> tuple[dict[str, Value], dict[str, Packed]]:
        """Return the values that travel inside the message, and those that need room in the arena."""
        whole = {**self._large, **packed} if self._large else packed
        values, large = dict(self._small), {}
        for name, one in whole.items():
            if one.travels_inline:
                values[name] = one.inline()
            else:
                large[name] = one
        return values, large

    def release(self, values: Mapping[str, Value], runtime: Runtime) -> None:
        """Release what `place` reserved for a request that is not submitted."""
        runtime.give_up_keys([key for value in values.values() for key in value.keys])

    def _wrong_names(self, given: Iterable[str]) -> InputError:
        """Return the error for unknown or missing inputs."""
        names = set(given)
        problems = [f"unknown: {', '.join(sorted(unknown))}"] if (unknown := names - set(self._ports)) else []
        if missing := [name for name in self._ports if name in self._required - names]:
            problems.append(f"missing: {', '.join(missing)}")
        known = ", ".join(
            f"{name} ({one.type})" if name in self._required else f"{name} ({one.type}, may be left out)"
            for name, one in self._ports.items()
        )
        hint = options_hint(names - set(self._ports))
        return InputError(f"inputs {'; '.join(problems)}; the pipeline's inputs are {known or 'none'}{hint}")

    def _constant(self, one: Input) -> Packed | None:
        """Return the value of an input that is left out; None if it is then absent."""
        return None if one.default is None and one.optional else self._pack_one(one, one.default, MediaLimits())

    def _pack_one(self, given: Input, raw: Any, limits: MediaLimits) -> Packed:
        type, what = self._plan.input_types[given.name], f"input {given.name}"
        if raw.__class__ is Packed:
            return _as_it_travels(raw, type, limits, what)
        if raw.__class__ is PendingTensor:
            return self._pack_pending(raw, type, limits, what)
        if (one := _encoded(type, raw, limits, what)) is not None:
            return one
        if raw.__class__ is np.ndarray and type.kind == "tensor" and raw.nbytes <= limits.bytes_max:
            try:
                return pack(raw, type, what)
            except StepError:
                pass  # converted below, or refused with a better message
        if type.kind == "tensor" and type.dtype is None and (dtype := array_dtype(raw)) in STAND_INS:
            type = dataclasses.replace(type, dtype=dtype)  # numpy has no such dtype
        try:
            return pack(to_value(type, raw, limits), type, what)
        except (StepError, InputError) as error:
            text = str(error)
            raise InputError(text if text.startswith(what) else f"{what}: {text}") from None

    def _pack_pending(self, raw: PendingTensor, type: PortType, limits: MediaLimits, what: str) -> Packed:
        """Return a tensor that is read when it is placed; other kinds are read and converted now."""
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


class DecodeTimeout:
    """Time limit for a request to wait until it can be decoded: its deadline, and at most WAIT_MAX_S.

    As a context manager it converts TimeoutError into DeadlineExceeded or LimitReached.

    until_s: time.monotonic() of the deadline, at which decoding ends too; None without one.
    """

    def __init__(self, budget_ms: float | None) -> None:
        """budget_ms: time left until the request's deadline; None without a deadline."""
        self._late = budget_ms is not None and budget_ms / 1000 < WAIT_MAX_S
        now_s = time.monotonic()
        self._wait_until_s = now_s + (budget_ms / 1000 if budget_ms is not None and self._late else WAIT_MAX_S)
        self.until_s = None if budget_ms is None else now_s + budget_ms / 1000

    def seconds(self) -> float:
        """Return the longest time to wait from now."""
        return max(0.0, self._wait_until_s - time.monotonic())

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, TimeoutError):
            return
        if self.until_s is not None and time.monotonic() >= self.until_s:
            raise DeadlineExceeded(
                "the deadline passed while the request waited for memory for its inputs or decoded them"
            ) from None
        message = (
            f"no memory for the request's inputs within {WAIT_MAX_S:g} s (limits.arena_bytes, limits.decode_bytes_max)"
        )
        raise LimitReached(message, RETRY_S) from None


def needs_decoding(packed: Mapping[str, Packed]) -> bool:
    """Return True if any of these values is an image or audio that is still to be decoded."""
    return any(one.working_bytes for one in packed.values())


def _working(packed: Mapping[str, Packed]) -> int:
    return max(one.working_bytes for one in packed.values())


@dataclass(frozen=True, slots=True)
class _Decoding:
    """Decoding of one request's values.

    sources:       their encoded parts.
    working_bytes: peak memory of it beside the values.
    cost_ms:       about the most processor time.
    until_s:       time.monotonic() of the deadline; None without one.
    cancelled:     ends it.
    """

    sources: Sequence[Encoded]
    working_bytes: int
    cost_ms: float
    until_s: float | None
    cancelled: Event

    @classmethod
    def of(cls, packed: Mapping[str, Packed], left: DecodeTimeout) -> _Decoding:
        sources = [one for value in packed.values() for one in value.sources()]
        working = max(one.working_bytes for one in packed.values())
        return cls(sources, working, max(0.1, sum(one.decode_ms for one in sources)), left.until_s, Event())

    @property
    def quick(self) -> bool:
        """True if the calling process decodes them; they are many only where all together are quick."""
        return self.cost_ms <= QUICK_MS and all(one.measured for one in self.sources)

    @property
    def has_parts_to_prepare(self) -> bool:
        """True if a recording is to be measured, or a value that travels inside the message is to be decoded."""
        return any(not one.measured or one.size_bytes <= INLINE_BYTES_MAX for one in self.sources)

    def run(self, work: Callable[[], T], process: DecodeProcess) -> T:
        """Run `work`, for which the parts are decoded by a process."""
        interest = Interest(self.until_s, self.cancelled.is_set)
        for one in self.sources:
            process.decodes(one, interest)
        return work()


def _written(large: Mapping[str, Packed], blocks: Sequence[Block], runtime: Runtime) -> dict[str, Value]:
    """Write values into their blocks, one after the other, and return them with their places."""
    values = {}
    for (name, one), block in zip(large.items(), blocks, strict=True):
        place = block.place(0, one.size_bytes)
        one.write(bytes_view(runtime.fleet.arenas[block.arena], place))
        values[name] = one.at(place)
    return values


@contextmanager
def _released_on_error(blocks: Sequence[Block], runtime: Runtime) -> Iterator[None]:
    """Release blocks if writing into them fails."""
    try:
        yield
    except BaseException as error:
        runtime.give_up(blocks)
        if isinstance(error, KeyError | ValueError) and runtime.closed:
            raise SessionClosed("the session was closed while an input was being copied in") from None
        raise


def _encoded(type: PortType, raw: Any, limits: MediaLimits, what: str) -> Packed | None:
    """Return encoded images or audio, or a list of them, measured and not decoded; None for any other value."""
    if type.kind == "list" and type.item is not None and isinstance(raw, list | tuple):
        if not any(isinstance(one, _ENCODED) for one in raw) or type.item.kind not in ("image", "audio"):
            return None
        if len(raw) > LIST_ITEMS_MAX:
            raise InputError(f"{what}: found a list of {len(raw)} elements; the most is {LIST_ITEMS_MAX}")
        return Packed("list", items=tuple(_element(type.item, one, limits, what, at) for at, one in enumerate(raw)))
    try:
        one = encoded(type, raw, limits)
    except InputError as error:
        raise InputError(f"{what}: {error}") from None
    if one is None:
        return None
    return Packed(one.kind, ARRAYS[one.kind][0] or "", encoded=replace(one, name=what))


def _element(type: PortType, raw: Any, limits: MediaLimits, what: str, at: int) -> Packed:
    where = f"{what}: element {at}"
    one = _encoded(type, raw, limits, where)
    if one is not None:
        return one
    try:
        return pack(to_value(type, raw, limits), type, f"{what}[{at}]")
    except (InputError, StepError) as error:
        message = str(error)
        raise InputError(message if message.startswith(what) else f"{where}: {message}") from None


def _as_it_travels(raw: Packed, type: PortType, limits: MediaLimits, what: str) -> Packed:
    """Return a value that a server has parsed already; InputError if it is not of the port's type."""
    if not is_of(raw, type):
        raise InputError(f"{what}: found {raw.kind}, expected {type}")
    if any(leaf.size_bytes > limits.bytes_max for leaf in raw.leaves()):
        raise InputError(f"{what}: {raw.size_bytes} bytes; the limit is {limits.bytes_max}")
    return raw


def _small(one: Packed | None) -> bool:
    return one is None or one.travels_inline


def media_limits(plan: Plan, given: Input, paths: bool = True) -> MediaLimits:
    """Return the limits of one input: its own, else the pipeline's. `paths`: accept paths of files."""
    limits = plan.limits
    return MediaLimits(
        given.pixels_max or limits.pixels_max,
        given.seconds_max or limits.seconds_max,
        given.bytes_max or limits.request_bytes_max,
        paths=paths,
    )
