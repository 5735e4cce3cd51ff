"""Models that are quantised as they are loaded: layer by layer, with the same weights, and in little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from tests.engine.llm import tiny
from tests.engine.llm.test_quantised_checkpoint import FP8, write
from weftline.engine.llm import model_loader
from weftline.engine.llm.model_loader import LayerWeights, RunnerOptions, load_model, place
from weftline.engine.llm.quantised import Quantiser
from weftline.engine.llm.runner import Runner
from weftline.errors import ModelError

pytest.importorskip("torchao")

INT8 = RunnerOptions(weights="int8")


def saved(family: str, folder: Path) -> Path:
    """Write a tiny model, or its fp8 checkpoint, and return the folder."""
    if family == "fp8":
        pytest.importorskip("accelerate")
        write(folder, FP8)
    else:
        tiny.reference(family).save_pretrained(folder)
    return folder


def tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a model by name, quantised ones as what they are made of."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        parts = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else []
        yield from ((f"{name}.{part}", getattr(tensor, part)) for part in parts)
        if not parts:
            yield name, tensor


def check_same(one: Runner, other: Runner) -> None:
    ours, theirs = dict(tensors(one.model)), dict(tensors(other.model))
    assert ours.keys() == theirs.keys()
    different = [n for n in ours if ours[n].dtype != theirs[n].dtype or not torch.equal(ours[n], theirs[n])]
    assert not different
    assert str(one.fusion) == str(other.fusion) and one.ends == other.ends
    assert not any(tensor.is_meta for tensor in ours.values())
    assert not any(tensor.is_inference() for name, tensor in ours.items() if "o_proj" in name)  # it was not merged


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("family", ["llama", "fp8", "qwen3", "gemma2", "mixtral", "deepseek_v3"])
def test_a_model_read_layer_by_layer_is_the_one_that_is_read_at_once(family: str, fuse: bool, tmp_path: Path) -> None:
    """To the bit: plain checkpoints, such whose tensors are merged, and fp8 ones, which are unpacked."""
    options = RunnerOptions(weights="int8", fuse=fuse)
    folder = saved(family, tmp_path)
    by_layer = load_model(folder, options)
    assert by_layer.layers is not None
    check_same(Runner(*by_layer), Runner(*load_model(folder, options, whole=True)))


def test_an_fp8_checkpoint_is_unpacked_layer_by_layer(tmp_path: Path) -> None:
    loaded = load_model(saved("fp8", tmp_path), INT8)
    assert loaded.layers is not None
    layers = loaded.model.model.layers
    assert all(weight.is_meta for weight in layers.parameters())
    loaded.layers.fill(layers[1])
    assert all(weight.is_meta for weight in layers[0].parameters())
    plain = write(tmp_path / "again", FP8)["model.layers.1.mlp.up_proj.weight"]
    assert torch.allclose(layers[1].mlp.up_proj.weight, plain, atol=1e-6)


def test_never_is_more_there_than_what_is_quantised_and_one_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(saved("llama_rope", tmp_path), INT8)
    layers = list(loaded.model.model.layers)
    held: list[tuple[int, int]] = []

    def note() -> None:
        whole = [layer for layer in layers if any(w.dtype is torch.float32 and w.dim() == 2 and not w.is_meta
                                                  for w in map(plain, layer.parameters()))]  # fmt: skip
        away = [layer for layer in layers if all(w.is_meta for w in layer.parameters())]
        held.append((len(whole), len(away)))

    def plain(weight: Tensor) -> Tensor:
        return weight.data if type(weight.data) is Tensor else torch.empty(0)

    fill, take = LayerWeights.fill, Quantiser.take
    monkeypatch.setattr(LayerWeights, "fill", lambda self, layer: (fill(self, layer), note()))
    monkeypatch.setattr(Quantiser, "take", lambda self, part: (take(self, part), note()))
    place(*loaded)
    assert held == [(1, 1), (0, 1), (1, 0), (0, 0), (0, 0)]


def test_what_needs_no_quantising_is_read_at_once(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    assert load_model(folder, RunnerOptions()).layers is None
    assert load_model(folder, INT8, whole=True).layers is None


def test_shared_weights_or_other_file_names_are_loaded_in_one_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved("llama", tmp_path)
    monkeypatch.setattr(model_loader, "_open_tensors", lambda folder: {})
    loaded = load_model(folder, INT8)
    assert loaded.layers is None and not any(weight.is_meta for weight in loaded.model.parameters())
    monkeypatch.undo()
    real = model_loader.find_stack

    def sharing(model: Any) -> tuple[Any, list[Any]]:
        base, stack = real(model)
        stack[1].mlp.up_proj.weight = stack[0].mlp.up_proj.weight
        return base, stack

    monkeypatch.setattr(model_loader, "find_stack", sharing)
    loaded = load_model(folder, INT8)
    assert loaded.layers is None and not any(weight.is_meta for weight in loaded.model.parameters())


def test_a_model_of_the_hub_is_fetched_and_read_layer_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    folder, asked = saved("llama", tmp_path / "snapshot"), []

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked.append(name)
        return str(folder)

    config = transformers.AutoConfig.from_pretrained(folder)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda source, **_: config)
    phrases: list[str] = []
    loaded = load_model("someone/model", INT8, lambda phrase, fraction: phrases.append(phrase))
    assert loaded.layers is not None and asked == ["someone/model"]
    loaded.layers.fill(loaded.model.model.layers[1])
    assert phrases[-1] == "reading layer 2 of 2"


def test_a_weight_that_is_missing_is_named_before_anything_is_read(tmp_path: Path) -> None:
    state = {name: w for name, w in tiny.reference("llama").state_dict().items() if "1.mlp.up_proj" not in name}
    saved("llama", tmp_path)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 weights missing .*layers\.1\.mlp\.up_proj"):
        load_model(tmp_path, INT8)


def test_ends_of_text_are_those_of_the_folders_generation_config(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}), encoding="utf-8")
    assert Runner(*load_model(folder, INT8)).ends == {7, 9}


PEAK = """
import sys, threading, time
from pathlib import Path
from weftline.engine.llm.model_loader import RunnerOptions, load_model, place
from weftline.engine.llm.runner import Runner
import torch, torchao.quantization
torch.set_num_threads(1)

def anonymous():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

def watch():
    while True:
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.01)

before = anonymous()
peak = [before]
threading.Thread(target=watch, daemon=True).start()
runner = Runner(*load_model(sys.argv[1], RunnerOptions(weights="int8", kv_bytes=4 << 20)))
print(peak[0] - before)
"""
LAYERS, HIDDEN, INNER = 12, 768, 3072
LAYER_WEIGHTS = 4 * HIDDEN**2 + 3 * HIDDEN * INNER


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_hosts_memory_holds_what_is_quantised_and_a_layer(tmp_path: Path) -> None:
    """In float32, of which int8 keeps a quarter. Pages of mapped files, which the system may drop, do not count."""
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=12, num_key_value_heads=12, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        shapes = {n: w.shape for n, w in transformers.LlamaForCausalLM(config).state_dict().items()}
    state = {n: torch.randn(shape).mul_(0.02).bfloat16() for n, shape in shapes.items() if n != "lm_head.weight"}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    del state
    command = [sys.executable, "-c", PEAK, str(tmp_path)]
    apart = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # or weights as small as these leave holes in the heap
    peak = int(subprocess.run(command, capture_output=True, timeout=300, check=True, env=os.environ | apart).stdout)
    layer, model = 4 * LAYER_WEIGHTS, 4 * LAYER_WEIGHTS * LAYERS
    rest = 64 << 20  # what torch, torchao and numba load
    assert peak < model / 4 + 3 * layer + rest < model  # read at once it was 1.4 times the model
