"""Ports and arguments of a user's function or class, parsed from annotations without import.

    str -> text    bytes -> bytes    dict, list, float, int, bool, Any -> json    np.ndarray, torch.Tensor -> tensor
    Detections -> detections         "image", "audio", "float32[C, 32, 32]" ... -> that port type
    Annotated[np.ndarray, "float32[C, 32, 32]"] -> that port type, for type checkers
    NDArray[np.float32] -> float32
    "list[image]", list["image"], Annotated[list, "list[image]"] -> list[image]: a Python list of pictures
    list[bytes], list[np.ndarray], list[Detections] -> a list of these; a list of anything else is json
    list[str], list[int], list[dict] ... of what is returned -> json, and where a reader takes a list (`map:`, a port of
        a list type) list[text] or list[json]
    dict[str, float], tuple[int, str], float | None, Literal["a", "b"], a TypedDict, a dataclass, a pydantic model
        -> json (text for a Literal of texts), and results are checked against the type
    X | None, Optional[X] of a parameter -> X

Aliases of the module, names imported from the user's own files, quotes and `from __future__ import annotations` make no
difference. A parameter with a default is an input that may be left unwired. The return annotation is one output named
`output`, or a dict literal with a name and a type for each of several.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from weftline.nodes.contract import ConfigError
from weftline.nodes.json_type import (
    ANY,
    JsonType,
    base_names,
    is_dataclass,
    lineage,
    misfit,
    read_json_type,
    unquoted,
    written,
)
from weftline.nodes.ports import LIST_DEPTH_MAX, Port, Ports, PortType, list_of
from weftline.nodes.user_code import Found, Module
from weftline.shm.spec import ITEM_BYTES

SINGLE = "output"
"""Name of the output port of a function whose return annotation is not a dict."""

_KINDS = {"str": "text", "bytes": "bytes", "Detections": "detections", "ndarray": "tensor", "Tensor": "tensor"}
"""Python types of ports of another kind than json, by the last part of their name."""

_LISTS = ("list", "List", "Sequence")
_IN_JSON = ("json", "text")
"""Elements of these kinds make a list that is json, unless the list is written as a port type."""

_KNOWN = (
    "str, bytes, dict, list, float, int, bool, Any, np.ndarray, a TypedDict of your own, or a port type in "
    'quotes such as "image" or "list[image]"'
)
_FIX = 'annotate it, as in: def {name}(photo: "image", text: str, x: "float32[3, H, W]") -> {{"label": "text"}}'
_ARGUMENT_FIX = "write text, a number, true, false, a list or a mapping"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Signature:
    """Inputs and outputs of a function or of a class with `__call__`.

    arguments: the type of each argument of the step, by name.
    returns:   the required type of an output's JSON value or text, by port; missing for any type.
    """

    ports: Ports
    arguments: Mapping[str, JsonType]
    returns: Mapping[str, JsonType]


def read_signature(found: Found, option: str, arguments: Mapping[str, Any] | None = None) -> Signature:
    """Return the signature of a function or a class; raise ConfigError for missing parts.

    arguments: `arguments` of the step, for the function or a class's `__init__`; they are not ports.
    """
    given = dict(arguments or {})
    taken: dict[str, JsonType] | None = None
    if isinstance(found.node, ast.ClassDef):
        function, module = _call_of(found, found.node, option)
        taken, given = _arguments_of_class(found, found.node, given), {}
    elif isinstance(found.node, Function):
        function, module = found.node, found.module
    else:
        raise ConfigError(option, f"{found.where} is no function", "a function or a class")
    reader = _Reader(f"{module.path.name}:{function.lineno} {found.name}", found.name, module, option)
    reader.refuse_what_is_no_function(function)
    skip = 1 if taken is not None else 0
    if taken is None:
        taken = reader.arguments(function.args, given)
    inputs = reader.inputs(function.args, skip, given)
    outputs, returns = reader.outputs(function.returns)
    return Signature(Ports(inputs, outputs), taken, returns)


def _call_of(found: Found, node: ast.ClassDef, option: str) -> tuple[Function, Module]:
    method = _method(node, found.module, "__call__")
    if method is not None:
        return method
    torch = any(ast.unparse(base).rpartition(".")[2] == "Module" for base in node.bases)
    fix = (
        "write `node: torch` and `module: ...` instead of `function:`" if torch else "define `def __call__(self, ...)`"
    )
    raise ConfigError(option, f"class {found.where} has no __call__", "a function, or a class with one", fix)


def _method(node: ast.ClassDef, module: Module, name: str) -> tuple[Function, Module] | None:
    """Return a method of a class or of one that it derives from, and where that is written."""
    for owner, place in lineage(node, module):
        for one in owner.body:
            if isinstance(one, Function) and one.name == name:
                return one, place
    return None


def _arguments_of_class(found: Found, node: ast.ClassDef, given: Mapping[str, Any]) -> dict[str, JsonType]:
    """Return the types of the arguments of `__init__`. ConfigError lists their problems."""
    where = f"class {found.where}"
    method = _method(node, found.module, "__init__")
    if method is not None:
        function, module = method
        where = f"{module.path.name}:{function.lineno} {found.name}.__init__"
        parameters = list(_parameters(function.args))[1:]
        any_name = function.args.kwarg is not None
    elif any(is_dataclass(owner) for owner, _ in lineage(node, found.module)):
        parameters = list(_dataclass_parameters(node, found.module))
        any_name, module = False, found.module
    else:
        parameters, module = [], found.module
        read = {owner.name for owner, _ in lineage(node, module)} | {"object", "ABC", "Protocol", "Generic"}
        any_name = not read.issuperset(
            base_names(node, module)
        )  # a base class outside the user's files may have an `__init__`
    return _held(where, parameters, module, given, any_name)


def _parameters(arguments: ast.arguments) -> Iterator[tuple[ast.arg, bool]]:
    """Yield each parameter that can be passed by name, and True if it has a default."""
    positional = arguments.posonlyargs + arguments.args
    first_default = len(positional) - len(arguments.defaults)
    yield from ((arg, place >= first_default) for place, arg in enumerate(positional))
    keyword = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    yield from ((arg, default is not None) for arg, default in keyword)


def _dataclass_parameters(node: ast.ClassDef, module: Module) -> Iterator[tuple[ast.arg, bool]]:
    for owner, place in reversed(list(lineage(node, module))):
        for one in owner.body:
            if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name):
                continue
            if written(one.annotation, place).name != "ClassVar":
                yield ast.arg(one.target.id, one.annotation), one.value is not None


def _held(
    where: str,
    parameters: list[tuple[ast.arg, bool]],
    module: Module,
    given: Mapping[str, Any],
    any_name: bool,
    needed: bool = True,
) -> dict[str, JsonType]:
    """Return the types of the arguments. ConfigError lists those that are unknown, missing or of another type."""
    known = {arg.arg: arg for arg, _ in parameters}
    wrong = [] if any_name else [_unknown(where, name, list(known)) for name in given if name not in known]
    for arg, has_default in parameters if needed else ():
        if arg.arg not in given and not has_default:
            fix = f"add `arguments: {{{arg.arg}: ...}}` to the step"
            wrong.append(ConfigError(f"arguments.{arg.arg}", f"missing: {where} needs it", fix=fix))
    types: dict[str, JsonType] = {}
    for name, value in given.items():
        types[name] = ANY
        if name not in known or (annotation := known[name].annotation) is None:
            continue
        types[name], problem = _argument(f"{where}({name})", name, annotation, module, value)
        wrong += [problem] if problem is not None else []
    if wrong:
        first, *others = wrong
        raise ConfigError(first.option, first.found, first.expected, first.fix, others)
    return types


def _unknown(where: str, name: str, known: list[str]) -> ConfigError:
    close = difflib.get_close_matches(name, known, n=1)
    expected = f"one of {', '.join(known)}" if known else "no arguments"
    fix = f"did you mean {close[0]}?" if close else ""
    return ConfigError(f"arguments.{name}", f"{where} has no parameter {name}", expected, fix)


def _argument(
    where: str, name: str, annotation: ast.expr, module: Module, value: Any
) -> tuple[JsonType, ConfigError | None]:
    """Return an argument's type, and the error for a value of another type."""
    option, text = f"arguments.{name}", ast.unparse(annotation).strip("'\"")
    port = _port_type(text) if unquoted(annotation) is not None else None
    if port is not None and port.kind not in _IN_JSON:
        found = f"{where} is of type {text}, which a pipeline file cannot contain"
        return ANY, ConfigError(option, found, "an input", f"wire it: `inputs: {{{name}: ...}}`")
    type = read_json_type(annotation, module)
    base = written(annotation, module)
    if type is None and (base.node is not None or base.name == "bytes"):
        type = JsonType("any", text, built=True)
    type = type or ANY
    if built := list(type.classes()):
        found = f"{where} is of type {built[0]}, which a pipeline file cannot contain"
        return ANY, ConfigError(option, found, "text, a number, a list or a mapping", "let the class make it")
    wrong = misfit(type, value)
    if wrong is None:
        return type, None
    return type, ConfigError(f"{option}{wrong.path}", f"{where} is {wrong.found}", wrong.expected, _ARGUMENT_FIX)


def _port_type(text: str) -> PortType | None:
    """Return the port type of a quoted annotation; None for Python's types (`bool` is a dtype too)."""
    if text.strip() == "bool":
        return None
    try:
        return PortType.parse(text)
    except ValueError:
        return None


class _Reader:
    """Reader of one function's annotations, with its name for errors."""

    def __init__(self, where: str, name: str, module: Module, option: str) -> None:
        self.where, self.name, self.module, self.option = where, name, module, option

    def error(self, found: str, expected: str = "", fix: str = "") -> ConfigError:
        return ConfigError(self.option, f"{self.where} {found}", expected, fix or _FIX.format(name=self.name))

    def refuse_what_is_no_function(self, function: Function) -> None:
        if isinstance(function, ast.AsyncFunctionDef):
            fix = "write `def`, and run what is async inside it: asyncio.run(...)"
            raise self.error("is async", "a plain function: a step already runs beside the others", fix)
        if any(isinstance(one, ast.Yield | ast.YieldFrom) for one in _own_nodes(function)):
            raise self.error("is a generator: it yields", "a function that returns its answer", "return a list")

    def arguments(self, arguments: ast.arguments, given: Mapping[str, Any]) -> dict[str, JsonType]:
        """Return the types of the step's `arguments` for a function."""
        return _held(self.where, list(_parameters(arguments)), self.module, given, any_name=False, needed=False)

    def inputs(self, arguments: ast.arguments, skip: int, given: Mapping[str, Any]) -> tuple[Port, ...]:
        if arguments.vararg or arguments.kwarg:
            raise self.error("takes *args or **kwargs", "a name and a type for every input")
        if len(arguments.posonlyargs) > skip:
            raise self.error("has parameters before a '/'", "parameters that can be given by name")
        parameters = list(_parameters(arguments))[skip:]
        return tuple(self._input(arg, has_default) for arg, has_default in parameters if arg.arg not in given)

    def _input(self, arg: ast.arg, optional: bool) -> Port:
        if arg.annotation is None:
            raise self.error(f"has no type for parameter {arg.arg}")
        what = f"parameter {arg.arg}"
        type, json = self._type(arg.annotation, what)
        if built := list(json.classes()):
            found = f"has {built[0]} in the type of {what}; values travel as JSON, not as objects of a class"
            fix = f"annotate it dict (or a TypedDict), and make the object inside: {built[0]}(**{arg.arg})"
            raise self.error(found, "a JSON type: dict, list, float, str, a TypedDict ...", fix)
        return Port(arg.arg, type, optional)

    def outputs(self, returns: ast.expr | None) -> tuple[tuple[Port, ...], dict[str, JsonType]]:
        if returns is None:
            raise self.error("has no return annotation")
        quoted = unquoted(returns)
        returns = quoted if isinstance(quoted, ast.Dict) else returns
        if not isinstance(returns, ast.Dict):
            named = [(SINGLE, returns, "the return value")]
        elif not returns.keys:
            raise self.error("returns an empty dict", "at least one output")
        else:
            named = list(self._named(returns))
        ports, types = [], {}
        for name, annotation, what in named:
            type, json = self._type(annotation, what, returned=True)
            ports.append(Port(name, type, listed=_list_type(json) if type.kind == "json" else None))
            if json.kind != "any" and (type.kind == "json" or json.kind == "literal"):
                types[name] = json
        return tuple(ports), types

    def _named(self, returns: ast.Dict) -> Iterator[tuple[str, ast.expr, str]]:
        for key, value in zip(returns.keys, returns.values, strict=True):
            if not isinstance(key, ast.Constant) or not isinstance(key.value, str) or not key.value.isidentifier():
                raise self.error("has a return annotation with a key that is no name", 'like {"label": "text"}')
            yield key.value, value, f"output {key.value}"

    def _type(self, annotation: ast.expr, what: str, returned: bool = False) -> tuple[PortType, JsonType]:
        """Return the port type of an annotation, and the type of its JSON value."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            return self._quoted(annotation.value, what, returned)
        found = written(annotation, self.module)
        if found.name == "Annotated" and found.inside:
            return self._annotated(found.inside, what, returned)
        if found.name == "Union":
            return self._union(annotation, found.inside, what, returned)
        if found.name in _LISTS and found.inside:
            element = self._element(found.inside[0], what)
            if element is not None:
                return list_of(element), ANY
        if found.name == "NDArray" and found.inside:
            dtype = written(found.inside[0], self.module).name.removesuffix("_")
            return PortType("tensor", dtype if dtype in ITEM_BYTES else None), ANY
        json = read_json_type(annotation, self.module)
        if found.node is None and found.name in _KINDS:
            return PortType(_KINDS[found.name]), ANY
        if json is None:
            raise self._no_type(annotation, what)
        if json.kind == "literal" and all(isinstance(value, str) for value in json.values):
            return PortType("text"), json
        return PortType("json"), json

    def _no_type(self, annotation: ast.expr, what: str) -> ConfigError:
        fix = 'write "image" for a picture: it is a uint8[H, W, 3] array' if "Image" in ast.unparse(annotation) else ""
        return self.error(f"has a type for {what} that is no port type: {ast.unparse(annotation):.80}", _KNOWN, fix)

    def _quoted(self, text: str, what: str, returned: bool) -> tuple[PortType, JsonType]:
        """Read a string: a port type first, else a Python type in quotes."""
        port = _port_type(text)
        if port is not None:
            return port, ANY
        inner = unquoted(ast.Constant(text))
        try:
            if inner is not None and not isinstance(inner, ast.Constant):
                return self._type(inner, what, returned)
        except ConfigError as error:
            if "no port type" not in error.found:
                raise
        try:
            PortType.parse(text)
        except ValueError as error:
            raise self.error(f"has a type for {what} that is no port type: {error}", _KNOWN) from None
        raise self._no_type(ast.Constant(text), what)

    def _annotated(self, inside: tuple[ast.expr, ...], what: str, returned: bool) -> tuple[PortType, JsonType]:
        """Read `Annotated[type, ...]`: a port type in the metadata takes precedence."""
        texts = [one.value for one in inside[1:] if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        for type in filter(None, map(_port_type, texts)):
            return type, ANY
        if texts and written(inside[0], self.module).name in ("ndarray", "Tensor", "Any", "list", "List", "object"):
            return self._quoted(texts[0], what, returned)
        return self._type(inside[0], what, returned)

    def _union(
        self, annotation: ast.expr, inside: tuple[ast.expr, ...], what: str, returned: bool
    ) -> tuple[PortType, JsonType]:
        members = [one for one in inside if written(one, self.module).name != "None"]
        types = [self._type(one, what) for one in members]
        json = read_json_type(annotation, self.module) or ANY
        if all(type.kind == "json" for type, _ in types):
            return PortType("json"), json
        if len(types) == 1:
            if not returned:
                return types[0]
            fix = 'return an empty value instead, or write "json" if null may be returned: a json output is not a text'
            raise self.error(
                f"may return None as {types[0][0]} ({ast.unparse(annotation):.60})", f"{types[0][0]}, always", fix
            )
        if all(type.kind in _IN_JSON for type, _ in types):
            return PortType("json"), json
        kinds = " or ".join(str(type) for type, _ in types)
        raise self.error(f"has a type for {what} that is {kinds}", "one port type", "use two parameters or two outputs")

    def _element(self, node: ast.expr, what: str) -> PortType | None:
        """Return the element type of `list[node]`; None when the list is json."""
        found = written(node, self.module)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            port = _port_type(node.value)
            if port is not None or (read_json_type(node, self.module) is None and found.name not in _KINDS):
                return port or self._quoted(node.value, what, False)[0]
        if found.name in _LISTS and found.inside:
            inner = self._element(found.inside[0], what)
            return None if inner is None else list_of(inner)
        if found.name == "Annotated" and found.inside:
            type = self._annotated(found.inside, what, False)[0]
            return None if type.kind in _IN_JSON else type
        kind = _KINDS.get(found.name, "json") if found.node is None else "json"
        return None if kind in _IN_JSON else PortType(kind)


def _list_type(json: JsonType, depth: int = 1) -> PortType | None:
    """Return the port type of a list of JSON: list[text], list[json], list[list[text]]; None for other types."""
    if json.kind != "list":
        return None
    element = json.of[0] if json.of else ANY
    if element.kind == "str" or (element.kind == "literal" and all(isinstance(one, str) for one in element.values)):
        return list_of(PortType("text"))
    inner = _list_type(element, depth + 1) if depth < LIST_DEPTH_MAX else None
    return list_of(inner or PortType("json"))


def _own_nodes(function: Function) -> Iterator[ast.AST]:
    """Yield the nodes of a function's body, without nested functions and classes."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
