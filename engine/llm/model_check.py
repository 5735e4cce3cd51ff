"""Checks of an llm step's model, before anything is loaded: its kind, its family, its files, its quantised weights.

`checked_model` reads config.json, or the header of a GGUF file, and the names of tensors; it imports no framework.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from weftline.engine.llm.checkpoint_format import METHODS, PLAIN_FIX, packed_layers, read_format, settings_of
from weftline.engine.llm.lora.file import check_adapter
from weftline.engine.llm.vision.families import check_family, family_of
from weftline.engine.llm.vision.ports import IMAGE_TEXT_CLASS
from weftline.errors import ModelError
from weftline.nodes.contract import ConfigError
from weftline.nodes.gguf_file import ARCHITECTURES, check_gguf, read_gguf
from weftline.nodes.hugging_face import (
    GENERATION,
    LANGUAGE_MODEL,
    NO_HEAD,
    SEQUENCE_CLASSIFICATION,
    check_folder,
    check_kind,
    find_config,
    find_folder,
    find_weights,
    network_bytes,
    read_json,
    read_template,
)
from weftline.nodes.model_file import find_model, need_file, safetensors_names

_TASK_KINDS = {
    "generate": ((LANGUAGE_MODEL, GENERATION), "a language model (...ForCausalLM)"),
    "embed": ((LANGUAGE_MODEL, NO_HEAD), "a decoder (...ForCausalLM, or a model without a head)"),
    "classify": ((SEQUENCE_CLASSIFICATION,), "a decoder with a score layer (...ForSequenceClassification)"),
}
_TASK_CLASSES = {
    "generate": "AutoModelForCausalLM", "embed": "AutoModel", "classify": "AutoModelForSequenceClassification"
}  # fmt: skip


def checked_model(model: str, task: str, base_dir: Path, option: str, weights: str = "auto") -> dict[str, Any] | None:
    """Return a model's config.json, None if not downloaded; ConfigError where this task cannot run it."""
    try:
        if model.endswith(".gguf"):
            return _checked_gguf(model, task, base_dir)
        found = find_config(model, base_dir)
        if found is None:
            return None
        check_kind(found, model, *_TASK_KINDS[task])
        if found.get("is_encoder_decoder"):
            reason = f"{model} has an encoder and a decoder ({found.get('model_type')!s:.40})"
            plain = "name a plain decoder such as Llama, Qwen3 or Mistral"
            fix = "use node whisper for speech" if found.get("model_type") == "whisper" else plain
            raise ConfigError("model", reason, "a decoder alone", fix)
        check_family(found, model)
        check_folder(model, base_dir, _TASK_CLASSES[task] if family_of(found) is None else IMAGE_TEXT_CLASS)
        _check_format(found, model, base_dir, weights)
        return found
    except ConfigError as error:
        raise ConfigError(option, error.found, error.expected, error.fix) from None


def checked_adapter(name: str, folder: str, base_dir: Path) -> None:
    """Raise ConfigError about a LoRA adapter of option `adapters` that cannot be read."""
    try:
        path = find_model(folder, base_dir)
        if path is None:
            fix = "paths are relative to the pipeline file"
            raise ConfigError("", f"there is no folder {folder}", "a folder that PEFT saved", fix)
        check_adapter(path, folder)
    except ConfigError as error:
        raise ConfigError(f"adapters.{name}", error.found, error.expected, error.fix) from None
    except ModelError as error:
        raise ConfigError(f"adapters.{name}", str(error)) from None


def _check_format(found: Mapping[str, Any], model: str, base_dir: Path, weights: str) -> None:
    """Raise ConfigError about option `model` for quantised weights that cannot be loaded."""
    checkpoint = read_format(settings_of(found), model)
    if checkpoint is None:
        return
    if weights != "auto" and not METHODS[checkpoint.method].unpacked:
        kept = f"{model} already is quantised, by {checkpoint.method}, and is kept so"
        raise ConfigError("model", kept, "an unquantised model with weights: " + weights, "leave weights out")
    folder = find_model(model, base_dir)
    if checkpoint.packed is not None and folder is not None:
        names = chain(*map(safetensors_names, find_weights(folder, model)))
        try:
            packed_layers(names, checkpoint.packed)
        except ValueError as error:
            raise ConfigError("model", f"{model}: {error}", f"a checkpoint of {checkpoint.method}", PLAIN_FIX) from None


def model_bytes(model: str, base_dir: Path, weights: str) -> int:
    """Return the memory that a model takes at least, in bytes; 0 where it is not on this machine.

    Plain weights are held as 16 bits or more, and with another option `weights` than auto as 4 or more.
    """
    weight_bytes = 2.0 if weights == "auto" else 0.5
    if model.endswith(".gguf"):
        tensors = read_gguf(need_file(model, base_dir), model).tensors.values()
        return int(sum(math.prod(one.shape) for one in tensors) * weight_bytes)
    folder = find_folder(model, base_dir)
    config = read_json(folder / "config.json", f"{model}/config.json") if folder is not None else None
    if settings_of(config if isinstance(config, dict) else {}):  # packed weights, which may be kept so
        return network_bytes(model, base_dir, 0.1, 1.0)
    return network_bytes(model, base_dir, weight_bytes, weight_bytes / 4)


def template_of(model: str, base_dir: Path) -> str:
    """Return the text of a checked model's chat templates; '' without one."""
    if model.endswith(".gguf"):
        return str(read_gguf(need_file(model, base_dir), model).settings.get("tokenizer.chat_template", ""))
    folder = find_folder(model, base_dir)
    if folder is not None and family_of(find_config(model, base_dir)) is not None:  # as the image reader does
        found = read_json(folder / "chat_template.json", f"{model}/chat_template.json")
        if not (folder / "chat_template.jinja").is_file() and isinstance(found, dict):
            return str(found.get("chat_template") or "")
    return read_template(model, base_dir)


def _checked_gguf(model: str, task: str, base_dir: Path) -> dict[str, Any]:
    """Return the settings of a GGUF file that config.json would have; ConfigError where it cannot be loaded."""
    header = read_gguf(need_file(model, base_dir), model)
    check_gguf(header, model)
    if task != "generate":
        fix = "name the folder of the model's safetensors version"
        raise ConfigError("model", f"{model} is a GGUF file, which is loaded for task generate only", "a folder", fix)
    return {"architectures": [ARCHITECTURES[header.architecture]]}
