"""Test that `check` reports each damaged file of each kind of model, within seconds and little memory.

Every family of nodes is built once; then each of its files is replaced by each kind of damage.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import whisper
import yaml

from benchmarks.whisper_conversion import convert
from tests.engine.llm import gguf_files, tiny, tiny_adapters
from tests.nodes.random_models import names, save_bert, save_vit, save_wav2vec2
from tests.nodes.test_onnx import linear
from tests.nodes.test_whisper_decoding import DIMS, made
from tests.nodes.yolo_models import save_yolo
from weftline.cli.check import check_file
from weftline.errors import PipelineError

SECONDS_MAX, BYTES_MAX = 5.0, 300 << 20


@dataclass(frozen=True, slots=True)
class Family:
    """Step of a pipeline with a model, and the files that `check` reads of it.

    make: writes the model below a folder.   step: its YAML, beside the inputs.   wires: names and types of its inputs.
    gives: an output.                        files: relative to the folder.
    """

    make: Callable[[Path], Any]
    step: dict[str, Any]
    wires: dict[str, str]
    gives: str
    files: tuple[str, ...]
    outputs: dict[str, str] = field(default_factory=dict)


def _openai_whisper(folder: Path) -> None:
    made(folder, DIMS)


def _ctranslate2(folder: Path) -> None:
    made(folder, DIMS)
    convert(whisper.load_model(str(folder / "model.pt"), device="cpu"), folder / "m")


def _whisper_of_transformers(folder: Path) -> None:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=51_865, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_source_positions=200,
        max_target_positions=64,
    )  # fmt: skip
    WhisperForConditionalGeneration(config).save_pretrained(folder / "m")


def _lora(folder: Path) -> None:
    tiny.save(folder / "m")
    tiny_adapters.write(folder / "a")


def _draft(folder: Path) -> None:
    tiny.save(folder / "m")
    tiny.save(folder / "d")


def _onnx(folder: Path) -> None:
    (folder / "m").mkdir()
    onnx.save(linear("N"), folder / "m" / "model.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)


def _onnx_classifier(folder: Path) -> None:
    shutil.copytree(Path(__file__).parents[2] / "examples" / "models" / "guardrail", folder / "m")


def _exported(folder: Path) -> None:
    network = torch.nn.Linear(4, 2)
    (folder / "m").mkdir()
    torch.export.save(torch.export.export(network, (torch.zeros(1, 4),)), folder / "m" / "m.pt2")


def _state(folder: Path) -> None:
    (folder / "m").mkdir()
    torch.save(torch.nn.Linear(4, 2).state_dict(), folder / "m" / "m.pt")


def _gguf(folder: Path) -> None:
    (folder / "m").mkdir()
    gguf_files.write_gguf(folder / "m" / "m.gguf", gguf_files.make("llama"))


TEXT, SOUND = {"prompt": "text"}, {"audio": "audio"}
FOLDER = ("m/config.json", "m/model.safetensors", "m/tokenizer.json", "m/tokenizer_config.json")
NUMBERS = {"node": "torch", "accepts": {"input": "float32[4]"}, "gives": {"y": "float32[2]"}}
FAMILIES = {
    "llm": Family(lambda at: tiny.save(at / "m"), {"node": "llm", "model": "m"}, TEXT, "text", FOLDER),
    "llm with an adapter": Family(
        _lora, {"node": "llm", "model": "m", "adapters": {"a": "a"}}, TEXT, "text",
        ("a/adapter_config.json", "a/adapter_model.safetensors"),
    ),
    "llm with a draft model": Family(
        _draft, {"node": "llm", "model": "m", "draft_model": "d", "speculation": "draft"}, TEXT, "text",
        tuple(f"d{name[1:]}" for name in FOLDER),
    ),
    "gguf": Family(_gguf, {"node": "llm", "model": "m/m.gguf"}, TEXT, "text", ("m/m.gguf",)),
    "embed": Family(
        lambda at: save_bert("BertModel", at / "m"), {"node": "embed", "model": "m"}, {"text": "text"}, "embedding",
        FOLDER,
    ),
    "rerank": Family(
        lambda at: save_bert("BertForSequenceClassification", at / "m", num_labels=1),
        {"node": "rerank", "model": "m"}, {"query": "text", "passages": "list[text]"}, "scores", FOLDER,
    ),
    "classify": Family(
        lambda at: save_bert("BertForSequenceClassification", at / "m", **names("a", "b")),
        {"node": "classify", "model": "m"}, {"text": "text"}, "label", FOLDER,
    ),
    "classify with onnx": Family(
        _onnx_classifier, {"node": "classify", "model": "m"}, {"text": "text"}, "label",
        ("m/config.json", "m/model.onnx", "m/tokenizer.json"),
    ),
    "transformers": Family(
        lambda at: save_vit(at / "m", **names("a", "b")),
        {"node": "transformers", "task": "image-classification", "model": "m"}, {"image": "image"}, "label",
        ("m/config.json", "m/model.safetensors", "m/preprocessor_config.json"),
    ),
    "transformers ctc": Family(
        lambda at: save_wav2vec2("Wav2Vec2ForCTC", at / "m", "layer"),
        {"node": "transformers", "task": "automatic-speech-recognition", "model": "m"}, SOUND, "text",
        ("m/config.json", "m/model.safetensors", "m/preprocessor_config.json", "m/vocab.json"),
    ),
    "whisper": Family(_openai_whisper, {"node": "whisper", "model": "model.pt"}, SOUND, "text", ("model.pt",)),
    "whisper of ctranslate2": Family(
        _ctranslate2, {"node": "whisper", "model": "m"}, SOUND, "text",
        ("m/model.bin", "m/config.json", "m/tokenizer.json", "m/vocabulary.json"),
    ),
    "whisper of transformers": Family(
        _whisper_of_transformers, {"node": "whisper", "model": "m"}, SOUND, "text",
        ("m/config.json", "m/model.safetensors", "m/generation_config.json"),
    ),
    "yolo": Family(
        lambda at: save_yolo(at / "m", "detect"), {"node": "yolo", "model": "m"}, {"image": "image"}, "detections",
        ("m/config.json", "m/model.safetensors"),
    ),
    "onnx": Family(
        _onnx, {"node": "onnx", "model": "m"}, {"x": "float32[4]"}, "y_out", ("m/model.onnx", "m/w.bin"),
    ),
    "torch": Family(
        _exported, {**NUMBERS, "model": "m/m.pt2"}, {"input": "float32[4]"}, "y", ("m/m.pt2",),
    ),
    "torch with weights": Family(
        _state, {**NUMBERS, "module": "torch.nn:Linear", "arguments": {"in_features": 4, "out_features": 2},
                 "weights": "m/m.pt"},
        {"input": "float32[4]"}, "y", ("m/m.pt",),
    ),
}  # fmt: skip


def _write(data: bytes) -> Callable[[Path, bytes], None]:
    return lambda path, before: path.write_bytes(data) and None


def _sparse(path: Path, before: bytes) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _repeat_keys(path: Path, before: bytes) -> None:
    found = json.loads(before)
    first = next(iter(found), "a") if isinstance(found, dict) else "a"
    path.write_bytes(f"{{{json.dumps(first)}: 1, {json.dumps(first)}: 2}}".encode())


ANY: dict[str, Callable[[Path, bytes], Any]] = {
    "pipe": lambda path, before: os.mkfifo(path),
    "folder": lambda path, before: path.mkdir(),
    "1 TB": _sparse,
    "empty": lambda path, before: path.write_bytes(b""),
    "device": lambda path, before: path.symlink_to("/dev/zero"),
    "loop of links": lambda path, before: path.symlink_to(path.name),
    "nesting": _write(b'{"a":' * 1_000_000),
    "cut": lambda path, before: path.write_bytes(before[: len(before) // 2]),
}
ONLY_JSON: dict[str, Callable[[Path, bytes], Any]] = {
    "repeated keys": _repeat_keys,
    "long number": _write(b'{"a": ' + b"9" * 5000 + b"}"),
    "many objects": _write(b'{"a": [' + b'{"b":1},' * 500_000 + b"1]}"),
    "long list": _write(b"[" + b"1," * 12_000_000 + b"1]"),
}
CASES = [
    (family, file, damage)
    for family, one in FAMILIES.items()
    for file in one.files
    for damage in (*ANY, *(ONLY_JSON if file.endswith(".json") else ()))
    if not (file == "m/w.bin" and damage in ("1 TB", "nesting"))  # plain numbers, and more of them
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folder of each family that was needed, with a pipeline that `check` accepts."""
    return {}


def _made(models: dict[str, Path], name: str, factory: pytest.TempPathFactory) -> Path:
    if name not in models:
        folder, family = factory.mktemp("model"), FAMILIES[name]
        family.make(folder)
        step = {**family.step, "inputs": {one: one for one in family.wires}}
        pipeline = {"weftline": 1, "name": "p", "inputs": family.wires, "steps": {"s": step}}
        (folder / "p.yaml").write_text(yaml.safe_dump({**pipeline, "outputs": {"o": f"s.{family.gives}"}}))
        assert check_file(str(folder / "p.yaml"), file_only=False).startswith(f"{folder}/p.yaml: ok")
        models[name] = folder
    return models[name]


def _peak_bytes() -> int:
    """Return the largest resident size of this process since the last call."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    Path("/proc/self/clear_refs").write_text("5")
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("family", "file", "damage"), CASES)
def test_a_damaged_file_of_a_model_is_a_problem_at_once(
    family: str, file: str, damage: str, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = _made(models, family, tmp_path_factory)
    path, kept = folder / file, folder / "kept"
    before = path.read_bytes()
    path.rename(kept)
    try:
        (ANY | ONLY_JSON)[damage](path, before)
        _peak_bytes()
        started, rest = time.monotonic(), _peak_bytes()
        with pytest.raises(PipelineError) as caught:
            check_file(str(folder / "p.yaml"), file_only=False)
        assert time.monotonic() - started < SECONDS_MAX
        assert _peak_bytes() - rest < BYTES_MAX
        assert len(str(caught.value)) < 2_000
    finally:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        path.unlink(missing_ok=True)
        kept.rename(path)
