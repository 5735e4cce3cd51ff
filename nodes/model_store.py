"""Models named by URL: files fetched before, pinned by their SHA-256, in a cache on this machine.

    model: s3://bucket/models/chat        # in a pipeline file
    model: hf://owner/name@revision       # on the hub of Hugging Face

`weftline fetch` (`model_download`) downloads such a model into the cache and writes `models.lock.json` beside the
pipeline: each file's name, size and SHA-256. To all nodes the model is then a folder of this machine. Nothing is
downloaded when a pipeline is checked or opened, and no process of a step needs access to the store. A worker compares
all files with the lock file before it opens the step (`verify`).

A model's folder in the cache is named by the digest of its list of files: pipelines with the same pin share it, and a
pin never finds other files. Pickled weights are never fetched.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weftline.errors import ModelError
from weftline.nodes.contract import ConfigError
from weftline.nodes.model_limits import open_file, parse_json, read_bytes

LOCK = "models.lock.json"
LOCK_BYTES_MAX = 16 << 20
OPTIONS = ("model", "draft_model")
"""Options of steps that may name a model by URL."""
FILES_MAX = 1024
MODEL_BYTES_MAX = 4 << 40
"""Largest accepted model; the largest published ones take 1.3 TB."""
SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".jinja", ".tiktoken", ".gguf", ".onnx", ".onnx_data")
"""Files of a model that are fetched; never pickled ones."""
CTRANSLATE2 = "model.bin"
"""Weights of CTranslate2, which are no pickle; fetched where its vocabulary is beside them."""
SINGLE = (".gguf", ".onnx", ".safetensors")
"""Models that are one file, by the end of their URL."""
_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
_NAME = re.compile(r"(?!.*\.\.)\w[\w.+@=-]*(/\w[\w.+@=-]*){0,3}", re.ASCII)
"""A file's name below its model's folder: plain characters, no hidden files, nothing that leads outside."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a model, as the lock file pins it. name: its path below the model's folder."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A pinned model."""

    url: str
    files: tuple[StoredFile, ...]

    @property
    def folder(self) -> Path:
        """Return its folder in the cache, which may not exist."""
        lines = "".join(f"{one.sha256} {one.size_bytes} {one.name}\n" for one in sorted(self.files, key=_name))
        return cache_dir() / hashlib.sha256(lines.encode()).hexdigest()

    @property
    def path(self) -> Path:
        """Return what the URL names: the folder, or the file in it."""
        return self.folder / self.files[0].name if self.url.endswith(SINGLE) else self.folder

    def missing(self) -> list[StoredFile]:
        """Return the files that are not in the cache in full size."""
        return [one for one in self.files if _size(self.folder / one.name) != one.size_bytes]


def is_url(model: str) -> bool:
    """Return whether a model is named by URL."""
    return _URL.match(model) is not None


def is_name(name: str) -> bool:
    """Return whether `name` may be that of a model's file."""
    return len(name) <= 200 and _NAME.fullmatch(name) is not None


def cache_dir() -> Path:
    """Return the folder of fetched models, in the user's cache (XDG base directory specification)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "weftline" / "models"
    except RuntimeError:
        found = "this user has no home folder, and so no cache of fetched models"
        raise ConfigError("model", found, "a cache folder", "set XDG_CACHE_HOME") from None


def find_stored(model: str, base_dir: Path) -> Path | None:
    """Return where a model named by URL, or a part of one, is on this machine; None for a part that is not there.

    ConfigError about option `model` where it is not pinned, or was not fetched.
    """
    pinned = _find_pinned(model.rstrip("/"), base_dir)
    if pinned is None:
        found, expected = f"{model} is not pinned", f"its files in {LOCK} beside the pipeline file"
        raise ConfigError("model", found, expected, "run `weftline fetch` with the pipeline file")
    if missing := pinned.missing():
        found = f"{model} is not on this machine: {len(missing)} of its {len(pinned.files)} files are missing"
        raise ConfigError("model", found, "a fetched model", "run `weftline fetch` with the pipeline file")
    rest = model.rstrip("/").removeprefix(pinned.url).strip("/")
    path = pinned.path / rest if rest else pinned.path
    return path if (not rest or is_name(rest)) and path.exists() else None


def _find_pinned(url: str, base_dir: Path) -> StoredModel | None:
    known = read_lock(base_dir)
    around = [one for one in known.values() if url == one.url or url.startswith(f"{one.url}/")]
    return max(around, key=lambda one: len(one.url), default=None)


def read_lock(base_dir: Path) -> dict[str, StoredModel]:
    """Return the pinned models of the pipelines in a folder, by URL; ConfigError where the lock file is damaged."""
    try:
        found = parse_json(read_bytes(base_dir / LOCK, LOCK_BYTES_MAX))
        return {url: _read_model(url, files) for url, files in found["models"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
        fix = "restore it, or remove it and run `weftline fetch`"
        raise ConfigError("model", f"{LOCK} is damaged: {reason:.200}", "what `weftline fetch` writes", fix) from None


def _read_model(url: str, files: Mapping[str, Any]) -> StoredModel:
    found = tuple(StoredFile(name, one["bytes"], one["sha256"]) for name, one in files.items())
    for one in found:
        sized = type(one.size_bytes) is int and 0 <= one.size_bytes <= MODEL_BYTES_MAX
        if not is_name(one.name) or not sized or not _DIGEST.fullmatch(one.sha256):
            raise ValueError(f"file {one.name!r:.80} of {url:.200}")
    if not 1 <= len(found) <= FILES_MAX or (url.endswith(SINGLE) and len(found) != 1):
        raise ValueError(f"{url:.200} has {len(found)} files")
    return StoredModel(url, found)


def add_pin(base_dir: Path, url: str, model: StoredModel) -> None:
    """Pin a model in the lock file of a folder; other processes that do so meanwhile wait."""
    descriptor = os.open(base_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        models = read_lock(base_dir) | {url: model}
        value = {
            "models": {
                one: {
                    file.name: {"bytes": file.size_bytes, "sha256": file.sha256}
                    for file in sorted(found.files, key=_name)
                }
                for one, found in sorted(models.items())
            }
        }
        temporary = base_dir / f".{LOCK}.{os.getpid()}"
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        temporary.replace(base_dir / LOCK)
    finally:
        os.close(descriptor)


def urls_of(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the URLs of models in a step's options."""
    for option in OPTIONS:
        value = options.get(option)
        if isinstance(value, str) and is_url(value):
            yield value.rstrip("/")


def verify(options: Mapping[str, Any], base_dir: Path, progress: Callable[[str, float], None]) -> None:
    """Compare the fetched files of a step's models with the lock file; ModelError where one differs.

    Only options of OPTIONS are looked at; there is nothing to do for models that are no URLs.
    """
    for url in urls_of(options):
        pinned = _find_pinned(url, base_dir)
        if pinned is None:
            continue  # opening the node reports it
        progress("comparing the model's files with their hashes", 0.0)
        wrong = changed_files(pinned)
        if wrong:
            raise ModelError(
                f"model {url}: {wrong[0].name} in the cache is not the file that {LOCK} pins\n"
                "    fix: run `weftline fetch` with the pipeline file, which replaces it"
            )


def changed_files(model: StoredModel) -> list[StoredFile]:
    """Return the files in the cache whose SHA-256 is not the pinned one, missing ones among them."""

    def differs(one: StoredFile) -> bool:
        path = model.folder / one.name
        return _size(path) != one.size_bytes or sha256_of(path) != one.sha256

    with ThreadPoolExecutor(max_workers=4) as threads:
        return [one for one, wrong in zip(model.files, threads.map(differs, model.files), strict=True) if wrong]


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _name(file: StoredFile) -> str:
    return file.name


def needed_files(names: Sequence[str], url: str) -> list[str]:
    """Return the files of a listed folder that its model needs; ModelError where some are missing."""
    converted = (
        [CTRANSLATE2] if CTRANSLATE2 in names and not {"vocabulary.json", "vocabulary.txt"}.isdisjoint(names) else []
    )
    found = sorted([*(name for name in names if is_name(name) and name.endswith(SUFFIXES)), *converted])
    if not converted and not any(name.endswith(SINGLE) for name in found):
        others = sorted(name for name in names if name not in found)[:3]
        seen = f"; found {', '.join(others)}" if others else ""
        raise ModelError(f"model {url}: no file ends in {', '.join(SINGLE)}{seen}; pickled weights are not fetched")
    if len(found) > FILES_MAX:
        raise ModelError(f"model {url}: {len(found)} files, expected at most {FILES_MAX}")
    return found
