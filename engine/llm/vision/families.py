"""Families of vision-language models, and checks of a model folder that need no framework.

A family is known by the `model_type` of config.json. Models with a vision part of any other family are refused by name:
their decoders need more than image features in place of token embeddings (attention in both directions inside a
picture, features added in deeper layers), or their processors are not implemented here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weftline.nodes.contract import ConfigError
from weftline.nodes.hugging_face import kind_of, read_json


@dataclass(frozen=True, slots=True)
class Family:
    """A supported family of vision-language models.

    architecture: transformers' class, as config.json names it.
    layout:  how a picture is laid out in the prompt: 'fixed' number of tokens, a 'grid' of patches, or 'tiles'.
    vision:  name of the vision encoder's config within config.json.
    towers:  supported kinds of vision encoder; empty: the family has one.
    rotary:  positions of picture tokens have three dimensions: time, row and column.
    videos:  how a video is laid out: a 'grid' of patches over time, or 'frames' with their times in words; '': none.
    """

    architecture: str
    layout: str
    towers: tuple[str, ...] = ()
    rotary: bool = False
    videos: str = ""


FAMILIES: Mapping[str, Family] = {
    "llava": Family("LlavaForConditionalGeneration", "fixed", towers=("clip_vision_model", "siglip_vision_model")),
    "qwen2_vl": Family("Qwen2VLForConditionalGeneration", "grid", rotary=True, videos="grid"),
    "qwen2_5_vl": Family("Qwen2_5_VLForConditionalGeneration", "grid", rotary=True, videos="grid"),
    "idefics3": Family("Idefics3ForConditionalGeneration", "tiles"),
    "smolvlm": Family("SmolVLMForConditionalGeneration", "tiles", videos="frames"),
}
"""Supported families, by the `model_type` of config.json."""

TEXT_ONLY = ("gemma3",)
"""Model types with a vision part whose decoders answer texts here; their pictures are refused."""

_MEDIA_PARTS = ("vision_config", "audio_config", "vision_tower", "mm_vision_tower")


def listed(videos: bool = False) -> str:
    """Return the supported architectures, for errors. videos: only those with videos."""
    return ", ".join(family.architecture for family in FAMILIES.values() if family.videos or not videos)


def family_of(config: Mapping[str, Any] | None) -> Family | None:
    """Return the family of a config.json; None for a model without pictures, or of another family."""
    return FAMILIES.get(str((config or {}).get("model_type")))


def check_family(config: Mapping[str, Any], shown: str) -> None:
    """Raise ConfigError about option `model` for a model with a vision or audio part that is not supported."""
    name = kind_of(config)[0] or str(config.get("model_type"))
    family = family_of(config)
    if family is None:
        parts = [part for part in _MEDIA_PARTS if config.get(part)]
        if parts and config.get("model_type") not in TEXT_ONLY:
            reads = "recordings" if parts == ["audio_config"] else "pictures"
            found = f"{shown} is a {name:.80}, whose {reads} are not supported here"
            raise ConfigError("model", found, f"a model for texts, or one of {listed()}")
        return
    vision = config.get("vision_config")
    tower = vision.get("model_type") if isinstance(vision, Mapping) else None
    if family.towers and tower is not None and tower not in family.towers:
        found = f"{shown} is a {name:.80} with a vision encoder of type {tower!s:.40}"
        raise ConfigError("model", found, f"a vision encoder of type {' or '.join(family.towers)}")
    if config.get("quantization_config"):
        raise ConfigError("model", f"{shown} is a {name:.80} with quantised weights", "plain weights for this family")


def check_processor(folder: Path | None, shown: str) -> None:
    """Raise ConfigError about option `model` when a local folder lacks the settings of the image processor."""
    if folder is None or (folder / "preprocessor_config.json").is_file():
        return
    whole = read_json(folder / "processor_config.json", f"{shown}/processor_config.json")
    if isinstance(whole, dict) and "image_processor" in whole:
        return
    fix = f"save it there: transformers.AutoProcessor.from_pretrained(...).save_pretrained({shown!r})"
    raise ConfigError("model", f"{shown} has no preprocessor_config.json", "the settings of its pictures", fix)
