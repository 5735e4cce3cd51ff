"""Loading of torch.export files without unpickling, as far as torch allows.

torch.export.load falls back to unrestricted pickles for parts of an archive, loads compiled libraries in it, looks up
functions by name and passes texts to sympy, which evaluates them. All of that is prevented here: only the parts of a
plain exported program are allowed, every pickle is read with weights only, functions are operators of known namespaces,
and expressions contain only sizes and arithmetic. It remains a program in torch's small
language, as TorchScript is; name a file only when you would also run a script of its author's.
"""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weftline.errors import ModelError, first_line
from weftline.nodes.model_file import check_stored
from weftline.nodes.model_limits import open_zip
from weftline.nodes.strict_json import FILES, parse

_ALLOWED = re.compile(
    r"^(models/[\w.-]+\.json"
    r"|data/(weights/(weight_\d+|[\w.-]+_config\.json)|constants/(tensor_\d+|[\w.-]+_config\.json)|sample_inputs/[\w.-]+\.pt)|archive_format|archive_version|byteorder|version|\.data/\w+|extra/[\w.-]+)$"
)
"""Entries of an archive, below its top folder, that a plain exported program is made of."""

PROGRAM_BYTES_MAX = 32 << 20
"""Most bytes of JSON in an archive: an operator takes some two thousand, and JSON twenty times its size once read."""

_ZIP_MAGIC = b"PK\x03\x04"

_TARGET = re.compile(
    r"^(torch\.ops\.(aten|prim|prims|higher_order|torchvision|quantized|quantized_decomposed|torchao)\.\w+(\.\w+)?"
    r"|_operator\.(add|sub|mul|floordiv|mod|truediv|pow|neg|getitem|eq|ne|lt|le|gt|ge|and_|or_|not_|lshift|rshift)"
    r"|math\.\w+|torch\.sym_\w+)$"
)
"""Functions a program may call: operators, arithmetic, and those on symbolic sizes."""

_SIZE = re.compile(r"'?\b[a-z]{1,3}\d+\b'?")
"""A symbolic size, such as s77, in quotes or not."""

_WORDS = frozenset((
    "Symbol", "Integer", "Rational", "Float", "Add", "Mul", "Pow", "Mod", "Max", "Min", "Abs", "Equality",
    "Unequality", "Eq", "Ne", "LessThan", "StrictLessThan", "GreaterThan", "StrictGreaterThan", "And", "Or", "Not",
    "true", "false", "True", "False", "positive", "nonnegative", "negative", "integer", "real", "FloorDiv",
    "CeilDiv", "PythonMod", "ModularIndexing", "CleanDiv", "IntTrueDiv", "FloatTrueDiv", "CeilToInt", "FloorToInt",
    "TruncToInt", "ToFloat",
))  # fmt: skip
"""Words of expressions besides sizes and numbers, in sympy's notation."""

_ARITHMETIC = re.compile(r"^[\w\s+\-*/%(),<>=!&|~]*$")
_WORD = re.compile(r"[A-Za-z_]\w*")


def load_exported(path: Path, shown: str) -> Any:
    """Return the module of the exported program at `path`; ModelError when it is something else, or more than that."""
    check_exported(path, shown)
    import torch

    with _weights_only():
        try:
            # Guards are Python source in the file; ports say what they would have checked.
            return torch.export.load(path).module(check_guards=False)
        except Exception as error:
            first = first_line(error).replace(str(path), shown)
            raise ModelError(f"{shown} is no torch.export file, or is corrupt: {first:.200}") from None


def check_exported(path: Path, shown: str) -> None:
    """Raise ModelError unless a file is an exported program without code of Python, by its entries and its JSON."""
    try:
        with open_zip(path) as archive:
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
            if len(entries) != len(archive.infolist()):
                raise ValueError("two entries of one name: which one is meant depends on the reader")
            odd = [name for name in entries if not _ALLOWED.match(name)]
            if odd:
                raise ModelError(
                    f"{shown} holds {odd[0]!r:.100}, which can run code when it is loaded; it was not opened"
                )
            check_stored(archive.infolist(), path.stat().st_size)
            for name, entry in entries.items():
                if name.startswith("data/"):
                    _check_saved_tensors(archive, entry)
            programs = _read_programs(archive, [entry for name, entry in entries.items() if name.startswith("models/")])
    except (OSError, RuntimeError, zipfile.BadZipFile, EOFError, zlib.error, UnicodeError):  # RuntimeError: encrypted
        raise ModelError(f"{shown} is no torch.export file, or a truncated one") from None
    except ValueError as error:
        raise ModelError(f"{shown} is no torch.export file, or a truncated one: {error!s:.120}") from None
    if not programs:
        raise ModelError(
            f"{shown} holds no exported program\n    fix: save it with torch.export.save of torch 2.9 or later"
        )
    for key, text in _texts(programs):
        if (key == "target" and not _TARGET.match(text)) or (key == "expr_str" and not _is_arithmetic(text)):
            raise ModelError(f"{shown} asks for {text!r:.100}, which is not an operator or a size; it was not opened")


def _check_saved_tensors(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    """Raise ValueError when a stored entry is an archive of torch.save that holds more than its own size."""
    with archive.open(entry) as file:
        if file.read(len(_ZIP_MAGIC)) != _ZIP_MAGIC:  # how torch.load tells, too
            return
        with zipfile.ZipFile(file) as inner:
            check_stored(inner.infolist(), entry.file_size)


def _read_programs(archive: zipfile.ZipFile, entries: list[zipfile.ZipInfo]) -> list[Any]:
    claimed = sum(entry.file_size for entry in entries)
    if claimed > PROGRAM_BYTES_MAX:
        raise ValueError(f"its programs take {claimed} bytes, expected at most {PROGRAM_BYTES_MAX}")
    return [parse(archive.read(entry), FILES) for entry in entries]


def _texts(value: Any) -> Iterator[tuple[str, str]]:
    """Yield every text that has a key, at any depth of a JSON value."""
    waiting = [("", value)]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, str):
            yield key, value
        elif isinstance(value, dict):
            waiting.extend(value.items())
        elif isinstance(value, list):
            waiting.extend((key, part) for part in value)


def _is_arithmetic(text: str) -> bool:
    rest = _SIZE.sub("0", text)
    return bool(_ARITHMETIC.match(rest)) and _WORDS.issuperset(_WORD.findall(rest))


@contextmanager
def _weights_only() -> Iterator[None]:
    """Make every torch.load inside the block read weights only, whatever its caller asks for."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
