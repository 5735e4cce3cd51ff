"""Limits on model files that are read before a model is opened: kinds and sizes of files, and sizes that they state.

A model is not trusted. A pipe or a device in its folder would make `check` wait for ever, a text file of many gigabytes
would fill memory, and so would a network of the size that a short config.json asks for.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weftline.nodes.contract import ConfigError

ENTRIES_MAX = 20_000
"""Most files of a model's folder and the folders in it that are looked at."""

DEPTH_MAX = 2
TEXT_BYTES_MAX = 256 << 20
"""Largest text file of a model, such as a vocabulary or tokenizer.json; the largest published ones take 40 MB."""

CONFIG_BYTES_MAX = 32 << 20
"""Largest file of settings; tokenizer_config.json of models with many added tokens takes some MB."""

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


def check_entries(path: Path, shown: str) -> None:
    """Raise ConfigError about option `model` for a model with files that are not regular, or texts that are too large.

    path: its file, or its folder, of which the folders inside are looked at too.
    """
    if not path.is_dir():
        _check_file(path, shown, path.stat())
        return
    for place, (entry, name) in enumerate(_entries(path, "", 0)):
        if place >= ENTRIES_MAX:
            break  # no model's folder: what it lacks is reported elsewhere
        try:
            found = entry.stat()
        except OSError:
            continue  # a link to a file that is not there
        if not stat.S_ISDIR(found.st_mode):
            _check_file(Path(entry.path), f"{shown}/{name}", found)


def _entries(folder: Path, inside: str, depth: int) -> Iterator[tuple[os.DirEntry[str], str]]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                yield entry, inside + entry.name
                if depth < DEPTH_MAX - 1 and entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
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
