"""GGUF headers are read within limits; damaged files and models that cannot be loaded are refused with a reason."""

from __future__ import annotations

import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tests.nodes.model_files import broken
from weftline.nodes.contract import ConfigError
from weftline.nodes.gguf_file import GgufList, check_gguf, read_gguf

SETTINGS: dict[str, Any] = {
    "general.architecture": "qwen2",
    "qwen2.context_length": 128,
    "qwen2.embedding_length": 8,
    "qwen2.block_count": 1,
    "qwen2.feed_forward_length": 16,
    "qwen2.attention.head_count": 2,
    "qwen2.attention.layer_norm_rms_epsilon": 1e-6,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b", "c"],
    "tokenizer.ggml.scores": [0.5, 1.0, 2.0],
}
TENSORS: dict[str, tuple[tuple[int, ...], int]] = {
    "token_embd.weight": ((8, 3), 0),
    "blk.0.ffn_down.weight": ((16, 8), 1),
}


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def value(found: Any) -> bytes:
    """Return a setting's type and value."""
    if isinstance(found, bytes):  # written as it is
        return found
    if isinstance(found, str):
        return struct.pack("<I", 8) + text(found)
    if isinstance(found, float):
        return struct.pack("<If", 6, found)
    if isinstance(found, list):
        kind = 8 if isinstance(found[0], str) else 6
        items = b"".join(text(item) if kind == 8 else struct.pack("<f", item) for item in found)
        return struct.pack("<IIQ", 9, kind, len(found)) + items
    return struct.pack("<II", 4, found)


def entry(name: str, shape: tuple[int, ...], kind: int, start: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, start)


def gguf_bytes(
    settings: dict[str, Any], entries: list[bytes] | None = None, data: int = 384, version: int = 3, **counts: int
) -> bytes:
    """Return a file; settings whose value is bytes are written as they are."""
    starts = (0, 96)
    table = [entry(name, *TENSORS[name], start) for name, start in zip(TENSORS, starts)] if entries is None else entries
    head = b"GGUF" + struct.pack(
        "<IQQ", version, counts.get("tensors_claimed", len(table)), counts.get("settings_claimed", len(settings))
    )
    head += b"".join(text(name) + value(found) for name, found in settings.items()) + b"".join(table)
    return head + bytes(-len(head) % 32) + bytes(data)


def write(tmp_path: Path, data: bytes) -> Path:
    (tmp_path / "m.gguf").write_bytes(data)
    return tmp_path / "m.gguf"


def test_settings_and_tensors_are_read(tmp_path: Path) -> None:
    data = gguf_bytes(SETTINGS)
    header = read_gguf(write(tmp_path, data), "m.gguf")
    assert header.architecture == "qwen2" and header.of_model("embedding_length") == 8
    assert header.settings["tokenizer.ggml.tokens"] == GgufList(3)
    assert header.of_model("attention.layer_norm_rms_epsilon") == pytest.approx(1e-6)
    found = header.tensors["blk.0.ffn_down.weight"]
    assert (found.shape, found.type, found.start, found.size_bytes) == ((16, 8), 1, len(data) - 384 + 96, 256)
    check_gguf(header, "m.gguf")


def test_every_truncated_file_is_refused(tmp_path: Path) -> None:
    data = gguf_bytes(SETTINGS, data=96 + 256)
    read_gguf(write(tmp_path, data), "m.gguf")
    for length in range(0, len(data), 5):
        with pytest.raises(ConfigError, match=r"model: m\.gguf is no GGUF file, or a damaged one"):
            read_gguf(write(tmp_path, data[:length]), "m.gguf")


def one(name: str = "t", shape: tuple[int, ...] = (8,), kind: int = 0, start: int = 0) -> list[bytes]:
    return [entry(name, shape, kind, start)]


HOSTILE = {
    "magic": (b"GGML" + bytes(100), "does not begin with GGUF"),
    "version": (gguf_bytes({}, [], version=1), "its version is 1, expected 2 or 3"),
    "big-endian": (gguf_bytes({}, [], version=3 << 24), "its version is 50331648"),
    "settings": (gguf_bytes({}, [], settings_claimed=1 << 63), "claims 9223372036854775808 settings"),
    "tensors": (gguf_bytes({}, [], tensors_claimed=1 << 63), "and 9223372036854775808 tensors"),
    "text": (gguf_bytes({"a": struct.pack("<IQ", 8, 1 << 62)}, []), "a text claims 4611686018427387904 bytes"),
    "text past the end": (gguf_bytes({"a": struct.pack("<IQ", 8, 5000)}, []), "goes on to byte"),
    "list": (gguf_bytes({"a": struct.pack("<IIQ", 9, 4, 1 << 62)}, []), "a list claims 4611686018427387904 items"),
    "list past the end": (gguf_bytes({"a": struct.pack("<IIQ", 9, 10, 1 << 20)}, []), "goes on to byte 8388"),
    "list of lists": (gguf_bytes({"a": struct.pack("<IIQ", 9, 9, 1)}, []), "a list has items of type 9"),
    "type of a setting": (gguf_bytes({"a": struct.pack("<I", 77)}, []), "a setting is of type 77"),
    "bytes of a name": (gguf_bytes({"a" * 300: 1}, []), "a text claims 300 bytes, expected at most 256"),
    "bytes of a text": (gguf_bytes({"a": struct.pack("<I", 8) + text(b"\xff\xfe")}, []), "can't decode"),
    "alignment": (gguf_bytes({"general.alignment": 0}, []), "its alignment is 0, expected a power of two"),
    "odd alignment": (gguf_bytes({"general.alignment": 24}, []), "its alignment is 24, expected a power of two"),
    "dimensions": (gguf_bytes({}, one(shape=(1,) * 9)), "has 9 dimensions, expected 1 to 4"),
    "no dimension": (gguf_bytes({}, one(shape=())), "has 0 dimensions"),
    "size": (gguf_bytes({}, one(shape=(1 << 40, 1 << 40))), "ends at byte 48357032784585166988248"),
    "empty": (gguf_bytes({}, one(shape=(0, 4))), "has rows of 0"),
    "blocks": (gguf_bytes({}, one(shape=(40,), kind=8)), "has rows of 40, Q8_0 has blocks of 32"),
    "type": (gguf_bytes({}, one(kind=40)), "is of type 40, which cannot be unpacked, expected F32"),
    "start": (gguf_bytes({}, one(start=1 << 50)), "ends at byte"),
    "unaligned start": (gguf_bytes({}, one(start=8)), "is not at a place of its own"),
    "overlap": (gguf_bytes({}, one("a", (64,)) + one("b", start=32)), "tensor 'b' is not at a place of its own"),
    "twice": (gguf_bytes({}, one("a") + one("a", start=32)), "tensor 'a' is there twice"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_damaged_files_are_refused_with_a_reason(tmp_path: Path, kind: str) -> None:
    data, reason = HOSTILE[kind]
    path = write(tmp_path, data)
    tracemalloc.start()
    with pytest.raises(ConfigError) as caught:
        read_gguf(path, "m.gguf")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert reason in caught.value.found and peak < 1 << 20


def test_changed_bytes_are_refused_or_harmless(tmp_path: Path) -> None:
    data = gguf_bytes(SETTINGS)
    refused = 0
    for changed in broken(data, flips=range(len(data) - 384)):
        try:
            check_gguf(read_gguf(write(tmp_path, changed), "m.gguf"), "m.gguf")
        except ConfigError:  # nothing else
            refused += 1
    assert refused > 600


def test_a_setting_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    data = gguf_bytes({"a": 1, "b": 2}, []).replace(text("b"), text("a"))
    with pytest.raises(ConfigError, match="setting 'a' is there twice"):
        read_gguf(write(tmp_path, data), "m.gguf")


@pytest.mark.parametrize(
    ("changes", "found", "expected"),
    [
        ({"general.architecture": "mamba"}, "its architecture is 'mamba'", "one of llama, qwen2, qwen3"),
        ({"split.count": 3}, "it is one of 3 files", "a model in one file"),
        ({"tokenizer.ggml.model": "bert"}, "its tokenizer is 'bert'", "one of gpt2, llama"),
        ({"tokenizer.ggml.tokens": 5}, "its tokenizer is 'gpt2'", "with its tokens"),
        ({"qwen2.rope.scaling.type": "yarn"}, "its positions are scaled (yarn)", "without scaling"),
        ({"qwen2.expert_count": 8}, "it is a mixture of experts", "without experts"),
        ({"qwen2.block_count": 1 << 31}, "tensor blk.2147483647.ffn_down.weight is None", "(16, 8)"),
        ({"qwen2.embedding_length": 1 << 30}, "tensor token_embd.weight is (8, 3)", "(1073741824, 3)"),
        ({"qwen2.feed_forward_length": 32}, "tensor blk.0.ffn_down.weight is (16, 8)", "(32, 8)"),
        ({"qwen2.attention.head_count": 0}, "qwen2.attention.head_count is 0", "a whole number"),
        ({"qwen2.attention.head_count": [1.0, 1.0]}, "qwen2.attention.head_count is GgufList", "a whole number"),
        ({"qwen2.context_length": "x"}, "qwen2.context_length is 'x'", "a whole number"),
        ({"qwen2.attention.layer_norm_rms_epsilon": 1}, "no attention.layer_norm_rms_epsilon", "the number"),
        ({"qwen2.attention.key_length": 1 << 30}, "qwen2.attention.key_length is 1073741824", "its width allows"),
    ],
)
def test_models_that_cannot_be_loaded_are_named(
    tmp_path: Path, changes: dict[str, Any], found: str, expected: str
) -> None:
    header = read_gguf(write(tmp_path, gguf_bytes(SETTINGS | changes)), "m.gguf")
    with pytest.raises(ConfigError) as caught:
        check_gguf(header, "m.gguf")
    assert found in caught.value.found and expected in caught.value.expected


def test_a_file_is_checked_without_a_framework(tmp_path: Path) -> None:
    write(tmp_path, gguf_bytes(SETTINGS))
    code = (
        "import sys; from pathlib import Path; from weftline.engine.llm.node import Llm, LlmConfig\n"
        "from weftline.nodes.contract import StepContext\n"
        f"print(Llm.ports(LlmConfig('m.gguf'), StepContext(Path({str(tmp_path)!r}))).outputs[0].name)\n"
        "assert not {'torch', 'transformers', 'gguf'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "text\n", done.stderr
