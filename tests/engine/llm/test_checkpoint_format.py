"""Formats of quantised checkpoints are recognised by their config, and others refused when a file is checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.llm.packed_checkpoints import AWQ, GPTQ, write_packed
from weftline.engine.llm.checkpoint_format import CheckpointFormat, PackedFormat, read_format
from weftline.engine.llm.node import Llm
from weftline.engine.llm.options import LlmConfig
from weftline.nodes.contract import ConfigError, StepContext

PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


@pytest.mark.parametrize(
    ("settings", "packed"),
    [
        (AWQ, PackedFormat("awq", 4, 0)),
        ({"quant_method": "awq", "bits": 4, "format": "gemm"}, PackedFormat("awq", 4, 0)),
        (AWQ | {"version": "GEMM"}, PackedFormat("awq", 4, 0)),
        (GPTQ, PackedFormat("gptq", 4, 1)),
        ({"quant_method": "gptq", "bits": 8}, PackedFormat("gptq", 8, 1)),
        (GPTQ | {"checkpoint_format": "gptq_v2"}, PackedFormat("gptq", 4, 0)),
        (GPTQ | {"dynamic": {"-:.*down.*": {}, "+:.*up.*": {"group_size": 64}}}, PackedFormat("gptq", 4, 1)),
    ],
)
def test_layouts_of_packed_weights_are_read(settings: dict[str, Any], packed: PackedFormat) -> None:
    assert read_format(settings, "m") == CheckpointFormat(str(settings["quant_method"]), packed)


def test_other_formats_are_left_to_transformers() -> None:
    assert read_format({}, "m") is None
    assert read_format({"quant_method": "fp8"}, "m") == CheckpointFormat("fp8")
    assert read_format(PACKED, "m") == CheckpointFormat("compressed-tensors")


@pytest.mark.parametrize(
    ("settings", "found", "expected"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantised by 'bitsandbytes'", "one of: fp8"),
        ({"bits": 4}, "quantised by ''", "one of: fp8"),
        (AWQ | {"version": "gemv"}, "awq with version 'gemv'", "version gemm"),
        (AWQ | {"version": "marlin"}, "awq with version 'marlin'", "version gemm"),
        (AWQ | {"bits": 8}, "awq with bits 8", "bits 4"),
        (AWQ | {"bits": "4"}, "awq with bits '4'", "bits 4"),
        (AWQ | {"zero_point": False}, "awq with zero_point False", "zero_point True"),
        (GPTQ | {"bits": 2}, "gptq with bits 2", "bits 4, 8"),
        (GPTQ | {"bits": 3}, "gptq with bits 3", "bits 4, 8"),
        (GPTQ | {"bits": None}, "gptq with bits None", "bits 4, 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'", "checkpoint_format gptq, gptq_v2"),
        (GPTQ | {"is_marlin_format": True}, "checkpoint_format 'marlin'", "checkpoint_format gptq, gptq_v2"),
        (GPTQ | {"pack_dtype": "int16"}, "gptq with pack_dtype 'int16'", "pack_dtype int32"),
        (GPTQ | {"dynamic": {"+:.*up.*": {"bits": 8}}}, "with 4 bits, and '+:.*up.*' with 8", "the same number"),
        (PACKED | {"sparsity_config": {"format": "sparse-bitmask"}}, "format 'sparse-bitmask'", "format dense"),
        (PACKED | {"format": "mxfp6-pack-quantized"}, "format 'mxfp6-pack-quantized'", "pack-quantized"),
    ],
)
def test_formats_that_cannot_be_loaded_are_named(settings: dict[str, Any], found: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_format(settings, "models/chat")
    assert caught.value.option == "model" and found in caught.value.found and "models/chat" in caught.value.found
    assert expected in caught.value.expected and caught.value.fix


def test_a_checkpoint_that_cannot_be_loaded_fails_the_check(tmp_path: Path) -> None:
    write_packed(tmp_path / "m", AWQ)
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    assert Llm.ports(LlmConfig("m"), StepContext(tmp_path)).inputs
    assert Llm.ports(LlmConfig("m", weights="int8"), StepContext(tmp_path)).inputs
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    for settings in (GPTQ | {"bits": 3}, {"quant_method": "torchao"}):  # the latter is kept as it is
        (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
        with pytest.raises(ConfigError, match=r"model: m.* quantised"):
            Llm.ports(LlmConfig("m", weights="int8"), StepContext(tmp_path))


def test_tensors_that_belong_to_no_weight_fail_the_check(tmp_path: Path) -> None:
    write_packed(tmp_path / "m", AWQ)
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    file = tmp_path / "m" / "model.safetensors"
    state = load_file(file)
    name = "model.layers.1.mlp.up_proj.qzeros"
    for changed, reason in (
        (state | {"model.layers.0.mlp.act.scales": torch.ones(96)}, r"act\.scales belongs to no packed weight"),
        (
            {key: tensor for key, tensor in state.items() if key != name},
            r"up_proj\.qzeros of a packed weight is missing",
        ),
        ({"lm_head.weight": state["lm_head.weight"]}, r"says awq, but no tensor is named \.\.\.qweight"),
    ):
        save_file(changed, file)
        with pytest.raises(ConfigError, match=reason):
            Llm.ports(LlmConfig("m"), StepContext(tmp_path))


def test_recognition_imports_no_framework() -> None:
    code = "import sys, weftline.engine.llm.checkpoint_format; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
