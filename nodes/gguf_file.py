"""GGUF files: a header reader with limits, and the check that a language model can be loaded from one.

    header = read_gguf(Path("models/chat.Q4_K_M.gguf"), "models/chat.Q4_K_M.gguf")
    check_gguf(header, "models/chat.Q4_K_M.gguf")
    header.settings["general.architecture"]      # 'qwen2'

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian: counts, settings by
name, a table of tensors, then the tensors' bytes. Every length and place is compared with the file before it is used,
so that a damaged file is an error with a reason, not an allocation. Imports neither torch nor the package gguf.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from weftline.nodes.contract import ConfigError
from weftline.nodes.model_limits import open_file

VERSIONS = (2, 3)
SETTINGS_MAX = 4096
TENSORS_MAX = 65_536
NAME_BYTES_MAX = 256
STRING_BYTES_MAX = 1 << 20
"""Longest single text; chat templates are the longest, a few tens of KB."""
ITEMS_MAX = 4 << 20
"""Most items of a list; vocabularies have up to 300 000 tokens, and as many merges."""
HEADER_BYTES_MAX = 256 << 20
ALIGNMENT_MAX = 1 << 16
DIMENSIONS_MAX = 4

_STRING, _LIST = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}

TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2),
}  # fmt: skip
"""Types of tensors that package gguf unpacks: name, values in a block, bytes of a block."""
ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM", "gemma2": "Gemma2ForCausalLM",
}  # fmt: skip
"""Architectures whose files are loaded, with transformers' class; Mistral's files call themselves llama."""
TOKENIZERS = ("gpt2", "llama")
ROPE_FACTORS = "rope_freqs.weight"
"""Tensor with a divisor for each rotary frequency, of Llama 3.1 and later."""
_COUNTS = ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Entry of the table of tensors. shape: fastest dimension first, as in the file. start: in the file, in bytes."""

    shape: tuple[int, ...]
    type: int
    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GgufList:
    """A list among the settings, whose items are not kept."""

    count: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Settings and table of tensors of a file.

    settings: numbers, texts and GgufList by name.
    tensors:  by name.
    """

    settings: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.settings.get("general.architecture", ""))

    def of_model(self, key: str) -> Any:
        """Return a setting of the model's architecture, None for none."""
        return self.settings.get(f"{self.architecture}.{key}")


def read_gguf(path: Path, shown: str) -> GgufHeader:
    """Return the header of a file; ConfigError about option `model` for one that is damaged. shown: its name there."""
    try:
        with open_file(path) as file:
            return _Reader(file, path.stat().st_size).header()
    except (OSError, ValueError, struct.error) as error:
        raise ConfigError("model", f"{shown} is no GGUF file, or a damaged one: {error}", "a whole GGUF file") from None


class _Reader:
    """Reads values from a file's start on; ValueError for what exceeds the file or a limit."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size, self._at = file, size, 0

    def header(self) -> GgufHeader:
        if self._take(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version, tensors, settings = self._number("<I"), self._number("<Q"), self._number("<Q")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}, expected {' or '.join(map(str, VERSIONS))}, little-endian")
        if settings > SETTINGS_MAX or tensors > TENSORS_MAX:
            found = f"it claims {settings} settings and {tensors} tensors"
            raise ValueError(f"{found}, expected at most {SETTINGS_MAX} and {TENSORS_MAX}")
        values: dict[str, Any] = {}
        for _ in range(settings):
            name = self._text(NAME_BYTES_MAX)
            if name in values:
                raise ValueError(f"setting {name!r:.80} is there twice")
            values[name] = self._value(self._number("<I"))
        return GgufHeader(values, self._tensors(tensors, values.get("general.alignment", 32)))

    def _tensors(self, count: int, alignment: Any) -> dict[str, GgufTensor]:
        if type(alignment) is not int or not 8 <= alignment <= ALIGNMENT_MAX or alignment & (alignment - 1):
            raise ValueError(f"its alignment is {alignment!r:.40}, expected a power of two from 8")
        entries = [self._tensor() for _ in range(count)]
        start = -(-self._at // alignment) * alignment
        found: dict[str, GgufTensor] = {}
        end = start
        for name, tensor in sorted(entries, key=lambda entry: entry[1].start):
            first = start + tensor.start
            if name in found:
                raise ValueError(f"tensor {name!r:.80} is there twice")
            if tensor.start % alignment or first < end:
                raise ValueError(f"tensor {name!r:.80} is not at a place of its own")
            end = first + tensor.size_bytes
            if end > self._size:
                raise ValueError(f"tensor {name!r:.80} ends at byte {end}, the file has {self._size}")
            found[name] = GgufTensor(tensor.shape, tensor.type, first, tensor.size_bytes)
        return found

    def _tensor(self) -> tuple[str, GgufTensor]:
        name = self._text(NAME_BYTES_MAX)
        dimensions = self._number("<I")
        if not 1 <= dimensions <= DIMENSIONS_MAX:
            raise ValueError(f"tensor {name!r:.80} has {dimensions} dimensions, expected 1 to {DIMENSIONS_MAX}")
        shape = tuple(self._number("<Q") for _ in range(dimensions))
        kind, start = self._number("<I"), self._number("<Q")
        if kind not in TYPES:
            known = ", ".join(type_name for type_name, _, _ in TYPES.values())
            raise ValueError(f"tensor {name!r:.80} is of type {kind}, which cannot be unpacked, expected {known}")
        type_name, values, block_bytes = TYPES[kind]
        if 0 in shape or shape[0] % values:
            raise ValueError(f"tensor {name!r:.80} has rows of {shape[0]}, {type_name} has blocks of {values}")
        return name, GgufTensor(shape, kind, start, math.prod(shape) // values * block_bytes)

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._text(STRING_BYTES_MAX)
        if kind == _LIST:
            return self._list()
        raise ValueError(f"a setting is of type {kind}, which is not known")

    def _list(self) -> GgufList:
        """Read a list, and keep its number of items."""
        kind, count = self._number("<I"), self._number("<Q")
        if count > ITEMS_MAX:
            raise ValueError(f"a list claims {count} items, expected at most {ITEMS_MAX}")
        if kind in _SCALARS:
            self._take(count * struct.calcsize(_SCALARS[kind]))
        elif kind == _STRING:
            for _ in range(count):
                self._take(self._length(STRING_BYTES_MAX))
        else:
            raise ValueError(f"a list has items of type {kind}, expected numbers or texts")
        return GgufList(count)

    def _text(self, bytes_max: int) -> str:
        return self._take(self._length(bytes_max)).decode()

    def _length(self, bytes_max: int) -> int:
        length = int(self._number("<Q"))
        if length > bytes_max:
            raise ValueError(f"a text claims {length} bytes, expected at most {bytes_max}")
        return length

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _take(self, count: int) -> bytes:
        self._at += count
        if self._at > (most := min(self._size, HEADER_BYTES_MAX)):
            raise ValueError(f"its header goes on to byte {self._at}, expected at most {most}")
        return self._file.read(count)


def check_gguf(header: GgufHeader, shown: str) -> None:
    """Raise ConfigError about option `model` unless transformers can load a language model from the file.

    shown: its name in errors. Settings are compared with the tensors, so that none claims a size that is not there.
    """

    def refuse(found: str, expected: str, fix: str = "") -> ConfigError:
        return ConfigError("model", f"{shown}: {found}", expected, fix)

    settings, name = header.settings, header.architecture
    other = "name the folder of the model's safetensors version"
    if name not in ARCHITECTURES:
        raise refuse(f"its architecture is {name!r:.40}", f"one of {', '.join(ARCHITECTURES)}", other)
    if settings.get("split.count", 1) not in (0, 1):
        merge = "merge them: llama-gguf-split --merge FIRST WHOLE"
        raise refuse(f"it is one of {settings['split.count']} files", "a model in one file", merge)
    found = settings.get("tokenizer.ggml.model")
    if found not in TOKENIZERS or not isinstance(settings.get("tokenizer.ggml.tokens"), GgufList):
        raise refuse(f"its tokenizer is {found!r:.40}", f"one of {', '.join(TOKENIZERS)}, with its tokens", other)
    if (scaling := header.of_model("rope.scaling.type")) not in (None, "none") or any(
        tensor.startswith("rope_factors_") for tensor in header.tensors
    ):
        raise refuse(f"its positions are scaled ({scaling or 'longrope'})", "positions without scaling", other)
    if header.of_model("expert_count"):
        raise refuse("it is a mixture of experts", "a model without experts", other)
    _check_sizes(header, refuse)


def _check_sizes(header: GgufHeader, refuse: Callable[..., ConfigError]) -> None:
    counts = {key: header.of_model(key) for key in _COUNTS}
    counts["attention.head_count_kv"] = header.of_model("attention.head_count_kv") or counts["attention.head_count"]
    for key, value in counts.items():
        if type(value) is not int or value < 1:
            raise refuse(f"{header.architecture}.{key} is {value!r:.40}", "a whole number from 1")
    if not isinstance(header.of_model("attention.layer_norm_rms_epsilon"), float):
        raise refuse("it has no attention.layer_norm_rms_epsilon", "the number")
    width, blocks = counts["embedding_length"], counts["block_count"]
    vocabulary = header.settings["tokenizer.ggml.tokens"].count
    expected = {
        "token_embd.weight": (width, vocabulary),
        "blk.0.ffn_down.weight": (counts["feed_forward_length"], width),
        f"blk.{blocks - 1}.ffn_down.weight": (counts["feed_forward_length"], width),
    }
    for name, shape in expected.items():
        found = header.tensors[name].shape if name in header.tensors else None
        if found != shape:
            raise refuse(f"tensor {name} is {found}", f"{shape}, as its settings say")
    for key in ("attention.key_length", "rope.dimension_count", "attention.value_length"):
        value = header.of_model(key)
        if value is not None and (type(value) is not int or not 1 <= value <= width * 16):
            raise refuse(f"{header.architecture}.{key} is {value!r:.40}", "a whole number that its width allows")
