"""Reads the pictures of a request and lays them out in its prompt.

`take` decodes and processes the pictures, and may run beside the rounds; `lay_out` needs the tokenizer. A picture is
processed unless its features are known already. One that cannot fit the context is refused before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from weftline.engine.llm.options import LlmConfig
from weftline.engine.llm.runner import Runner
from weftline.engine.llm.tokens import Tokens
from weftline.engine.llm.vision.encoder import ImageEncoder
from weftline.engine.llm.vision.families import FAMILIES
from weftline.engine.llm.vision.features import FeatureCache, FeatureKey
from weftline.engine.llm.vision.layout import ImageLayout, layout_of
from weftline.engine.llm.vision.messages import (
    check_count,
    free_mark,
    has_images,
    mark_messages,
    mark_prompt,
)
from weftline.engine.llm.vision.ports import check_options
from weftline.engine.llm.vision.prompt import Pixels, PromptImage, content_key, expand, to_prompt_image
from weftline.errors import InputError, LimitReached, ModelError, RequestCancelled
from weftline.nodes.contract import ConfigError
from weftline.nodes.hugging_face import fetch_folder, read_json, reason_without_path

HELD_BYTES_MAX = 1 << 30
"""Bytes of pictures that wait for the encoder above which further ones are refused: a small file may become 48 MB."""

Encode = Callable[[Mapping[str, Any], str], list[int]]
"""From inputs `prompt` or `messages` with marks, and the mark, to the prompt's tokens."""


@dataclass(frozen=True, slots=True)
class TakenPicture:
    """A picture of a request. key: hash of its content."""

    height: int
    width: int
    key: bytes
    pixels: Pixels


@dataclass(frozen=True, slots=True)
class Taken:
    """A request's inputs with a mark for each picture.

    pictures: in order.
    """

    inputs: Mapping[str, Any]
    mark: str = ""
    pictures: tuple[TakenPicture, ...] = ()


@dataclass(frozen=True, slots=True)
class ImageReader:
    """Pictures of requests to one model.

    layout:      tokens of a picture.   placeholder: the token that the chat template writes for it.
    process:     returns the vision encoder's inputs of a picture.   settings: hash of what determines them.
    context_max: most tokens of a prompt and its answer.
    knows:       returns whether a picture need not be processed, by the salt of its caller and its key.
    held_bytes:  returns the bytes of the pictures of live requests that are not encoded yet.
    """

    layout: ImageLayout
    placeholder: int
    process: Callable[[np.ndarray], Mapping[str, Any]]
    settings: bytes
    context_max: int
    knows: Callable[[FeatureKey], bool] = lambda key: False
    held_bytes: Callable[[], int] = lambda: 0

    def read(self, inputs: Mapping[str, Any], encode: Encode) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Return the tokens of a prompt, and its pictures; InputError where they do not fit together."""
        return self.lay_out(self.take(inputs), encode)

    def take(
        self, inputs: Mapping[str, Any], salt: bytes = b"", cancelled: Callable[[], bool] = lambda: False
    ) -> Taken:
        """Return a request's inputs with marks for pictures, and these, decoded and processed.

        May run in another thread. salt: separates the features of callers. cancelled: ends it between two pictures.
        InputError, LimitReached: the request is refused.
        """
        found = inputs.get("images")
        given = [found] if isinstance(found, np.ndarray) else list(found or ())  # of type image, or list[image]
        check_count(len(given), "images")
        prompt, messages = inputs.get("prompt"), inputs.get("messages")
        if not given and not has_images(messages):
            return Taken(inputs)
        self._check_held()
        mark = free_mark([prompt, messages])
        if isinstance(messages, list):
            marked, pictures = mark_messages(messages, given, mark)
            shown = {**inputs, "messages": marked}
        else:
            pictures = given
            texts = mark_prompt(prompt, len(given), mark) if isinstance(prompt, str) and prompt else prompt
            shown = {**inputs, "prompt": texts}
        self._check_sizes(pictures, "images" if messages is None else "messages")
        return Taken(shown, mark, tuple(self._processed(pictures, salt, cancelled)))

    def lay_out(self, taken: Taken, encode: Encode) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Return the tokens of a prompt, and its pictures in it."""
        ids = encode(taken.inputs, taken.mark)
        if not taken.pictures:
            return self._without(ids), ()
        laid_out = [self.layout.tokens_of(one.height, one.width) for one in taken.pictures]
        try:
            tokens, spans = expand(ids, self.placeholder, laid_out)
        except ValueError as error:
            raise InputError(f"messages: the model's chat template writes {error}", param="messages") from None
        self._check_length(f"{len(tokens)}", len(tokens), len(laid_out))
        every = zip(spans, laid_out, taken.pictures, strict=True)
        return tokens, tuple(to_prompt_image(span, one, picture.pixels, picture.key) for span, one, picture in every)

    def _check_held(self) -> None:
        held = self.held_bytes()
        if held > HELD_BYTES_MAX:
            found = f"pictures of requests inside take {held} bytes, and the limit is {HELD_BYTES_MAX}"
            raise LimitReached(f"{found}; send it again when some are encoded")

    def _check_sizes(self, pictures: Sequence[np.ndarray], param: str) -> None:
        """Raise InputError for a picture of an unsupported size, and for pictures that cannot fit the context."""
        try:
            count = sum(self.layout.features_of(*pixels.shape[:2]) for pixels in pictures)
        except InputError as error:
            raise InputError(f"{param}: {error}", param=param) from None
        self._check_length(f"at least {count}", count, len(pictures))

    def _check_length(self, shown: str, tokens: int, pictures: int) -> None:
        if tokens >= self.context_max:
            found = f"found {shown} tokens with those of {pictures} pictures"
            raise InputError(f"prompt: {found}, expected at most {self.context_max - 1}; shorten it", param="prompt")

    def _processed(
        self, pictures: Sequence[np.ndarray], salt: bytes, cancelled: Callable[[], bool]
    ) -> Iterator[TakenPicture]:
        seen: set[bytes] = set()
        for pixels in pictures:
            if cancelled():
                raise RequestCancelled("the request was cancelled while its pictures were processed")
            key = content_key(pixels, self.settings)
            height, width = pixels.shape[:2]
            taken = TakenPicture(height, width, key, Pixels(pixels, self.process))
            if key not in seen and not self.knows((salt, key)):
                taken.pixels.inputs()
            seen.add(key)
            yield taken

    def _without(self, ids: list[int]) -> list[int]:
        if self.placeholder in ids:
            raise InputError("messages: the model's chat template shows a picture, and the request has none")
        return ids


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
        process = partial(process_image, processor, runner.model.dtype)
        encoder = ImageEncoder(runner.model, family, process, layout, FeatureCache(options.image_cache_bytes))
        encoder.check()
    except ModelError as error:
        raise ModelError(f"model {shown}: {error}") from None
    runner.vision = encoder
    settings = _settings(processor, config.model_type)
    return ImageReader(layout, placeholder, process, settings, runner.context_max, encoder.knows)


def process_image(processor: Any, dtype: Any, pixels: np.ndarray) -> dict[str, Any]:
    """Return the vision encoder's inputs of a picture, uint8 [H, W, 3]: tensors with a leading axis to join them at."""
    import torch

    found = processor(images=[torch.tensor(pixels)], input_data_format="channels_last", return_tensors="pt")
    given = {name: found[name] for name in ("pixel_values", "image_grid_thw", "pixel_attention_mask") if name in found}
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in given.items()}


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
