"""Function node: runs a user's Python function as a step.

Its ports are read from its annotations, out of the source text: checking a pipeline imports nothing of the user's.

    def crop(image: "image", box: list, margin: int = 4) -> "image": ...       # margin may be left unwired
    def split(text: str) -> {"first": "text", "rest": "text"}: ...             # two outputs
    def scale(x: Annotated[np.ndarray, "float32[C, 32, 32]"]) -> "float32[C, 32, 32]": ...

A parameter with a default takes it when its input is not wired, and for an item whose value is absent because the step
that would have given it was skipped. Inside, `weftline.current()` says whether the item was cancelled, how urgent it is
and which sequence it belongs to.

With `tensors: torch` the tensors, pictures and recordings among its parameters are torch tensors: on the CPU on the
same bytes as the arrays would be, and on a GPU where they lie, without a copy; what it returns may lie there too. It
must not write into them.

    def mirror(photo: Annotated[torch.Tensor, "image"]) -> "image":
        return photo.flip(1)

What it returns is its own memory, to be used again as it likes: a buffer that every call writes into, a view of one, an
input or a part of one, a dict that it changes later. Each answer is what it was when the call returned. An array that
nothing else refers to is not copied for that. What it is given is read-only memory that is used again when the call is
over: it copies what it keeps for later calls. Of a step with `sequence: {}` inputs are copies already, to be kept.

A class works too: it is made once, when the node opens, and its `__call__` is the function. It may remember between the
requests of a sequence: say so with `sequence: {}` on the step, keep what you like by `weftline.current().sequence.id`,
and forget it in a method `end_sequence(self, id)`, which is called when the sequence is over.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from sys import getrefcount
from typing import Any, ClassVar
from weakref import getweakrefcount

import numpy as np

from weftline.node import (
    Batch,
    BatchNode,
    ConfigError,
    Detections,
    DeviceTensor,
    MissingPackage,
    ModelError,
    OpenContext,
    Outputs,
    Port,
    Ports,
    PortType,
    StepContext,
    StepError,
    as_torch,
)
from weftline.nodes.annotations import SINGLE, Signature, read_signature
from weftline.nodes.current import SCOPE, Scope
from weftline.nodes.json_type import JsonType, as_annotated, misfit
from weftline.nodes.json_value import NotJson, to_json
from weftline.nodes.user_code import definition, load, locate
from weftline.nodes.values import describe, mismatch
from weftline.shm.device.driver import DeviceLost

_HELD_LATER: Mapping[str, tuple[type[Any], ...]] = {
    "text": (str,), "bytes": (bytes, bytearray, memoryview), "json": (object,), "any": (object,),
    "tensor": (np.ndarray,), "image": (np.ndarray,), "audio": (np.ndarray,), "list": (list, tuple, np.ndarray),
    "detections": (Detections,),
}  # fmt: skip
"""Values of these classes are checked against their port's type by the worker, so not here."""

_UNCHANGING = frozenset({str, bytes, int, float, bool, type(None)})
"""Classes of immutable results."""


@dataclass(frozen=True, slots=True)
class FunctionConfig:
    """Options of `function`.

    function: what to call: 'file.py:name' relative to the pipeline file, or 'package.module:name'.
    batched:  the function takes a list for every parameter, one value per item (None where it is absent), and returns a
              list (or, with several outputs, a dict of lists). Otherwise it is called item by item, and one item's
              exception fails it alone.
    tensors:  what tensors, pictures and recordings are for the function: 'numpy' arrays, or 'torch' tensors, which on a
              GPU stay there.
    arguments: keyword arguments that are the same for every call, and no inputs; where `function` names a class, those
              of its `__init__`. A parameter annotated as a Path gets a path relative to the pipeline file.
    """

    function: str
    batched: bool = False
    tensors: str = "numpy"
    arguments: dict[str, Any] = field(default_factory=dict)


class Function(BatchNode):
    """Calls a user's Python function."""

    Config: ClassVar[type[Any]] = FunctionConfig
    user_code: ClassVar[bool] = True
    batch_default: ClassVar[tuple[int, float]] = (8, 0.0)

    _call: Callable[..., Any]
    _object: Any = None  # the instance of the class, or the function
    _returns: Mapping[str, JsonType]  # JSON and text types of the return annotation, by output
    _outputs: tuple[Port, ...]
    _names: list[str]  # of the outputs
    _defaults: frozenset[str]  # inputs with a default
    _held_later: tuple[type[Any], ...]  # of the one output; none with several
    _types: Mapping[str, PortType]  # of the inputs
    _device: str  # as torch calls it; '' where tensors are arrays

    @classmethod
    def ports(cls, config: FunctionConfig, step: StepContext) -> Ports:
        if config.tensors not in ("numpy", "torch"):
            raise ConfigError("tensors", f"{config.tensors!r:.40}", "numpy or torch")
        twice = [
            ConfigError(f"arguments.{name}", f"{name} is an input of the step too", "one of the two", "remove one")
            for name in config.arguments
            if name in step.wired and not _names_a_class(config, step.base_dir)
        ]
        if twice:
            raise ConfigError(twice[0].option, twice[0].found, twice[0].expected, twice[0].fix, twice[1:])
        return _signature(config, step.base_dir).ports

    @classmethod
    def device_ports(cls, config: FunctionConfig, ports: Ports) -> frozenset[str]:
        return frozenset(port.name for port in (*ports.inputs, *ports.outputs) if config.tensors == "torch")

    def open(self, context: OpenContext) -> None:
        signature = _signature(self.config, context.base_dir)
        ports, self._returns = signature.ports, signature.returns
        self._outputs = ports.outputs
        self._types = {port.name: port.type for port in ports.inputs}
        self._device = context.framework_device if self.config.tensors == "torch" else ""
        self._defaults = frozenset(port.name for port in ports.inputs if port.optional)
        self._names = [port.name for port in ports.outputs]
        self._name_set = frozenset(self._names)
        tensors = _tensor_classes() if self._device else ()
        self._outputs_held_later = [
            (port, (_Never,) if port.name in self._returns else (*held, *tensors) if np.ndarray in held else held)
            for port in ports.outputs
            for held in [_HELD_LATER[port.type.kind]]
        ]
        self._held_later = self._outputs_held_later[0][1] if self._names == [SINGLE] else ()
        found = load(self.config.function, context.base_dir, "function")
        given = {
            name: as_annotated(signature.arguments[name], value, context.base_dir)
            for name, value in self.config.arguments.items()
        }
        self._object = None
        try:
            call = self._object = found(**given) if isinstance(found, type) else found
        except Exception as error:
            raise ModelError(f"{self.config.function}() failed: {type(error).__name__}: {error}") from error
        if not callable(call):
            raise ModelError(f"{self.config.function} cannot be called")
        self._call = call if isinstance(found, type) or not given else partial(call, **given)

    def close(self) -> None:
        close = getattr(self._object, "close", None)
        if close is not None:
            close()

    def run(self, batch: Batch) -> Outputs:
        scope = Scope(batch)
        token = SCOPE.set(scope)
        try:
            return self._together(batch) if self.config.batched else self._one_by_one(batch, scope)
        finally:
            SCOPE.reset(token)

    def end_sequence(self, id: str) -> None:
        forget = getattr(self._object, "end_sequence", None)
        if forget is not None:
            forget(id)

    def _one_by_one(self, batch: Batch, scope: Scope) -> Outputs:
        names = batch.ports
        columns = [(name, self._column(batch, name)) for name in names]
        sparse = not self._defaults.isdisjoint(names)
        call, held_later = self._call, self._held_later
        answers: list[Any] = []
        last = len(batch) - 1
        answer: Any = object()
        references = getrefcount(answer)  # of an object with the single name `answer`, by this interpreter's count
        for place in range(len(batch)):
            scope.place = place
            inputs = {name: column[place] for name, column in columns}
            if sparse:
                inputs = {name: value for name, value in inputs.items() if not self._falls_back(name, value)}
            try:
                answer = call(**inputs)
                if not isinstance(answer, held_later):
                    answer = self._apart(answer)
                if answer.__class__ in _UNCHANGING or place == last:
                    answers.append(answer)  # the function does not run again before it is read
                elif (
                    answer.__class__ is np.ndarray  # the usual one, found without leaving this frame
                    and answer.base is None
                    and getrefcount(answer) <= references
                    and not getweakrefcount(answer)
                    and answer.flags.owndata
                ):
                    answers.append(answer)  # no other reference to its memory
                elif answer.__class__ is np.ndarray and any(answer is value for value in inputs.values()):
                    answers.append(answer)  # passed on: arrays of inputs are read-only
                else:
                    made = dict(zip(self._names, (answer,) if held_later else answer))
                    del answer  # `made` has the only reference
                    batch.settle(place, made)
                    answers.append(made[SINGLE] if held_later else tuple(made.values()))
            except DeviceLost:
                raise
            except Exception as error:
                answers.append(error)
        if held_later:
            return {SINGLE: answers}
        return {
            name: [answer if isinstance(answer, Exception) else answer[place] for answer in answers]
            for place, name in enumerate(self._names)
        }

    def _column(self, batch: Batch, name: str) -> Sequence[Any]:
        """Return the values of an input in the function's types."""
        if not self._device:
            return batch[name]
        type = self._types[name]
        return [_seen_by_torch(value, type, self._device) for value in batch[name]]

    def _apart(self, answer: Any) -> Any:
        """Return one item's checked value for each output port, in port order; of a single one, the value itself."""
        by_name = self._by_name(answer)
        values = [
            value if isinstance(value := by_name[port.name], held_later) else self._checked(port, value)
            for port, held_later in self._outputs_held_later
        ]
        return values[0] if self._held_later else values

    def _falls_back(self, name: str, value: Any) -> bool:
        return value is None and name in self._defaults

    def _together(self, batch: Batch) -> Outputs:
        columns = {name: list(self._column(batch, name)) for name in batch.ports}
        inputs = {
            name: column
            for name, column in columns.items()
            if not all(self._falls_back(name, value) for value in column)
        }
        return self._listed(self._call(**inputs), len(batch))

    def _listed(self, answer: Any, items: int) -> Outputs:
        lists = self._by_name(answer)
        for name, values in lists.items():
            if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__") or len(values) != items:
                raise StepError(f"the function received {items} items; its result for {name} is not a list of {items}")
        return {
            port.name: [
                value if isinstance(value, held_later) else self._tried(port, value) for value in lists[port.name]
            ]
            for port, held_later in self._outputs_held_later
        }

    def _checked(self, port: Port, value: Any) -> Any:
        """Return an output's value, plain where it is JSON; StepError when it is not of its type."""
        type = self._returns.get(port.name)
        if type is not None and port.type.kind == "json":
            return self._checked_json(port, type, value)
        wrong = mismatch(port.type, value)
        if wrong:
            raise StepError(f"the function's {port.name} {wrong}")
        if type is not None and (unfit := misfit(type, value)) is not None:
            raise StepError(f"the function's {port.name}: found {unfit.found}, expected {unfit.expected}")
        return value

    def _checked_json(self, port: Port, type: JsonType, value: Any) -> Any:
        what = f"the function's {port.name}"
        try:
            made = to_json(value)
        except NotJson as error:
            raise StepError(error.at(what)) from None
        wrong = misfit(type, made)
        if wrong is not None:
            fix = "\n    fix: with `batched: true` the annotation is of one item" if self.config.batched else ""
            raise StepError(f"{what}{wrong.path}: found {wrong.found}, expected {wrong.expected}{fix}")
        return made

    def _tried(self, port: Port, value: Any) -> Any:
        if isinstance(value, Exception):
            return value
        try:
            return self._checked(port, value)
        except StepError as error:
            return error

    def _by_name(self, answer: Any) -> Mapping[str, Any]:
        """Return the function's answer as a mapping of output port to value."""
        if self._names == [SINGLE]:
            return {SINGLE: answer}
        if not isinstance(answer, Mapping) or answer.keys() != self._name_set:
            found = f"a dict of {sorted(map(str, answer))}" if isinstance(answer, Mapping) else describe(answer)
            raise StepError(f"the function returned {found}; its annotation promises a dict of {self._names}")
        return answer


def _seen_by_torch(value: Any, type: PortType, device: str) -> Any:
    """Return a value with every array in it as a torch tensor on `device`."""
    if isinstance(value, np.ndarray | DeviceTensor):
        return as_torch(value, type.dtype, device)
    if type.item is not None and value is not None:
        return [_seen_by_torch(one, type.item, device) for one in value]
    return value


def _tensor_classes() -> tuple[type[Any], ...]:
    try:
        import torch
    except ImportError:
        raise MissingPackage("torch", "torch") from None
    return (torch.Tensor, DeviceTensor)


def _signature(config: FunctionConfig, base_dir: Path) -> Signature:
    found = definition(locate(config.function, base_dir, "function"), "function")
    return read_signature(found, "function", config.arguments)


def _names_a_class(config: FunctionConfig, base_dir: Path) -> bool:
    return isinstance(definition(locate(config.function, base_dir, "function"), "function").node, ast.ClassDef)


class _Never:
    """Class without instances: values of such an output are always checked by the function step."""
