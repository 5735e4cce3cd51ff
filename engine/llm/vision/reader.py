"""Reads the pictures of a request and lays them out in its prompt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weftline.engine.llm.options import LlmConfig
from weftline.engine.llm.runner import Runner
from weftline.engine.llm.tokens import Tokens
from weftline.engine.llm.vision.encoder import ImageEncoder
from weftline.engine.llm.vision.families import FAMILIES
from weftline.engine.llm.vision.features import FeatureCache
from weftline.engine.llm.vision.layout import ImageLayout, layout_of
from weftline.engine.llm.vision.messages import (
    check_count,
    free_mark,
    has_images,
    mark_messages,
    mark_prompt,
)
from weftline.engine.llm.vision.ports import check_options
from weftline.engine.llm.vision.prompt import PromptImage, content_key, expand, to_prompt_image
from weftline.errors import InputError, LimitReached, ModelError
from weftline.nodes.contract import ConfigError
from weftline.nodes.hugging_face import fetch_folder, read_json, reason_without_path

HELD_BYTES_MAX = 1 << 30
"""Pixels of live requests above which further pictures are refused: a small file may decode to 48 MB."""

Encode = Callable[[Mapping[str, Any], str], list[int]]
"""From inputs `prompt` or `messages` with marks, and the mark, to the prompt's tokens."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A request's inputs with a mark for each picture.

    pictures: uint8 [H, W, 3] in order, each with the hash of its content.
    """

    inputs: Mapping[str, Any]
    mark: str = ""
    pictures: tuple[tuple[np.ndarray, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class ImageReader:
    """Pictures of requests to one model.

    layout:      tokens of a picture.   placeholder: the token that the chat template writes for it.
    settings:    hash of what processes pixels.
    context_max: most tokens of a prompt and its answer.
    held_bytes:  returns the bytes of the pixels of live requests.
    """

    layout: ImageLayout
    placeholder: int
    settings: bytes
    context_max: int
    held_bytes: Callable[[], int] = lambda: 0

    def read(self, inputs: Mapping[str, Any], encode: Encode) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Return the tokens of a prompt, and its pictures; InputError where they do not fit together."""
        return self.lay_out(self.take(inputs), encode)

    def take(self, inputs: Mapping[str, Any]) -> Taken:
        """Return a request's inputs with marks for pictures, and these decoded. May run in another thread."""
        found = inputs.get("images")
        given = [found] if isinstance(found, np.ndarray) else list(found or ())  # of type image, or list[image]
        check_count(len(given), "images")
        prompt, messages = inputs.get("prompt"), inputs.get("messages")
        if not given and not has_images(messages):
            return Taken(inputs)
        mark = free_mark([prompt, messages])
        if isinstance(messages, list):
            marked, pictures = mark_messages(messages, given, mark)
            shown = {**inputs, "messages": marked}
        else:
            pictures = given
            texts = mark_prompt(prompt, len(given), mark) if isinstance(prompt, str) and prompt else prompt
            shown = {**inputs, "prompt": texts}
        return Taken(shown, mark, tuple((one, content_key(one, self.settings)) for one in pictures))

    def lay_out(self, taken: Taken, encode: Encode) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Return the tokens of a prompt, and its pictures in it."""
        ids = encode(taken.inputs, taken.mark)
        if not taken.pictures:
            return self._without(ids), ()
        if self.held_bytes() > HELD_BYTES_MAX:
            size = f"pictures of requests inside take {self.held_bytes()} bytes"
            raise LimitReached(f"{size}, and the limit is {HELD_BYTES_MAX}; send it again when some have ended")
        return self._expanded(ids, taken.pictures, "images" if taken.inputs.get("messages") is None else "messages")

    def _without(self, ids: list[int]) -> list[int]:
        if self.placeholder in ids:
            raise InputError("messages: the model's chat template shows a picture, and the request has none")
        return ids

    def _expanded(
        self, ids: list[int], pictures: Sequence[tuple[np.ndarray, bytes]], param: str
    ) -> tuple[list[int], tuple[PromptImage, ...]]:
        try:
            laid_out = [self.layout.tokens_of(*pixels.shape[:2]) for pixels, _ in pictures]
        except InputError as error:
            raise InputError(f"{param}: {error}", param=param) from None
        try:
            tokens, spans = expand(ids, self.placeholder, laid_out)
        except ValueError as error:
            raise InputError(f"messages: the model's chat template writes {error}", param="messages") from None
        if len(tokens) >= self.context_max:
            found = f"found {len(tokens)} tokens with those of {len(pictures)} pictures"
            raise InputError(f"prompt: {found}, expected at most {self.context_max - 1}; shorten it", param="prompt")
        every = zip(spans, laid_out, pictures, strict=True)
        return tokens, tuple(to_prompt_image(span, one, pixels, key) for span, one, (pixels, key) in every)


def open_reader(
    runner: Runner, tokens: Tokens, source: str | Path, base_dir: Path, options: LlmConfig
) -> ImageReader | None:
    """Prepare an opened model for pictures, and return what reads them; None for a model of texts.

    ModelError when the folder lacks settings of the image processor, or they disagree with the model.
    """
    config = runner.model.config
    family = FAMILIES.get(config.model_type)
    if family is None:
        return None
    shown = options.model
    try:
        check_options(options)  # a model that was just downloaded
    except ConfigError as error:
        raise ModelError(f"{error.option}: {error.found}, expected {error.expected}") from None
    processor = _load_processor(source, shown)
    placeholder = int(config.image_token_id)
    tokens.image_token = tokens.tokenizer.convert_ids_to_tokens(placeholder) or ""
    try:
        _check_placeholder(tokens, placeholder, runner.vocabulary)
        _use_template_of_processor(tokens, shown, base_dir)
        _check_template(tokens, placeholder)
        layout = layout_of(family, config, processor, tokens.image_token, tokens.encode_control)
        runner.vision = ImageEncoder(runner.model, family, processor, layout, FeatureCache(options.image_cache_bytes))
        runner.vision.check()
    except ModelError as error:
        raise ModelError(f"model {shown}: {error}") from None
    settings = _settings(processor, config.model_type)
    return ImageReader(layout, placeholder, settings, runner.context_max, runner.vision.held_bytes)


def _load_processor(source: str | Path, shown: str) -> Any:
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds of errors
        reason = reason_without_path(error, source, shown)
        raise ModelError(f"model {shown}: its image processor cannot be loaded: {reason}") from None


def _settings(processor: Any, model_type: str) -> bytes:
    """Return the hash of an image processor's settings and of the form of its implementation."""
    settings = json.dumps(processor.to_dict(), sort_keys=True, default=str)
    return hashlib.sha256(f"{model_type} {type(processor).__name__} {settings}".encode()).digest()


def _check_placeholder(tokens: Tokens, placeholder: int, vocabulary: int) -> None:
    if not tokens.is_control(placeholder) or placeholder >= vocabulary:
        found = f"image_token_id {placeholder} ({tokens.image_token!r:.40})"
        raise ModelError(f"{found} is not a special token of its tokenizer within its vocabulary of {vocabulary}")


def _use_template_of_processor(tokens: Tokens, shown: str, base_dir: Path) -> None:
    """Use chat_template.json where there is no chat_template.jinja: older files keep the processor's template there."""
    folder = fetch_folder(shown, base_dir, ("chat_template.json", "chat_template.jinja"))
    if folder is None or (folder / "chat_template.jinja").is_file():
        return
    found = read_json(folder / "chat_template.json", f"{shown}/chat_template.json")
    if isinstance(found, dict) and isinstance(found.get("chat_template"), str):
        tokens.tokenizer.chat_template = found["chat_template"]


def _check_template(tokens: Tokens, placeholder: int) -> None:
    """Raise ModelError unless the chat template writes a placeholder for a picture."""
    if not tokens.has_template:
        return
    try:
        ids = tokens.chat([{"role": "user", "content": "\ue000?"}], mark="\ue000")
    except InputError as error:
        raise ModelError(f"its chat template cannot be used with pictures: {error}") from None
    if ids.count(placeholder) != 1:
        raise ModelError(
            f"its chat template writes {ids.count(placeholder)} placeholders for a picture, expected one\n"
            "    fix: save the processor's chat template there: chat_template.jinja or chat_template.json"
        )
