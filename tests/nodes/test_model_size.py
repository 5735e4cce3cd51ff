"""Test that a model whose config asks for more than its weights, or more than the machine has, is refused at once."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.nodes.model_files import write_sparse_weights
from weftline.errors import ModelError, PipelineError
from weftline.nodes.contract import ConfigError
from weftline.nodes.hugging_face import check_network, find_weights
from weftline.nodes.model_size import SLACK_WEIGHTS, least_weights, least_yolo_weights, size_mismatch
from weftline.nodes.yolo_file import check_described
from weftline.pipelines.placement.machine import Device, Machine
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.spec.loader import load_yaml

MODELS = Path(__file__).parents[2] / "examples" / "models"
CHAT = {
    "model_type": "qwen2", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 32, "vocab_size": 1000,
    "rope_theta": 1e6, "max_position_embeddings": 1 << 20,
}  # fmt: skip
HUGE: dict[str, dict[str, Any]] = {
    "layers": {"hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 4000},
    "vocabulary": {"hidden_size": 4096, "vocab_size": 16_000_000},
    "nested": {"vision_config": {"hidden_size": 65536, "intermediate_size": 65536, "num_hidden_layers": 100}},
    "experts": {"n_embd": 4096, "n_layer": 8, "num_experts": 100_000, "moe_intermediate_size": 4096},
    "positions": {"model_type": "bert", "rope_theta": 1, "hidden_size": 768, "max_position_embeddings": 1 << 29},
    "patch": {"hidden_size": 768, "patch_size": 10**6, "image_size": 10**6},
    "pictures": {"hidden_size": 768, "patch_size": 1, "image_size": 10**6},
    "encoder and decoder": {"d_model": 65536, "encoder_layers": 100, "decoder_layers": 100, "encoder_ffn_dim": 65536},
    "stages": {"hidden_sizes": [65536, 131072], "depths": [50, 50]},
    "convolutions": {"conv_dim": [1 << 20] * 8},
    "labels": {"hidden_size": 1 << 20, "num_labels": 1 << 20},
}


@pytest.mark.parametrize("name", HUGE)
def test_a_config_of_more_than_the_stored_weights_is_refused(tmp_path: Path, name: str) -> None:
    write_sparse_weights(tmp_path / "model.safetensors", 4096)
    (tmp_path / "config.json").write_text(json.dumps(HUGE[name]))
    with pytest.raises(ConfigError, match=r"describes a network of at least \d+ weights, and 4\d\d\d bytes"):
        find_weights(tmp_path, "m")


def test_published_networks_are_estimated_below_their_size() -> None:
    llama = {
        "model_type": "llama", "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
        "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0,
    }  # fmt: skip
    deepseek = {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "vocab_size": 129280, "rope_theta": 10000,
        "max_position_embeddings": 163840,
    }  # fmt: skip
    albert = {
        "model_type": "albert", "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 12,
        "vocab_size": 30000, "embedding_size": 128,
    }  # fmt: skip
    assert 100e9 < least_weights(llama) < 406e9
    assert 100e9 < least_weights(deepseek) < 671e9
    assert least_weights(albert) < 223e6
    assert size_mismatch(least_weights(llama), 406 * 10**9 * 2, packed=False) == ""
    assert size_mismatch(least_weights(llama), 406 * 10**9 // 4, packed=True) == ""
    assert size_mismatch(least_weights({"a": [True, "x"], "hidden_size": -1}), 0, packed=False) == ""


@pytest.mark.parametrize("name", ["shapes-chat", "shapes-detector"])
def test_bundled_models_are_estimated_below_their_size(name: str) -> None:
    config = json.loads((MODELS / name / "config.json").read_text())
    least = least_yolo_weights(config["architecture"]) if "architecture" in config else least_weights(config)
    assert 0 < least < (MODELS / name / "model.safetensors").stat().st_size / 2


def _detector(folder: Path, layer: list[Any] | None) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((MODELS / "shapes-detector" / "config.json").read_text())
    if layer is not None:
        config["architecture"]["backbone"].append(layer)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(MODELS / "shapes-detector" / "model.safetensors", folder)
    return config


@pytest.mark.parametrize(
    "layer",
    [
        [-1, 1, "Conv", [8192, 8192, 1]],
        [-1, 256, "nn.Linear", [1024, 1024]],
        [-1, 1, "nn.Linear", [8192, 8192]],
        [-1, 1, "nn.Conv3d", [8192, 64, 8]],
    ],
)
def test_a_small_yolo_config_of_a_huge_network_is_refused(tmp_path: Path, layer: list[Any]) -> None:
    _detector(tmp_path / "honest", None)
    check_described(tmp_path / "honest", "m")
    _detector(tmp_path / "hostile", layer)
    with pytest.raises(ModelError, match="describes a network of at least"):
        check_described(tmp_path / "hostile", "m")


def test_a_network_that_only_building_it_measures_is_refused(tmp_path: Path) -> None:
    import transformers

    shutil.copy(MODELS / "shapes-chat" / "model.safetensors", tmp_path)
    config = transformers.AutoConfig.from_pretrained(MODELS / "shapes-chat")
    check_network(transformers.AutoModelForCausalLM, config, tmp_path, "m")
    wide = copy.deepcopy(config)
    wide.num_attention_heads, wide.head_dim = 4096, 1 << 20  # no lower bound counts heads
    with pytest.raises(ModelError, match="describes a network of at least"):
        check_network(transformers.AutoModelForCausalLM, wide, tmp_path, "m")


PIPELINE = """weftline: 1
name: p
inputs: {x: text}
steps:
  llm: {node: llm, model: m, inputs: {prompt: x}%s}
outputs: {y: llm.text}
"""


def _plan(folder: Path, machine: Machine, more: str = "") -> None:
    make_plan(load_yaml(PIPELINE % more, "p.yaml", folder), machine)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Return a folder with a model of 8 GiB, stored sparsely."""
    shutil.copytree(MODELS / "shapes-chat", tmp_path / "m")
    write_sparse_weights(tmp_path / "m" / "model.safetensors", 8 << 30)
    return tmp_path


def test_a_model_larger_than_the_machine_is_refused_by_its_plan(large: Path) -> None:
    with pytest.raises(PipelineError) as caught:
        _plan(large, Machine(2, 2 << 30))
    [problem] = [one for one in caught.value.problems if one.path == "steps.llm.model"]
    assert "at least 4" in problem.found and "2 GiB" in problem.expected and "smaller model" in problem.fix


def test_a_model_that_fits_in_its_smallest_form_is_not_refused(large: Path) -> None:
    _plan(large, Machine(2, 16 << 30))
    _plan(large, Machine(2, 2 << 30, swap_bytes=4 << 30))
    _plan(large, Machine(2, 2 << 30), ", weights: int8")
    _plan(large, Machine(2, 2 << 30, (Device("cuda:0", 24 << 30),)), ", device: cuda:0")


def test_the_slack_is_small_against_any_machine() -> None:
    assert SLACK_WEIGHTS * 4 <= 64 << 20
