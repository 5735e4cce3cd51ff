"""JSON types such as `dict[str, float]`, and validation of values against them.

A type is read from the source text. The fields of a class in the user's files are known: a dataclass, a TypedDict, a
NamedTuple or a pydantic model. An unknown type, such as a class of another package, is any JSON value.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weftline.nodes.user_code import Module
from weftline.nodes.values import describe

_NAMES: Mapping[str, str] = {
    name: kind
    for kind, names in {
        "any": "Any object JSON ndarray Tensor NDArray ArrayLike Detections",
        "null": "None NoneType",
        "bool": "bool bool_",
        "int": "int integer int8 int16 int32 int64 uint8 uint16 uint32 uint64 Integral",
        "float": "float floating float16 float32 float64 number Number Real",
        "str": "str str_ LiteralString datetime date time timedelta UUID Decimal",
        "path": "Path PurePath",
        "list": "list List Sequence MutableSequence Collection set Set frozenset FrozenSet AbstractSet deque Deque",
        "tuple": "tuple Tuple",
        "dict": "dict Dict Mapping MutableMapping defaultdict DefaultDict OrderedDict Counter",
    }.items()
    for name in names.split()
}
"""Names of Python types, by the last part as in `np.float32`, and what they are as JSON."""

SPECIAL = frozenset({"Annotated", "Union", "Optional", "Literal", "Final", "Required", "NotRequired", "ReadOnly"})
KNOWN = frozenset(_NAMES) | SPECIAL
_MEANS = {"null": "null (None)", "list": "a list", "tuple": "a list", "dict": "a JSON object (a dict)", "path": "text"}
_EXACT: Mapping[str, frozenset[Any]] = {
    "bool": frozenset({bool}),
    "int": frozenset({int}),
    "float": frozenset({float, int}),
    "str": frozenset({str}),
    "path": frozenset({str}),
    "null": frozenset({type(None)}),
    "list": frozenset({list, tuple}),
    "tuple": frozenset({list, tuple}),
    "dict": frozenset({dict}),
    "object": frozenset({dict}),
}


@dataclass(frozen=True, slots=True)
class JsonType:
    """A type inside JSON.

    kind:   any, null, bool, int, float, str, path, list, tuple, dict, object, literal or union.
    text:   as it is written.
    of:     of a list, its elements; of a dict, its values; of a tuple, each element; of a union, its members.
    fields: of an object, the name, the type, and whether it must be there.
    values: of a literal.
    built:  it is a class whose objects are not dicts, such as a dataclass.
    """

    kind: str
    text: str
    of: tuple[JsonType, ...] = ()
    fields: tuple[tuple[str, JsonType, bool], ...] = ()
    values: tuple[Any, ...] = ()
    built: bool = False

    def classes(self) -> Iterator[str]:
        """Yield the classes in it whose objects JSON cannot restore."""
        if self.built:
            yield self.text
        for one in self.of:
            yield from one.classes()

    def expected(self) -> str:
        """Return what is expected, for people: 'list[float]', 'a JSON object (a dict)'."""
        return self.text if self.of or self.fields or self.values else _MEANS.get(self.kind, self.text)


ANY = JsonType("any", "Any")


@dataclass(frozen=True, slots=True)
class Misfit:
    """Location of a type mismatch in a JSON value, such as '.boxes[3]', with found and expected type."""

    path: str
    found: str
    expected: str

    def under(self, step: str) -> Misfit:
        return replace(self, path=step + self.path)


def misfit(type: JsonType, value: Any) -> Misfit | None:
    """Return the first place where a JSON value is not of `type`; None when it is."""
    kind = type.kind
    if kind == "any":
        return None
    if kind == "union":
        return _misfit_of_union(type, value)
    if kind == "literal":
        right = any(value == one and value.__class__ is one.__class__ for one in type.values)
        return None if right else Misfit("", _found(value), type.text)
    if value.__class__ not in _EXACT[kind]:
        return Misfit("", _found(value), type.expected())
    if kind == "tuple" and type.of and len(value) != len(type.of):
        return Misfit("", f"a list of {len(value)}", f"{type.text}, {len(type.of)} elements")
    return _misfit_inside(type, value)


def _misfit_inside(type: JsonType, value: Any) -> Misfit | None:
    if type.kind == "object":
        for name, one, required in type.fields:
            if name in value:
                wrong = misfit(one, value[name])
                if wrong is not None:
                    return wrong.under(f".{name}")
            elif required:
                return Misfit("", f"an object without {name}", type.text)
    elif type.kind == "tuple":
        for place, (one, element) in enumerate(zip(type.of, value, strict=False)):
            if (wrong := misfit(one, element)) is not None:
                return wrong.under(f"[{place}]")
    elif type.of:
        return _misfit_of_elements(type.of[0], value)
    return None


def _misfit_of_elements(type: JsonType, value: Any) -> Misfit | None:
    elements = value.values() if value.__class__ is dict else value
    leaf = not type.of and not type.fields and type.kind in _EXACT
    if type.kind == "any" or (leaf and _EXACT[type.kind].issuperset(map(_class, elements))):
        return None
    pairs = value.items() if value.__class__ is dict else enumerate(value)
    for key, element in pairs:
        if (wrong := misfit(type, element)) is not None:
            return wrong.under(f"[{key}]" if isinstance(key, int) else f".{key:.40}")
    return None


_class = type  # `type` is the name of an argument above


def _misfit_of_union(type: JsonType, value: Any) -> Misfit | None:
    wrongs = []
    for one in type.of:
        wrong = misfit(one, value)
        if wrong is None:
            return None
        wrongs += [wrong] if wrong.path else []
    return wrongs[0] if len(wrongs) == 1 else Misfit("", _found(value), type.text)


def _found(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null (None)", True: "true", False: "false"}[value]
    return "a JSON object (a dict)" if isinstance(value, dict) else describe(value)


def as_annotated(type: JsonType, value: Any, base_dir: Path) -> Any:
    """Convert a JSON value to the Python types of its annotation: tuples, and paths relative to `base_dir`."""
    if type.kind == "path":
        return base_dir / value
    if type.kind == "union":
        fits = [one for one in type.of if misfit(one, value) is None]
        return as_annotated(fits[0], value, base_dir) if fits else value
    if type.kind == "list" and type.of:
        return [as_annotated(type.of[0], one, base_dir) for one in value]
    if type.kind == "tuple":
        pairs = zip(type.of, value, strict=True) if type.of else ((ANY, one) for one in value)
        return tuple(as_annotated(one, element, base_dir) for one, element in pairs)
    return value


@dataclass(frozen=True, slots=True)
class Written:
    """An annotation with aliases resolved: its name such as 'list', its type arguments, and its module.

    node: the definition of a class; else None.
    """

    name: str
    inside: tuple[ast.expr, ...]
    module: Module
    node: ast.ClassDef | None = None


def written(node: ast.AST, module: Module, depth: int = 16) -> Written:
    """Return an annotation with aliases and quotes resolved; its name is '' when it is no type."""
    if depth and isinstance(node, ast.Constant):
        if node.value is None:
            return Written("None", (), module)
        quoted = unquoted(node)
        return written(quoted, module, depth - 1) if quoted is not None else Written("", (), module)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return Written("Union", (node.left, node.right), module)
    if isinstance(node, ast.Subscript):
        head = written(node.value, module, depth - 1)
        inside = tuple(node.slice.elts) if isinstance(node.slice, ast.Tuple) else (node.slice,)
        if head.name == "Optional":
            return Written("Union", (*inside, ast.Constant(None)), module)
        return head if head.node is not None or head.inside else replace(head, inside=inside, module=module)
    if isinstance(node, ast.Attribute):
        return Written(node.attr, (), module)
    if not isinstance(node, ast.Name) or not depth:
        return Written("", (), module)
    found = module.lookup(node.id, KNOWN)
    if found is None or found.node is None:
        return Written(found.name if found is not None else node.id, (), module)
    if isinstance(found.node, ast.ClassDef):
        return Written(found.node.name, (), found.module, found.node)
    if isinstance(found.node, ast.Call) and ast.unparse(found.node.func).endswith("NewType"):
        return written(found.node.args[-1], found.module, depth - 1)
    if isinstance(found.node, ast.Name):
        return Written(found.name, (), found.module)
    return written(found.node, found.module, depth - 1)


def unquoted(node: ast.expr) -> ast.expr | None:
    """Return the expression that an annotation in quotes holds; None when it is no text, or no Python."""
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        return None
    try:
        return ast.parse(node.value.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError):
        return None


def read_json_type(node: ast.AST, module: Module, within: frozenset[str] = frozenset()) -> JsonType | None:
    """Return the JSON type of an annotation; None when it is not known.

    within: enclosing classes, which ends the recursion of a class that contains itself.
    """
    found, text = written(node, module), ast.unparse(node).strip("'\"")

    def inside(one: ast.expr) -> JsonType:
        return read_json_type(one, found.module, within) or ANY

    if found.node is not None:
        return _read_class(found.node, found.module, within)
    if found.name in ("Annotated", "Final", "Required", "NotRequired", "ReadOnly") and found.inside:
        return read_json_type(found.inside[0], found.module, within)
    if found.name == "Union":
        return JsonType("union", text, tuple(map(inside, found.inside)))
    if found.name == "Literal":
        values = tuple(one.value for one in found.inside if isinstance(one, ast.Constant))
        return JsonType("literal", text, values=values) if len(values) == len(found.inside) else ANY
    kind = _NAMES.get(found.name)
    if kind is None or (found.inside and kind not in ("any", "list", "tuple", "dict")):
        return None
    if kind == "tuple" and len(found.inside) == 2 and ast.unparse(found.inside[1]) == "...":
        return JsonType("list", text, (inside(found.inside[0]),))
    if kind == "tuple":
        return JsonType("tuple", text, tuple(map(inside, found.inside)))
    if kind in ("list", "dict") and found.inside:
        value = ast.Name("int") if found.name == "Counter" else found.inside[-1]
        return JsonType(kind, text, (inside(value),))
    return JsonType(kind, text)


def _read_class(node: ast.ClassDef, module: Module, within: frozenset[str]) -> JsonType | None:
    """Return the JSON type of a class; None when it has no known fields."""
    bases = list(base_names(node, module))
    if "Enum" in " ".join(bases):
        return JsonType("str" if {"StrEnum", "str"} & {*bases} else "any", node.name, built=True)
    models = {"TypedDict", "NamedTuple", "BaseModel", "Struct", "RootModel", "SQLModel"} & {*bases}
    if not models and not any(is_dataclass(one) for one, _ in lineage(node, module)):
        return None
    if node.name in within or "RootModel" in models:
        return replace(ANY, text=node.name, built="TypedDict" not in models)
    fields = tuple(_fields(node, module, within | {node.name}))
    if "NamedTuple" in models:
        return JsonType("tuple", node.name, tuple(type for _, type, _ in fields), built=True)
    typed_dict = "TypedDict" in models
    total = not any(one.arg == "total" and ast.unparse(one.value) == "False" for one in node.keywords)
    fields = tuple((name, type, required and (total or not typed_dict)) for name, type, required in fields)
    return JsonType("object", node.name, fields=fields, built=not typed_dict)


def _fields(node: ast.ClassDef, module: Module, within: frozenset[str]) -> Iterator[tuple[str, JsonType, bool]]:
    for owner, place in reversed(list(lineage(node, module))):
        for one in owner.body:
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                form = written(one.annotation, place).name
                if form == "ClassVar" or one.target.id.startswith("_"):
                    continue
                required = form != "NotRequired" and one.value is None
                yield one.target.id, read_json_type(one.annotation, place, within) or ANY, required


def lineage(node: ast.ClassDef, module: Module, depth: int = 16) -> Iterator[tuple[ast.ClassDef, Module]]:
    """Yield a class and its base classes in the user's files, nearest first."""
    yield node, module
    for base in node.bases if depth else ():
        found = module.lookup(base.id) if isinstance(base, ast.Name) else None
        if found is not None and isinstance(found.node, ast.ClassDef):
            yield from lineage(found.node, found.module, depth - 1)


def base_names(node: ast.ClassDef, module: Module) -> Iterator[str]:
    """Yield the names of all base classes of a class, including those of other packages."""
    for owner, _ in lineage(node, module):
        for base in owner.bases:
            head = base.value if isinstance(base, ast.Subscript) else base
            yield ast.unparse(head).rpartition(".")[2]


def is_dataclass(node: ast.ClassDef) -> bool:
    """Return True for classes decorated as a dataclass."""
    heads = (one.func if isinstance(one, ast.Call) else one for one in node.decorator_list)
    return any(ast.unparse(head).rpartition(".")[2] == "dataclass" for head in heads)
