"""Test that hostile model files are refused by `check` at once, without reading or allocating what they ask for."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from weftline.nodes.contract import ConfigError
from weftline.nodes.hugging_face import find_config
from weftline.nodes.model_file import find_model
from weftline.nodes.model_limits import size_problem


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
    return tmp_path / "m"


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(3 << 30)


HOSTILE = {
    "config.json": os.mkfifo,
    "tokenizer.json": os.mkfifo,
    "model.safetensors": os.mkfifo,
    "model.bin": os.mkfifo,
    "vocab.txt": _sparse,
    "generation_config.json": _sparse,
    "preprocessor_config.json": lambda path: path.symlink_to("/dev/zero"),
    "weights.gguf": lambda path: path.symlink_to("/dev/zero"),
    "adapter_config.json": os.mkfifo,
    "onnx/model.onnx_data": os.mkfifo,
}


@pytest.mark.timeout(10)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_never_ends_is_refused_at_once(folder: Path, name: str) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    HOSTILE[name](path)
    started = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        find_config("m", folder.parent)
    assert time.monotonic() - started < 2 and name in caught.value.found


@pytest.mark.timeout(10)
@pytest.mark.parametrize("name", ["pipe.gguf", "pipe.onnx", "pipe.pt", "pipe.safetensors", "pipe.yaml"])
def test_a_model_that_is_a_pipe_is_refused(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match="is a pipe, a socket or a device"):
        find_model(name, tmp_path)


@pytest.fixture
def bound(tmp_path: Path) -> Iterator[Path]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s.onnx"))
        yield tmp_path


def test_a_socket_is_refused(bound: Path) -> None:
    with pytest.raises(ConfigError, match="is a pipe, a socket or a device"):
        find_model("s.onnx", bound)


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 10**6},
        {"text_config": {"num_hidden_layers": 10**6}},
        {"n_layer": 10**5},
        {"encoder_layers": 10**6},
        {"hidden_size": 10**9},
        {"vocab_size": 10**12},
        {"intermediate_size": 2**31},
        {"sub": [{"vision_config": {"depths": 3, "num_blocks": 10**7}}]},
    ],
)
def test_sizes_that_no_network_has_are_refused(folder: Path, config: dict[str, object]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="and at most"):
        find_config("m", folder.parent)


def test_sizes_of_published_networks_are_accepted() -> None:
    deepseek = {
        "num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18432, "vocab_size": 129280,
        "n_routed_experts": 256, "max_position_embeddings": 163840, "kv_lora_rank": 512, "rope_theta": 10000000,
    }  # fmt: skip
    llama = {"num_hidden_layers": 126, "hidden_size": 16384, "intermediate_size": 53248, "vocab_size": 128256}
    assert size_problem(deepseek) == size_problem(llama) == size_problem({"text_config": llama, "id2label": {}}) == ""


def test_deep_nesting_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(ConfigError, match="not valid JSON"):
        find_config("m", folder.parent)
