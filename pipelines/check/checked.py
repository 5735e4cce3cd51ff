"""Result of a check: node, options and ports of every step, and the types of the wires.

Types propagate along wires. A name in a port's dims is a variable of its step: `x: float32[N, 4]` and `y: float32[N]`
of one step share N. Every wire relates two types, so a size fixed at one end of a chain is known at the other. `?`,
`tensor` and `any` fit every type of their kind and bind nothing.

    image        has the same bytes as uint8[H, W, 3], and fits either way
    audio        has the same bytes as float32[samples], and fits either way
    text, detections   fit json, and so do lists of text or json
    list[T]      fits list[U] where T fits U; elements of a list may differ in named sizes
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weftline.errors import Problem
from weftline.nodes.contract import Node
from weftline.nodes.control import Control, is_json_like
from weftline.nodes.ports import Dim, Port, Ports, PortType, list_of
from weftline.pipelines.check.problems import Origin
from weftline.pipelines.spec.graph import Pipeline, Step
from weftline.pipelines.spec.subpipelines import Constraint
from weftline.pipelines.spec.wire import Wire

SAME_BYTES = {"image": PortType("tensor", "uint8", ("?", "?", 3)), "audio": PortType("tensor", "float32", ("?",))}
"""Tensor types of images and audio."""

_Name = tuple[str, str]  # (scope, name of a dim)


def loose(type: PortType) -> PortType:
    """Return the type with every named size replaced by `?`."""
    if type.item is not None:
        return list_of(loose(type.item))
    if type.dims is None:
        return type
    return PortType(type.kind, type.dtype, tuple(dim if isinstance(dim, int) else "?" for dim in type.dims))


@dataclass(slots=True)
class Sizes:
    """Known sizes of named dims; a scope is a step's name, or '' for the pipeline's inputs."""

    _known: dict[_Name, _Name | int] = field(default_factory=dict)

    def fit(self, given: PortType, giver: str, wanted: PortType, taker: str) -> bool:
        """Unify the types of a wire's ends; False, without a change, if they do not fit."""
        if "any" in (given.kind, wanted.kind):
            return True
        if wanted.kind == "json":
            return is_json_like(given)
        if given.item is not None and wanted.item is not None:
            return Sizes().fit(loose(given.item), giver, loose(wanted.item), taker)
        if given.kind == wanted.kind != "tensor":
            return True
        left, right = SAME_BYTES.get(given.kind, given), SAME_BYTES.get(wanted.kind, wanted)
        if left.kind != "tensor" or right.kind != "tensor":
            return False
        if None not in (left.dtype, right.dtype) and left.dtype != right.dtype:
            return False
        if left.dims is None or right.dims is None:
            return True
        if len(left.dims) != len(right.dims):
            return False
        before = dict(self._known)
        pairs = zip(left.dims, right.dims, strict=True)
        if all(self._same(self._root(a, giver), self._root(b, taker)) for a, b in pairs):
            return True
        self._known = before
        return False

    def settle(self, type: PortType, scope: str) -> PortType:
        """Return `type` with names replaced by known sizes."""
        if type.item is not None:
            return list_of(self.settle(type.item, scope))
        if type.dims is None:
            return type
        return PortType(type.kind, type.dtype, tuple(self._settled(dim, scope) for dim in type.dims))

    def meet(self, given: PortType, giver: str, wanted: PortType, taker: str) -> PortType:
        """Return the reader's type of a compatible wire, refined by the writer's known dims."""
        if wanted.kind == "any":
            return self.settle(given, giver)
        if given.item is not None and wanted.item is not None:
            return list_of(self.meet(given.item, giver, wanted.item, taker))
        wanted, given = self.settle(wanted, taker), self.settle(SAME_BYTES.get(given.kind, given), giver)
        if wanted.kind != "tensor" or given.kind != "tensor":
            return wanted
        dims = wanted.dims
        if dims is None:
            dims = given.dims
        elif given.dims is not None:
            dims = tuple(b if isinstance(b, int) and not isinstance(a, int) else a for a, b in zip(dims, given.dims))
        return PortType("tensor", wanted.dtype or given.dtype, dims)

    def _root(self, dim: Dim, scope: str) -> _Name | int | None:
        """Return the size of a dim, or its representative name, or None for any size."""
        if isinstance(dim, int) or dim == "?":
            return dim if isinstance(dim, int) else None
        found: _Name | int = (scope, dim)
        while isinstance(found, tuple) and found in self._known:
            found = self._known[found]
        return found

    def _same(self, one: _Name | int | None, other: _Name | int | None) -> bool:
        # Either end may have been bound by an earlier dim of the same wire.
        one = self._root(one[1], one[0]) if isinstance(one, tuple) else one
        other = self._root(other[1], other[0]) if isinstance(other, tuple) else other
        if one is None or other is None or one == other:
            return True
        if isinstance(one, tuple):
            self._known[one] = other
            return True
        if isinstance(other, tuple):
            self._known[other] = one
            return True
        return False

    def _settled(self, dim: Dim, scope: str) -> Dim:
        root = self._root(dim, scope)
        return root if isinstance(root, int) else dim


def mismatch(path: str, given: PortType, wire: str, wanted: PortType, others: Iterable[tuple[str, Port]]) -> Problem:
    """Return the problem of a wire that does not fit.

    others: (wire text, output port) of outputs that fit, most similar first.
    """
    found = f"wants {wanted}, {wire} gives {given}"
    fix = next((f"read {text} instead" for text, _ in others), "")
    return Problem(path, found, fix=fix or _remedy(path, given, wire, wanted))


def _remedy(path: str, given: PortType, wire: str, wanted: PortType) -> str:
    step, _, port = path.partition(".inputs.")
    if port and given.item is not None and Sizes().fit(loose(given.item), "", loose(wanted), ""):
        return f"add `map: {port}` to {step}, which then runs once for each element"
    if wanted.kind == "text":
        shown = f"{wire} | describe" if given.kind == "detections" else wire
        return f'put a template step between them, with template: "{{{{ {shown} }}}}"'
    left, right = SAME_BYTES.get(given.kind, given), SAME_BYTES.get(wanted.kind, wanted)
    between = "put a function step between them that turns"
    if (given.kind != "tensor" and wanted.kind != "tensor") or left.kind != "tensor" or right.kind != "tensor":
        return f"{between} {given} into {wanted}"
    if "image" in (given.kind, wanted.kind):
        return f"{between} {given} into {wanted}, {_picture(left, right, wanted.kind == 'image')}"
    if left.dims is not None and right.dims is not None and right.dims and len(left.dims) == len(right.dims) - 1:
        first = right.dims[0]
        if isinstance(first, int) and Sizes().fit(loose(left), "", loose(_item(right)), ""):
            batch = f"the first dimension is a batch that the model fixes at {first}"
            return f"{batch}: export it again with a dynamic one, or {between} {left} into {right}"
    if left.dtype != right.dtype and None not in (left.dtype, right.dtype):
        return f"{between} {left.dtype} into {right.dtype}"
    if left.dims is not None and right.dims is not None and len(left.dims) == len(right.dims):
        numbers = sorted(dim for dim in left.dims if isinstance(dim, int))
        if numbers and numbers == sorted(dim for dim in right.dims if isinstance(dim, int)):
            return f"the same sizes stand in another order: {between} {left} into {right}"
    return f"{between} {left} into {right}"


def _item(type: PortType) -> PortType:
    """Return a tensor type without its first dimension."""
    return PortType("tensor", type.dtype, (type.dims or ())[1:])


def _picture(given: PortType, wanted: PortType, to_image: bool) -> str:
    """Return numpy code that converts between an image and a tensor."""
    if to_image:
        first = given.dims is not None and len(given.dims) == 3 and given.dims[0] == 3
        turned = "x.transpose(1, 2, 0)" if first else "x"
        return f"such as {turned} scaled to 0..255 and made uint8; a picture is uint8[H, W, 3]"
    if wanted.dtype is not None and wanted.dtype.startswith("float"):
        scaled = f"np.asarray(image, np.{wanted.dtype}) / 255"
    else:
        scaled = "image"
    first = wanted.dims is not None and len(wanted.dims) >= 3 and wanted.dims[-3] == 3
    turned = f"({scaled}).transpose(2, 0, 1)" if first else scaled
    return f"such as {turned}, at the size and scale that the model was trained with; a picture is uint8[H, W, 3]"


@dataclass(frozen=True, slots=True)
class CheckedStep:
    """A step with its node class, the dotted path to it, its Config and its ports.

    device_ports: ports in `Node.device_ports`.
    files:        as in `Node.files`, with the sources of user code; none of user code that shares nothing and declares
                  none.
    """

    step: Step
    node: type[Node]
    reference: str
    config: Any
    ports: Ports
    device_ports: frozenset[str] = frozenset()
    files: tuple[Path, ...] = ()

    @property
    def control(self) -> str:
        """Control decision of the scheduler for this step; '' for a step that a worker runs."""
        return self.node.control if issubclass(self.node, Control) else ""

    @property
    def user_code(self) -> bool:
        """Return whether it runs Python code of the user."""
        return self.node.user_code or not self.node.__module__.startswith("weftline.")

    def takes(self, port: str) -> PortType | None:
        """Return the type that an input reads from its wire: under `map:`, a list; None for an unknown port."""
        found = self.ports.input(port)
        if found is None:
            return None
        return list_of(loose(found.type)) if port in self.step.map else found.type

    def does_without(self, port: Port) -> bool:
        """Return True when the step runs without this input. The list of a `map:` is always required."""
        return port.optional and port.name not in self.step.map


@dataclass(frozen=True, slots=True)
class Checked:
    """Results of a check.

    pipeline: expanded, with names in conditions resolved.
    steps:    those with valid node and options, in run order; all of them when there are no problems.
    sizes:    known sizes of named dims.
    origins, constraints: as in Expansion.
    constants: types of constants that are read as another type than `text` or `json`.
    """

    pipeline: Pipeline
    steps: dict[str, CheckedStep]
    sizes: Sizes
    problems: tuple[Problem, ...]
    origins: Mapping[str, Origin] = field(default_factory=dict)
    constraints: tuple[Constraint, ...] = ()
    constants: dict[Wire, PortType] = field(default_factory=dict)

    def source(self, wire: Wire) -> tuple[PortType, str] | None:
        """Return the type of a wire and the scope of its names; None for a dangling wire.

        A step under `map:` outputs lists, whose elements may differ in named sizes.
        """
        if wire in self.constants:
            return self.constants[wire], ""
        if wire.step is None:
            one = next((one for one in self.pipeline.inputs if one.name == wire.port), None)
            return (_input_type(one.type), "") if one else None
        giver = self.steps.get(wire.step)
        port = giver.ports.output(wire.port) if giver else None
        if giver is None or port is None:
            return None
        return (list_of(loose(self.sizes.settle(port.type, wire.step))) if giver.step.map else port.type), wire.step

    def fit(self, wire: Wire, wanted: PortType, taker: str) -> bool:
        """Unify both ends of a wire, as `Sizes.fit`; a json output of lists becomes one where a list is wanted."""
        source = self.source(wire)
        if source is None or self.sizes.fit(*source, wanted, taker):
            return source is not None
        return wanted.item is not None and self.read_as_list(wire) and self.fit(wire, wanted, taker)

    def read_as_list(self, wire: Wire) -> bool:
        """Make a json output the list that its step declares it to be; False where it declares none."""
        giver = self.steps.get(wire.step or "")
        port = giver.ports.output(wire.port) if giver else None
        if giver is None or port is None or port.listed is None or giver.step.map:
            return False
        listed = replace(port, type=port.listed, listed=None)
        outputs = tuple(listed if one is port else one for one in giver.ports.outputs)
        self.steps[giver.step.name] = replace(giver, ports=Ports(giver.ports.inputs, outputs))
        return True

    def type_of(self, wire: Wire) -> PortType | None:
        """Return the type of a wire, as far as known; None for a dangling wire."""
        source = self.source(wire)
        return self.sizes.settle(*source) if source else None


def _input_type(text: str) -> PortType:
    try:
        return PortType.parse(text)
    except ValueError:  # reported with its line already
        return PortType("any")
