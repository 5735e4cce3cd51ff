"""Ports read from a function's annotations, as text: the function is not imported.

    str -> text    bytes -> bytes    dict, list, float, int, bool, Any -> json    np.ndarray, torch.Tensor -> tensor
    Detections -> detections         "image", "audio", "float32[C, 32, 32]" ... -> that port type
    Annotated[np.ndarray, "float32[C, 32, 32]"] -> that port type, for those who run a type checker
    "list[image]", list["image"], Annotated[list, "list[image]"] -> list[image]: a Python list of pictures
    list[bytes], list[np.ndarray], list[Detections] -> a list of these; a list of anything else is json
    X | None, Optional[X] -> X

A parameter with a default is an input that may be left unwired. The return annotation is one output named `output`, or
a dict literal with a name and a type for each of several.
"""

from __future__ import annotations

import ast

from weftline.nodes.contract import ConfigError
from weftline.nodes.ports import Port, Ports, PortType, list_of

SINGLE = "output"
"""Name of the output port of a function whose return annotation is not a dict."""

_KINDS = {
    "str": "text", "bytes": "bytes", "Any": "json", "Detections": "detections", "ndarray": "tensor", "Tensor": "tensor",
    "dict": "json", "list": "json", "float": "json", "int": "json", "bool": "json",
    "Dict": "json", "List": "json", "Mapping": "json", "Sequence": "json",
}  # fmt: skip

_LISTS = ("list", "List", "Sequence")
_IN_JSON = ("json", "text")
"""Elements of these kinds make a list that is json, unless the list is written as a port type."""

_FIX = 'annotate it, as in: def {name}(photo: "image", text: str, x: "float32[3, H, W]") -> {{"label": "text"}}'


def read_ports(found: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, file: str, option: str) -> Ports:
    """Return the ports of the function, or of the class's `__call__`; ConfigError says what is missing."""
    function = _call_of(found, file, option) if isinstance(found, ast.ClassDef) else found
    reader = _Reader(f"{file}:{function.lineno} {found.name}", found.name, option)
    if isinstance(function, ast.AsyncFunctionDef):
        raise reader.error("is async", "a plain function: a step already runs beside the others")
    return Ports(reader.inputs(function.args, skip=1 if function is not found else 0), reader.outputs(function.returns))


def _call_of(found: ast.ClassDef, file: str, option: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    for node in found.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "__call__":
            return node
    where = f"{file}:{found.lineno} class {found.name}"
    raise ConfigError(option, f"{where} has no __call__", "a function, or a class with one")


class _Reader:
    """Reads the annotations of one function; knows how to name it in errors."""

    def __init__(self, where: str, name: str, option: str) -> None:
        self.where, self.name, self.option = where, name, option

    def error(self, found: str, expected: str = "") -> ConfigError:
        return ConfigError(self.option, f"{self.where} {found}", expected, _FIX.format(name=self.name))

    def inputs(self, arguments: ast.arguments, skip: int) -> tuple[Port, ...]:
        if arguments.vararg or arguments.kwarg:
            raise self.error("takes *args or **kwargs", "a name and a type for every input")
        if len(arguments.posonlyargs) > skip:
            raise self.error("has parameters before a '/'", "parameters that can be given by name")
        positional = (arguments.posonlyargs + arguments.args)[skip:]
        first_default = len(positional) - len(arguments.defaults)
        ports = [self._input(arg, place >= first_default) for place, arg in enumerate(positional)]
        keyword = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        return (*ports, *(self._input(arg, default is not None) for arg, default in keyword))

    def _input(self, arg: ast.arg, optional: bool) -> Port:
        if arg.annotation is None:
            raise self.error(f"has no type for parameter {arg.arg}")
        return Port(arg.arg, self._type(arg.annotation, f"parameter {arg.arg}"), optional)

    def outputs(self, returns: ast.expr | None) -> tuple[Port, ...]:
        if returns is None:
            raise self.error("has no return annotation")
        if not isinstance(returns, ast.Dict):
            return (Port(SINGLE, self._type(returns, "the return value")),)
        if not returns.keys:
            raise self.error("returns an empty dict", "at least one output")
        ports = []
        for key, value in zip(returns.keys, returns.values, strict=True):
            if not isinstance(key, ast.Constant) or not isinstance(key.value, str) or not key.value.isidentifier():
                raise self.error("has a return annotation with a key that is no name", 'like {"label": "text"}')
            ports.append(Port(key.value, self._type(value, f"output {key.value}")))
        return tuple(ports)

    def _type(self, annotation: ast.expr, what: str) -> PortType:
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            return self._written(annotation.value, what)
        if isinstance(annotation, ast.Subscript):
            return self._subscript(annotation, what)
        if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
            sides = [side for side in (annotation.left, annotation.right) if not _is_none(side)]
            if len(sides) == 1:
                return self._type(sides[0], what)
        name = _name(annotation)
        if name in _KINDS:
            return PortType.parse(_KINDS[name])
        raise self.error(f"has a type for {what} that is no port type: {ast.unparse(annotation):.80}", self._known())

    def _subscript(self, annotation: ast.Subscript, what: str) -> PortType:
        name = _name(annotation.value)
        if name in _LISTS:
            element = self._element(annotation.slice, what)
            return PortType("json") if element is None else list_of(element)
        if name == "Optional":
            return self._type(annotation.slice, what)
        if name == "Annotated" and isinstance(annotation.slice, ast.Tuple):
            written = [part for part in annotation.slice.elts[1:] if isinstance(part, ast.Constant)]
            return self._type(written[0] if written else annotation.slice.elts[0], what)
        return self._type(annotation.value, what)

    def _element(self, node: ast.expr, what: str) -> PortType | None:
        """Return what a list holds that is written `list[node]`; None when the list is json."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.strip() not in _KINDS:
            return self._written(node.value, what)
        if isinstance(node, ast.Subscript) and _name(node.value) in _LISTS:
            inner = self._element(node.slice, what)
            return None if inner is None else list_of(inner)
        if isinstance(node, ast.Subscript) and _name(node.value) == "Annotated":
            return self._subscript(node, what)
        name = node.value.strip() if isinstance(node, ast.Constant) and isinstance(node.value, str) else _name(node)
        kind = _KINDS.get(name or "", "json")
        return None if kind in _IN_JSON else PortType.parse(kind)

    def _written(self, text: str, what: str) -> PortType:
        """Read a string: a port type first, else the name of a Python type in quotes."""
        try:
            return PortType.parse(text)
        except ValueError as error:
            if text.strip() in _KINDS:
                return PortType.parse(_KINDS[text.strip()])
            raise self.error(f"has a type for {what} that is no port type: {error}", self._known()) from None

    @staticmethod
    def _known() -> str:
        return (
            'str, bytes, dict, list, float, int, bool, Any, or a port type in quotes such as "image" or "list[image]"'
        )


def _name(node: ast.expr) -> str | None:
    """Return the last part of a name such as `ndarray` or `np.ndarray`; None for anything else."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
