"""Limits on model files that are read before a model is opened: kinds and sizes of files, and sizes that they state.

A model is not trusted. A pipe or a device in its folder would make `check` wait for ever, a text file of many gigabytes
would fill memory, and so would JSON of many small values, or a network of the size that a short config.json asks for.

`open_file`, `read_bytes` and `parse_json` are how files of models are read.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import zipfile
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

import msgspec

from weftline.nodes.contract import ConfigError
from weftline.nodes.json_value import NotJson
from weftline.nodes.strict_json import FILES, parse

ENTRIES_MAX = 20_000
"""Most files of a model's folder and the folders in it that are looked at."""

DEPTH_MAX = 2
TEXT_BYTES_MAX = 256 << 20
"""Largest text file of a model, such as a vocabulary or tokenizer.json; the largest published ones take 40 MB."""

CONFIG_BYTES_MAX = 32 << 20
"""Largest file of settings; tokenizer_config.json of models with many added tokens takes some MB."""

PARSED_BYTES_MAX = 4 << 20
"""Largest JSON file of settings that is parsed; vocabularies and tokenizers are larger."""

JSON_BYTES_MAX = 64 << 20
"""Largest JSON file; tokenizers of many languages take 20 to 40 MB."""

PARSED_VALUES_MAX = 1 << 19
"""Most values of JSON that becomes objects: up to 130 MB of them. An index of 160 files names 140 000 tensors."""

JSON_VALUES_MAX = 1 << 23
"""Most values of other JSON, such as the vocabulary and merges of a tokenizer, of which the largest have 2 million."""

ZIP_INDEX_BYTES_MAX = 16 << 20
"""Largest table of a zip file's entries, some 200 000 of them."""

_TEXTS = (".json", ".txt", ".jinja", ".model", ".tiktoken", ".spm", ".yaml", ".yml", ".lark", ".merges")
_CONFIG = re.compile(r"(.*config|special_tokens_map|added_tokens|chat_template|modules)\.(json|jinja)")

LAYERS_MAX = 4096
"""Most layers of a network; the deepest published language models have 126, image networks up to 1 200."""

WIDTH_MAX, VOCABULARY_MAX = 1 << 20, 1 << 24
CONTEXT_MAX = 1 << 30
_LAYERS = re.compile(r"(n|num)_.*(layers?|blocks?)|.*_layers|n_layer|layers|block_count|n_(audio|text)_layer|depths")
_WIDTHS = re.compile(
    r"hidden_size|.*_dim|d_model|d_ff|d_kv|n_embd|n_inner|.*intermediate_size|.*embedding_size|embedding_length"
    r"|(n|num)_.*heads?|n_head|(n|num)_.*experts.*|feed_forward_length|head_count|n_(audio|text)_(state|head)|n_mels"
    r"|num_labels|r|lora_rank|.*_rank"
)
_VOCABULARY = re.compile(r"(n_)?vocab(_size)?|.*_vocab_size")
_CONTEXT = re.compile(r"max_position_embeddings|n_positions|n_ctx|context_length|.*max_length|n_(audio|text)_ctx")
_BOUNDS = ((_LAYERS, LAYERS_MAX), (_WIDTHS, WIDTH_MAX), (_VOCABULARY, VOCABULARY_MAX), (_CONTEXT, CONTEXT_MAX))


def open_file(path: Path) -> BufferedReader:
    """Open a regular file for reading; OSError for a folder, a pipe or a device, without waiting for it."""

    def opened(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file")

    return open(path, "rb", opener=opened)


def read_bytes(path: Path, bytes_max: int) -> bytes:
    """Return the content of a regular file; OSError where it cannot be read, ValueError for a larger one."""
    with open_file(path) as file:
        data = b"" if os.fstat(file.fileno()).st_size > bytes_max else file.read(bytes_max + 1)
        if (not data and os.fstat(file.fileno()).st_size) or len(data) > bytes_max:
            raise ValueError(f"is larger than {bytes_max} bytes")
    return data


def parse_json(data: bytes, values_max: int = PARSED_VALUES_MAX) -> Any:
    """Return what a JSON document of a model says; ValueError with what is wrong, to be read after the file's name."""
    _check_count(data, values_max)
    try:
        return parse(data, FILES)
    except NotJson as error:
        raise ValueError(f"is not valid JSON: {error.at('')}") from None


def _check_count(data: bytes, values_max: int) -> None:
    """Raise ValueError for JSON of more than about `values_max` values, by its separators."""
    if sum(map(data.count, (b",", b"{", b"["))) > values_max:
        raise ValueError(f"has more than {values_max} values")


def check_json_files(folder: Path, shown: str) -> None:
    """Raise ConfigError about option `model` for a JSON file in `folder` that no reader of the model should be given.

    Files of up to PARSED_BYTES_MAX are parsed; of larger ones the syntax, the nesting and the size are checked.
    """
    for path in sorted(folder.glob("*.json")):
        try:
            data = read_bytes(path, JSON_BYTES_MAX)
            if len(data) <= PARSED_BYTES_MAX:
                parse_json(data)
            else:
                _check_count(data, JSON_VALUES_MAX)
                msgspec.json.decode(data, type=msgspec.Raw)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ConfigError("model", f"{shown}/{path.name} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError, msgspec.MsgspecError) as error:
            known = isinstance(error, ValueError) and not isinstance(error, msgspec.MsgspecError)
            wrong = str(error) if known else "is not valid JSON"
            raise ConfigError("model", f"{shown}/{path.name} {wrong}") from None


def open_zip(path: Path) -> zipfile.ZipFile:
    """Open a zip file whose table of entries has a limit; OSError or BadZipFile where it is none."""
    with open_file(path) as file:
        end = zipfile._EndRecData(file)  # type: ignore[attr-defined]  # as ZipFile reads it, before it reads the table
    if end and end[zipfile._ECD_SIZE] > ZIP_INDEX_BYTES_MAX:  # type: ignore[attr-defined]
        raise zipfile.BadZipFile(f"its table of entries has more than {ZIP_INDEX_BYTES_MAX} bytes")
    return zipfile.ZipFile(path)


def check_entries(path: Path, shown: str) -> None:
    """Raise ConfigError about option `model` for a model with files that are not regular, or texts that are too large.

    path: its file, or its folder, of which the folders inside are looked at too.
    """
    if not path.is_dir():
        _check_file(path, shown, path.stat())
        return
    for place, (entry, name) in enumerate(_entries(path, "", 0)):
        if place >= ENTRIES_MAX:
            raise ConfigError("model", f"{shown} has more than {ENTRIES_MAX} files", "a folder with one model")
        try:
            found = entry.stat()
        except FileNotFoundError:
            continue  # a link to a file that is not there
        except OSError as error:
            raise ConfigError("model", f"{shown}/{name} cannot be read: {error.strerror}", "a regular file") from None
        if not stat.S_ISDIR(found.st_mode):
            _check_file(Path(entry.path), f"{shown}/{name}", found)
        elif name.endswith(_TEXTS):
            raise ConfigError("model", f"{shown}/{name} is a folder", "a regular file")


def _entries(folder: Path, inside: str, depth: int) -> Iterator[tuple[os.DirEntry[str], str]]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                yield entry, inside + entry.name
                if depth < DEPTH_MAX - 1 and entry.is_dir() and not entry.name.startswith("."):
                    yield from _entries(Path(entry.path), f"{inside}{entry.name}/", depth + 1)
    except OSError:
        return


def _check_file(path: Path, shown: str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError("model", f"{shown} is a pipe, a socket or a device", "a regular file")
    if path.suffix in _TEXTS:
        most = CONFIG_BYTES_MAX if _CONFIG.fullmatch(path.name) else TEXT_BYTES_MAX
        if found.st_size > most:
            raise ConfigError("model", f"{shown} has {found.st_size} bytes", f"at most {most} for such a file")


def size_problem(config: Any) -> str:
    """Return the first size in a configuration that no network has; '' for none. Numbers in lists count too."""
    waiting = [("", config)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, Mapping):
            waiting.extend((str(key), one) for key, one in value.items())
        elif isinstance(value, list):
            waiting.extend((name, one) for one in value)
        elif isinstance(value, int) and not isinstance(value, bool):
            most = next((most for pattern, most in _BOUNDS if pattern.fullmatch(name.rpartition(".")[2])), None)
            if most is not None and value > most:
                return f"{name} is {value}, and at most {most} is accepted"
    return ""


def check_sizes(config: Any, shown: str) -> None:
    """Raise ConfigError about option `model` for a size that no network has."""
    problem = size_problem(config)
    if problem:
        raise ConfigError("model", f"{shown}: {problem}", "the configuration of a network")
