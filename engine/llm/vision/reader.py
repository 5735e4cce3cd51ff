"""Reads the pictures and videos of a request and lays them out in its prompt.

`take` decodes and processes them, and may run beside the rounds; `lay_out` needs the tokenizer. A picture is processed
unless its features are known already. One that cannot fit the context is refused before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from weftline.engine.llm.options import LlmConfig
from weftline.engine.llm.runner import Runner
from weftline.engine.llm.tokens import Tokens
from weftline.engine.llm.vision.decoding import DecodePicture, decode_here
from weftline.engine.llm.vision.encoder import ImageEncoder
from weftline.engine.llm.vision.families import FAMILIES, Family, listed
from weftline.engine.llm.vision.features import FeatureCache, FeatureKey
from weftline.engine.llm.vision.layout import ImageLayout, VideoLayout, layout_of, video_layout_of
from weftline.engine.llm.vision.messages import (
    NO_MARKS,
    Marks,
    Video,
    check_count,
    free_marks,
    in_order,
    mark_messages,
    mark_prompt,
    read_videos,
    refuse_videos,
    shows_media,
)
from weftline.engine.llm.vision.ports import check_options
from weftline.engine.llm.vision.processing import ImageProcessor, VideoProcessor, load_processor, settings_of
from weftline.engine.llm.vision.prompt import (
    ImageTokens,
    Inputs,
    Pixels,
    PromptImage,
    content_key,
    expand,
    runs_at,
)
from weftline.errors import InputError, LimitReached, ModelError, RequestCancelled
from weftline.nodes.contract import ConfigError
from weftline.nodes.hugging_face import fetch_folder, read_json

HELD_BYTES_MAX = 1 << 30
"""Bytes of pictures that wait for the encoder above which further ones are refused: a small file may become 48 MB."""

Encode = Callable[[Mapping[str, Any], Marks], list[int]]
"""From inputs `prompt` or `messages` with marks, and the marks, to the prompt's tokens."""
Process = Callable[[np.ndarray], Sequence[Inputs]]
"""From a picture, or the frames of a video, to the vision encoder's inputs of its parts."""


@dataclass(frozen=True, slots=True)
class TakenMedium:
    """A picture or a video of a request.

    keys:   hash of the content of each part; of a picture there is one.
    frames: number of frames of a video; 0 for a picture.
    """

    height: int
    width: int
    keys: tuple[bytes, ...]
    pixels: Pixels
    frames: int = 0
    fps: float = 0.0


@dataclass(frozen=True, slots=True)
class Taken:
    """A request's inputs with a mark for each picture and video.

    media: these, in order.
    """

    inputs: Mapping[str, Any]
    marks: Marks = NO_MARKS
    media: tuple[TakenMedium, ...] = ()


@dataclass(frozen=True, slots=True)
class VideoReader:
    """Videos of requests to one model; fields as in `ImageReader`."""

    layout: VideoLayout
    process: Process
    settings: bytes


@dataclass(frozen=True, slots=True)
class ImageReader:
    """Pictures and videos of requests to one model.

    layout:      tokens of a picture.   placeholder: the token that the chat template writes for it.
    process:     returns the vision encoder's inputs.   settings: hash of what determines them.
    context_max: most tokens of a prompt and its answer.
    videos:      None for a model of pictures alone.   no_videos: why, for errors.
    knows:       returns whether a picture need not be processed, by the salt of its caller and its key.
    held_bytes:  returns the bytes of the pictures of live requests that are not encoded yet.
    decode:      decodes a picture of a message.
    """

    layout: ImageLayout
    placeholder: int
    process: Process
    settings: bytes
    context_max: int
    videos: VideoReader | None = None
    no_videos: str = ""
    knows: Callable[[FeatureKey], bool] = lambda key: False
    held_bytes: Callable[[], int] = lambda: 0
    decode: DecodePicture = decode_here

    def read(self, inputs: Mapping[str, Any], encode: Encode) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Return the tokens of a prompt, and its pictures; InputError where they do not fit together."""
        return self.lay_out(self.take(inputs), encode)

    def take(
        self, inputs: Mapping[str, Any], salt: bytes = b"", cancelled: Callable[[], bool] = lambda: False
    ) -> Taken:
        """Return a request's inputs with marks for pictures and videos, and these, decoded and processed.

        May run in another thread. salt: separates the features of callers. cancelled: ends it, even while a
        picture is decoded that takes long.
        InputError, LimitReached: the request is refused.
        """
        if not shows_media(inputs):
            return Taken(inputs)
        if self.videos is None:
            refuse_videos(inputs, self.no_videos)
        self._check_held()
        found = inputs.get("images")
        images = [found] if isinstance(found, np.ndarray) else list(found or ())  # of type image, or list[image]
        check_count(len(images), "images")
        videos = read_videos(inputs)
        prompt, messages = inputs.get("prompt"), inputs.get("messages")
        marks = free_marks([prompt, messages])
        if isinstance(messages, list):
            decode = partial(self.decode, cancelled=cancelled)
            marked, media = mark_messages(messages, images, videos, marks, decode)
            shown = {**inputs, "messages": marked}
        else:
            text = (
                mark_prompt(prompt, len(images), len(videos), marks) if isinstance(prompt, str) and prompt else prompt
            )
            media = in_order(text, marks, images, videos)
            shown = {**inputs, "prompt": text}
        self._check_sizes(media, "images" if messages is None else "messages")
        return Taken(shown, marks, tuple(self._processed(media, salt, cancelled)))

    def lay_out(self, taken: Taken, encode: Encode) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Return the tokens of a prompt, and its pictures and parts of videos in it."""
        ids = encode(taken.inputs, replace(taken.marks, video_texts=self._video_texts(taken.media)))
        laid_out = self._tokens_of(taken.media)
        if not taken.media:
            if not laid_out.keys().isdisjoint(ids):
                raise InputError("messages: the model's chat template shows a picture, and the request has none")
            return ids, ()
        try:
            tokens, spans = expand(ids, {key: [one for one, _ in own] for key, own in laid_out.items()})
        except ValueError as error:
            raise InputError(f"messages: the model's chat template writes {error}", param="messages") from None
        self._check_length(f"{len(tokens)}", len(tokens), taken.media)
        times = [self._times_of(one) for one in taken.media]
        images: list[PromptImage] = []
        placed: Counter[int] = Counter()  # parts of each medium, by its place
        for placeholder, own in laid_out.items():
            for span, (one, place) in zip(spans[placeholder], own, strict=True):
                medium, runs = taken.media[place], runs_at(span, one)
                for part_runs in [(run,) for run in runs] if medium.frames else [runs]:
                    part = placed[place]
                    made = (part_runs, one.grid, medium.keys[part], medium.pixels, part, times[place][part])
                    images.append(PromptImage(*made))
                    placed[place] += 1
        return tokens, tuple(sorted(images, key=lambda image: image.start))

    def _times_of(self, one: TakenMedium) -> list[int]:
        """Return the position in time of each part; see `PromptImage`."""
        return self.videos.layout.times_of(one.frames, one.fps) if self.videos is not None and one.frames else [0]

    def _video_texts(self, media: Sequence[TakenMedium]) -> tuple[str, ...]:
        """Return the texts of videos, for a model that has such; none otherwise."""
        if self.videos is None:
            return ()
        texts = [self.videos.layout.text_of(one.frames, one.fps) for one in media if one.frames]
        return tuple(text for text in texts if text)

    def _tokens_of(self, media: Sequence[TakenMedium]) -> dict[int, list[tuple[ImageTokens, int]]]:
        """Return the tokens at each occurrence of a placeholder, with the place of their medium."""
        found: dict[int, list[tuple[ImageTokens, int]]] = {self.placeholder: []}
        if self.videos is not None:
            found.setdefault(self.videos.layout.placeholder, [])
        for place, one in enumerate(media):
            if self.videos is not None and one.frames:
                layout = self.videos.layout
                found[layout.placeholder] += [(t, place) for t in layout.tokens_of(one.frames, one.height, one.width)]
            else:
                found[self.placeholder].append((self.layout.tokens_of(one.height, one.width), place))
        return found

    def _check_held(self) -> None:
        held = self.held_bytes()
        if held > HELD_BYTES_MAX:
            found = f"pictures of requests inside take {held} bytes, and the limit is {HELD_BYTES_MAX}"
            raise LimitReached(f"{found}; send it again when some are encoded")

    def _check_sizes(self, media: Sequence[np.ndarray | Video], param: str) -> None:
        """Raise InputError for a picture of an unsupported size, and for pictures that cannot fit the context."""
        count = 0
        for one in media:
            try:
                if not isinstance(one, Video):
                    count += self.layout.features_of(*one.shape[:2])
                elif self.videos is not None:
                    count += self.videos.layout.features_of(*one.frames.shape[:3])
            except InputError as error:
                where = "videos" if isinstance(one, Video) else param
                raise InputError(f"{where}: {error}", param=where) from None
        self._check_length(f"at least {count}", count, media)

    def _check_length(self, shown: str, tokens: int, media: Sequence[Any]) -> None:
        if tokens >= self.context_max:
            found = (
                f"found {shown} tokens with those of {len(media)} pictures{' or videos' * (self.videos is not None)}"
            )
            raise InputError(f"prompt: {found}, expected at most {self.context_max - 1}; shorten it", param="prompt")

    def _processed(
        self, media: Sequence[np.ndarray | Video], salt: bytes, cancelled: Callable[[], bool]
    ) -> Iterator[TakenMedium]:
        seen: set[bytes] = set()
        for one in media:
            if cancelled():
                raise RequestCancelled("the request was cancelled while its pictures were processed")
            taken = self._keyed_video(one) if isinstance(one, Video) else self._keyed(one)
            if not all(key in seen or self.knows((salt, key)) for key in taken.keys):
                taken.pixels.inputs()
            seen.update(taken.keys)
            yield taken

    def _keyed(self, pixels: np.ndarray) -> TakenMedium:
        """Return a picture with the hash of its content."""
        height, width = pixels.shape[:2]
        return TakenMedium(height, width, (content_key(pixels, self.settings),), Pixels(pixels, self.process))

    def _keyed_video(self, video: Video) -> TakenMedium:
        """Return a video with the hashes of its parts' content."""
        if self.videos is None:
            raise RuntimeError("videos are refused by a model of pictures alone")
        count, height, width = video.frames.shape[:3]
        parts = self.videos.layout.parts_of(count)
        each = self.videos.layout.features_of(count, height, width) // len(parts)  # may depend on the number of frames
        settings = self.videos.settings + f"{each}".encode()
        keys = tuple(content_key(video.frames[part.start : part.stop], settings) for part in parts)
        return TakenMedium(height, width, keys, Pixels(video.frames, self.videos.process, len(parts)), count, video.fps)


def open_reader(
    runner: Runner, tokens: Tokens, source: str | Path, base_dir: Path, options: LlmConfig
) -> ImageReader | None:
    """Prepare an opened model for pictures and videos, and return what reads them; None for a model of texts.

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
    processor = load_processor(source, shown)
    placeholder = int(config.image_token_id)
    tokens.image_token = tokens.tokenizer.convert_ids_to_tokens(placeholder) or ""
    try:
        _check_placeholder(tokens, placeholder, runner.vocabulary)
        _use_template_of_processor(tokens, shown, base_dir)
        _check_template(tokens, placeholder)
        layout = layout_of(family, config, processor, tokens.image_token, tokens.encode_control)
        process = ImageProcessor(processor, runner.model.dtype)
        encoder = ImageEncoder(runner.model, family, process, layout, FeatureCache(options.image_cache_bytes))
        encoder.check()
    except ModelError as error:
        raise ModelError(f"model {shown}: {error}") from None
    runner.vision = encoder
    settings = settings_of(processor, config.model_type)
    reader = ImageReader(layout, int(config.image_token_id), process, settings, runner.context_max, knows=encoder.knows)
    if not family.videos:
        return replace(reader, no_videos=f"{shown} reads pictures alone; videos need one of {listed(videos=True)}")
    try:
        return replace(reader, videos=_open_videos(runner, tokens, source, shown, family, layout))
    except ModelError as error:  # such as a missing torchvision: pictures can be read without it
        return replace(reader, no_videos=str(error))


def _open_videos(
    runner: Runner, tokens: Tokens, source: str | Path, shown: str, family: Family, layout: ImageLayout
) -> VideoReader:
    """Prepare a model for videos; ModelError where its video processor cannot be used."""
    config = runner.model.config
    processor = load_processor(source, shown, video=True)
    if family.videos == "frames":
        from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

        tokens.video_token, tokens.video_template = "<video>", DEFAULT_CHAT_TEMPLATE
    else:
        tokens.video_token = tokens.tokenizer.convert_ids_to_tokens(int(config.video_token_id)) or ""
        _check_placeholder(tokens, int(config.video_token_id), runner.vocabulary, "video")
    process = VideoProcessor(processor, runner.model.dtype)
    found = video_layout_of(family, config, processor, layout)
    return VideoReader(found, process, settings_of(processor, config.model_type))


def _check_placeholder(tokens: Tokens, placeholder: int, vocabulary: int, kind: str = "image") -> None:
    if not tokens.is_control(placeholder) or placeholder >= vocabulary:
        found = f"{kind}_token_id {placeholder} ({tokens.tokenizer.convert_ids_to_tokens(placeholder)!r:.40})"
        raise ModelError(f"{found} is not a special token of its tokenizer within its vocabulary of {vocabulary}")


def _use_template_of_processor(tokens: Tokens, shown: str, base_dir: Path) -> None:
    """Use chat_template.json where there is no chat_template.jinja: older files keep the processor's template there."""
    folder = fetch_folder(shown, base_dir)
    if (folder / "chat_template.jinja").is_file():
        return
    found = read_json(folder / "chat_template.json", f"{shown}/chat_template.json")
    if isinstance(found, dict) and isinstance(found.get("chat_template"), str):
        tokens.tokenizer.chat_template = found["chat_template"]


def _check_template(tokens: Tokens, placeholder: int) -> None:
    """Raise ModelError unless the chat template writes a placeholder for a picture."""
    if not tokens.has_template:
        return
    try:
        ids = tokens.chat([{"role": "user", "content": "\ue000?"}], media=Marks("\ue000"))
    except InputError as error:
        raise ModelError(f"its chat template cannot be used with pictures: {error}") from None
    if ids.count(placeholder) != 1:
        raise ModelError(
            f"its chat template writes {ids.count(placeholder)} placeholders for a picture, expected one\n"
            "    fix: save the processor's chat template there: chat_template.jinja or chat_template.json"
        )
