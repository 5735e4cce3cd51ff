"""Inputs `images`, `videos` and `fps` of an llm step, and options that a model with pictures does not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weftline.engine.llm.options import LlmConfig
from weftline.engine.llm.vision.families import TEXT_ONLY, check_processor, family_of, listed
from weftline.nodes.contract import ConfigError, StepContext
from weftline.nodes.hugging_face import find_config, find_folder, kind_of
from weftline.nodes.ports import Port, port
from weftline.nodes.template import VIDEO_TYPE, VIDEOS

IMAGE_TEXT_CLASS = "AutoModelForImageTextToText"
"""transformers' class that loads a model with pictures."""
IMAGES = "images"
"""Name of the input."""


def image_ports(config: LlmConfig, found: Mapping[str, Any] | None, step: StepContext) -> tuple[Port, ...]:
    """Return the inputs for pictures and videos, as far as the model has them. ConfigError for what is unsupported.

    found: the model's config.json; None where it is not downloaded yet, and may have both.
    """
    family = family_of(found)
    if found is not None and family is None:
        for name in (IMAGES, VIDEOS):
            if name in step.wired:
                reads = f"{config.model} is a {_class_of(found):.80}, which reads texts only here"
                raise ConfigError("model", reads, f"a model for input {name}: {listed(name == VIDEOS)}")
        return ()
    if found is not None and family is not None:
        check_options(config)
        check_processor(find_folder(config.model, step.base_dir), config.model)
        if not family.videos:
            if VIDEOS in step.wired:
                reads = f"{config.model} is a {_class_of(found):.80}, which reads pictures and no videos"
                raise ConfigError("model", reads, f"a model for input {VIDEOS}: {listed(videos=True)}")
            return (_images(step),)
    videos = port(VIDEOS, _video_type(step), optional=True, about="videos of the prompt or conversation, in order")
    fps = port("fps", "json", optional=True, about="frames of a video in a second: a number, or one for each video")
    return _images(step), videos, fps


def _images(step: StepContext) -> Port:
    wired = step.types.get(IMAGES)
    type = "image" if wired is not None and wired.kind == "image" else "list[image]"
    return port(IMAGES, type, optional=True, about="pictures of the prompt or conversation, in order")


def _video_type(step: StepContext) -> str:
    """Return the type of input `videos`: several videos, or one, as an array or a list of its frames."""
    wired = step.types.get(VIDEOS)
    if wired is not None and str(wired) == "list[image]":
        return "list[image]"
    return VIDEO_TYPE if wired is not None and wired.kind == "tensor" else f"list[{VIDEO_TYPE}]"


def _class_of(config: Mapping[str, Any]) -> str:
    return kind_of(config)[0] or str(config.get("model_type"))


def check_draft(found: Mapping[str, Any] | None, draft_model: str) -> None:
    """Raise ConfigError for a draft model with pictures."""
    if family_of(found) is not None:
        name = kind_of(found or {})[0]
        raise ConfigError("draft_model", f"{draft_model} is a {name:.80}, which reads pictures", "a model for texts")


def check_options(config: LlmConfig) -> None:
    """Raise ConfigError for an option that a model with pictures does not have."""
    unsupported = {
        "speculation": config.speculation == "draft",
        "adapters": bool(config.adapters),
        "ranks": config.ranks > 1,
        "weights": config.weights != "auto",
    }
    for option, found in unsupported.items():
        if found:
            expected = "ngram or none, with a model for pictures" if option == "speculation" else "a model for texts"
            raise ConfigError(option, f"found {getattr(config, option)!r:.60} with a model for pictures", expected)


def image_notes(config: LlmConfig, base_dir: Path) -> Sequence[str]:
    """Return notes of the plan about a model with a vision part."""
    found = None if config.model.endswith(".gguf") else find_config(config.model, base_dir)
    if found is not None and found.get("model_type") in TEXT_ONLY and found.get("vision_config"):
        return [f"{config.model} reads texts only: input {IMAGES} is supported for {listed()}"]
    return []
