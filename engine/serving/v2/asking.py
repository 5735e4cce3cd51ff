"""Conversion of a v2 request to engine requests, one for each batch item.

Everything in a request is checked here against the model's face and the server's limits, in this order: how much of it
there is, its names, its shapes and datatypes against the bytes there are, and its contents. Nothing is allocated on the
word of a number that was sent. Values are views of the received message wherever they can be (`sent.py`); in which
datatypes a port can be sent stands in `forms.py`, what parameters mean in `parameters.py`.

Which requests are batches. Port types describe one item, so the batch dimension is one more, in front:

    every input can be one item             one item, and the response's tensors are as the ports say
    else, every input can be a batch of N   N items that run side by side; the response's tensors have N in front,
                                            and text, JSON and the like are BYTES [N, 1]
    anything else                           InputError

A tensor is one item when its shape is the port's, and a batch when it is with one dimension more in front. BYTES of a
port whose values are single elements (text, json, bytes, encoded media) is one item as [] or [1], and a batch of N as
[N] or [N, 1]. So [1] is both, and follows its companions: text [1] beside an image [1, H, W, 3] is a batch of one, and
text [1] alone is one item. [1, 1] is a batch of one. Where both readings are possible throughout (a port that takes
tensors of any shape, or text as [1]), it is one item. A request of a sequence is one item, or a batch of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from weftline.engine.serving.backend import Ask
from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.face import ModelFace
from weftline.engine.serving.regions import Regions
from weftline.engine.serving.v2.names import check_version
from weftline.engine.serving.v2.nouns import InferRequest, WantedOutput
from weftline.engine.serving.v2.parameters import ID_CHARS_MAX, check_sizes, told_by
from weftline.engine.serving.v2.sent import WHOLE, Understood, understand
from weftline.errors import InputError, LimitReached


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """What a v2 request asks of the engine.

    asks:        one request, or one for each item of the batch.
    batch:       how many items the batch has; None: it is no batch, and the response has no batch dimension.
    empty_final: a stream of it ends with a response of its own, without outputs.
    """

    asks: tuple[Ask, ...]
    batch: int | None = None
    empty_final: bool = False


def to_asks(
    request: InferRequest,
    face: ModelFace,
    limits: ServeLimits,
    regions: Regions | None = None,
    *,
    deadline_ms: float | None = None,
    caller: str = "",
    door: str = "",
    traceparent: str = "",
    size_bytes: int = 0,
) -> ParsedRequest:
    """Return what a request asks; InputError says what is wrong with it, LimitReached which total it exceeds.

    face:        of the model the request names: look it up first.
    regions:     memory that clients registered; None: this server has none.
    deadline_ms: what the call has left; the request's own `timeout` may be shorter.
    The rest goes into every Ask as it is.
    """
    _check_outside(request, face, limits)
    told = told_by(request.parameters, deadline_ms)
    outputs = _wanted(request.outputs, face, regions)
    understood = _understood(request, face, limits, regions)
    batch = _batch(understood, limits)
    if batch is not None and batch > 1 and told.sequence is not None:
        raise InputError(f"found a batch of {batch} in a sequence, expected one item at a time")
    asks = [
        Ask(
            face.name,
            {name: one.take(place) for name, one in understood.items()},
            outputs,
            told.deadline_ms,
            told.priority,
            told.sequence,
            request.version,
            request.id,
            caller,
            door,
            traceparent,
            size_bytes if place <= 0 else 0,  # one message, counted once
            told.job,
            told.seed,
        )
        for place in ((WHOLE,) if batch is None else range(batch))
    ]
    return ParsedRequest(tuple(asks), batch, told.empty_final)


def _check_outside(request: InferRequest, face: ModelFace, limits: ServeLimits) -> None:
    """Check what can be checked before looking inside: names and counts."""
    if request.model != face.name:
        raise InputError("the request names another model than the one it was sent to")
    check_version(request.version)
    if len(request.id) > ID_CHARS_MAX:
        raise InputError(f"id: found {len(request.id)} characters, expected at most {ID_CHARS_MAX}")
    for what, count in (("inputs", len(request.inputs)), ("outputs", len(request.outputs))):
        if count > limits.tensors_max:
            raise InputError(f"found {count} {what}, expected at most {limits.tensors_max}")


def _wanted(wanted: Sequence[WantedOutput], face: ModelFace, regions: Regions | None) -> tuple[str, ...] | None:
    """Return the names of the wanted outputs, None for all."""
    if not wanted:
        return None
    names = tuple(one.name for one in wanted)
    _check_names("output", names, [port.name for port in face.outputs])
    for one in wanted:
        check_sizes(one.parameters, f"output {one.name}")
        if one.parameters.get("classification", 0) != 0:
            raise InputError(f"output {one.name}: classification is not offered; leave it out and sort the values")
        if one.region is not None:
            if regions is None:
                raise InputError(f"output {one.name}: found a shared-memory region, and this server shares no memory")
            regions.check(one.region.name, one.region.offset, one.region.size_bytes)
    return names


def _understood(
    request: InferRequest, face: ModelFace, limits: ServeLimits, regions: Regions | None
) -> dict[str, Understood]:
    names = [one.name for one in request.inputs]
    ports = {port.name: port for port in face.inputs}
    _check_names("input", names, ports, [name for name, port in ports.items() if not port.optional])
    held = sum(one.region.size_bytes for one in request.inputs if one.region is not None)
    if held > face.request_bytes_max:
        raise LimitReached(f"the inputs take {held} bytes; limits.request_bytes_max is {face.request_bytes_max}")
    for one in request.inputs:
        if one.parameters:
            check_sizes(one.parameters, f"input {one.name}")
    return {one.name: understand(one, ports[one.name], limits, regions) for one in request.inputs}


def _check_names(what: str, names: Sequence[str], known: Collection[str], needed: Collection[str] = ()) -> None:
    """Raise InputError when a name is unknown or occurs twice, or a needed one is missing."""
    given = set(names)
    if given.issuperset(needed) and given <= set(known) and len(given) == len(names):
        return
    unknown = [f"unknown: {name!r:.80}" for name in names if name not in known][:1]
    twice = [f"twice: {name!r:.80}" for name, times in Counter(names).items() if times > 1][:1]
    missing = [f"missing: {', '.join(left)}"] if (left := [name for name in needed if name not in given]) else []
    told = "; ".join(unknown + twice + missing)
    raise InputError(f"{what}s {told}; the model's {what}s are {', '.join(known) or 'none'}")


def _batch(understood: dict[str, Understood], limits: ServeLimits) -> int | None:
    """Return how many items the inputs are, None when they are one item without a batch dimension."""
    if all(one.item for one in understood.values()):
        return None
    sizes = Counter(one.batch for one in understood.values())
    if len(sizes) != 1 or None in sizes:
        told = ", ".join(f"{name} {_as_what(one)}" for name, one in understood.items())
        raise InputError(f"inputs disagree on the batch: {told}; expected one item each, or equally many")
    (size,) = sizes
    if not 1 <= (size or 0) <= limits.batch_max:
        raise InputError(f"found a batch of {size}, expected 1 to {limits.batch_max} items")
    return size


def _as_what(one: Understood) -> str:
    readings = ["one item"] if one.item else []
    readings += [f"a batch of {one.batch}"] if one.batch is not None else []
    return "has " + " or ".join(readings)
