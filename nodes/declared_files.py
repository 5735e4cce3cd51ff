"""Files that a step loads: found by the values of its options, identified by inode, change time and size.

The identity is a matter of `stat`: cheap enough for every start, and different after each write. Of a folder the names
of its files count too, so that a shard or a tokenizer that is added later is noticed. Contents of models that `weftline
fetch` has pinned are compared too (`model_store.verify`).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weftline.errors import ModelError
from weftline.nodes.contract import ConfigError

FILES_MAX = 1024
"""Most files of a step that are compared; of a larger folder the first by name."""

PATH_CHARS_MAX = 1024
"""Longest text that is taken for a path."""

LISTED = frozenset(
    {".bin", ".gguf", ".jinja", ".json", ".model", ".onnx", ".pt", ".pth", ".safetensors", ".tiktoken", ".txt"}
)
"""Endings of the files whose names count in the listing of a folder: those that loaders look for."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """State of a file: any write, replacement or truncation changes it.

    Of the listing of a folder, whose path ends with a slash: a digest of the names instead of a time, and their number.
    """

    path: str
    inode: int
    ctime_ns: int
    size_bytes: int


def identities(paths: Iterable[Path]) -> tuple[FileIdentity, ...]:
    """Return the identity of each file, and of each regular file below each folder, by path; at most FILES_MAX."""
    found: dict[str, FileIdentity] = {}
    for path in _regular(paths):
        if len(found) >= FILES_MAX:
            break
        one = identity(str(path))
        if one is not None:
            found[one.path] = one
    return tuple(found[path] for path in sorted(found))


def listings(paths: Iterable[Path]) -> tuple[FileIdentity, ...]:
    """Return the identity of the listing of each folder, but for models in the hub's cache, which loaders complete."""
    folders = (path for path in paths if is_folder(path) and path.parent.name != "snapshots")
    return tuple(one for path in folders if (one := identity(f"{path}{os.sep}")) is not None)


def check_unchanged(files: Sequence[FileIdentity]) -> None:
    """Compare the files of a step with what was planned; ModelError names those that differ or are missing.

    It names no step: steps of several pipelines may use the node.
    """
    changed = [one.path for one in files if identity(one.path) != one]
    if changed:
        shown = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
        raise ModelError(f"its files changed since it was planned: {shown}; reload the pipeline")


def named_paths(value: Any, base_dir: Path) -> list[Path]:
    """Return the files and folders that text in an option's value names, nested values included: those that exist.

    They are relative to `base_dir`, pinned by URL, or hub models in the cache. In a list, only text with a dot or a
    slash can be a path: most lists hold labels.
    """
    found = (local_path(text, base_dir) or _in_hub_cache(text) for text in texts_of(value))
    return [one for path in found if path is not None for one in (path, *_beside(path))]


def local_path(text: str, base_dir: Path) -> Path | None:
    """Return the file or folder that exists and that a text names, relative to `base_dir` or pinned by URL."""
    from weftline.nodes.model_store import find_stored, is_url

    if not 0 < len(text) <= PATH_CHARS_MAX or not text.isprintable():
        return None
    try:
        if is_url(text):
            return find_stored(text, base_dir)
        path = (base_dir / Path(text).expanduser()).resolve()
        return path if path.is_file() or is_folder(path) else None
    except (OSError, ValueError, RuntimeError, ConfigError):
        return None


def _in_hub_cache(name: str) -> Path | None:
    from weftline.nodes.hugging_face import cached_snapshot

    return cached_snapshot(name) if _HUB_NAME.fullmatch(name) else None


def _beside(path: Path) -> list[Path]:
    """Return the files that an ONNX model refers to: those with its weights."""
    if path.suffix != ".onnx" or not path.is_file():
        return []
    from weftline.nodes.onnx_file import read_onnx

    try:
        return [path.parent / name for name in {one.location for one in read_onnx(path, path.name).external}]
    except ModelError:  # opening the node reports it
        return []


def texts_of(value: Any, in_list: bool = False) -> Iterator[str]:
    """Yield the text in an option's value, nested values included, that can be a path."""
    if isinstance(value, str):
        if any(map(str.isalnum, value)) and (not in_list or "." in value or "/" in value):
            yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from texts_of(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from texts_of(one, in_list=True)


def _regular(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if not is_folder(path):
            yield path
            continue
        for folder, folders, names in os.walk(path):
            folders.sort()
            folders[:] = [one for one in folders if not one.startswith((".", "__pycache__"))]
            yield from (Path(folder) / name for name in sorted(names) if not name.startswith("."))


def is_file(path: Path) -> bool:
    """Return whether a regular file is there; False for a name that the system refuses."""
    try:
        return path.is_file()
    except OSError:  # such as a name that is too long
        return False


def is_folder(path: Path) -> bool:
    """Return whether a folder is there; False for one that may not be seen."""
    try:
        return path.is_dir()
    except OSError:
        return False


def identity(path: str) -> FileIdentity | None:
    """Return the identity of a file, or of a folder's listing; None if there is none."""
    try:
        if path.endswith(os.sep):
            names = [str(one.relative_to(path)) for one in _regular([Path(path)]) if one.suffix.lower() in LISTED]
            digest = hashlib.sha256("\0".join(sorted(names)).encode("utf-8", "surrogateescape")).digest()
            return FileIdentity(path, Path(path).stat().st_ino, int.from_bytes(digest[:7]), len(names))
        found = Path(path).stat()
    except OSError:
        return None
    return FileIdentity(path, found.st_ino, found.st_ctime_ns, found.st_size)
