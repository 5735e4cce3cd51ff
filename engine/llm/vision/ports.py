"""Input `images` of an llm step, which depends on its model, and options that a model with pictures does not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weftline.engine.llm.options import LlmConfig
from weftline.engine.llm.vision.families import TEXT_ONLY, check_processor, family_of, listed
from weftline.nodes.contract import ConfigError, StepContext
from weftline.nodes.hugging_face import find_config, find_folder, kind_of
from weftline.nodes.ports import Port, port

IMAGE_TEXT_CLASS = "AutoModelForImageTextToText"
"""transformers' class that loads a model with pictures."""
IMAGES = "images"
"""Name of the input."""
_ONE, _MANY = "image", "list[image]"


def image_ports(config: LlmConfig, found: Mapping[str, Any] | None, step: StepContext) -> tuple[Port, ...]:
    """Return input `images` of a model with pictures; none for a model of texts. ConfigError for what is unsupported.

    found: the model's config.json; None where it is not downloaded yet, and may have pictures.
    """
    family = family_of(found)
    if found is not None and family is None:
        if IMAGES in step.wired:
            name = kind_of(found)[0] or str(found.get("model_type"))
            reads = f"{config.model} is a {name:.80}, which reads texts only here"
            raise ConfigError("model", reads, f"a model for input {IMAGES}: {listed()}")
        return ()
    if family is not None:
        check_options(config)
        check_processor(find_folder(config.model, step.base_dir), config.model)
    wired = step.types.get(IMAGES)
    type = _ONE if wired is not None and wired.kind == "image" else _MANY
    return (port(IMAGES, type, optional=True, about="pictures of the prompt or conversation, in order"),)


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
