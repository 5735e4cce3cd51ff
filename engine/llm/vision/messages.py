"""Pictures and videos in messages and prompts: each is taken out, and a mark is left in its place.

A mark is a private-use character that occurs in no text of the request. The conversation is then checked as one of
texts alone, and `with_parts` turns the marked texts into the parts that chat templates of vision-language models read:

    [{type: text, text: look}, {type: image_url, ...}]    as received
    "look\\ue000"                                          checked
    [{type: text, text: look}, {type: image}]              rendered

In a prompt, which is one text, U+FFFC (object replacement character) is the place of a picture, and U+FFFB that of a
video. A video is an array of frames, which input `videos` has; none is decoded here.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weftline.engine.llm.vision.families import listed
from weftline.errors import InputError
from weftline.nodes.image import IMAGES_MAX, MESSAGE_IMAGE_BYTES_MAX, PIXELS_MAX, decode_image
from weftline.nodes.template import PICTURE, VIDEO, is_video, to_video

Decode = Callable[[bytes, int], np.ndarray]
"""From an encoded picture and the limit of its pixels to uint8 [H, W, 3]; errors as in `decode_image`."""

REQUEST_PIXELS_MAX = 64_000_000
"""Most pixels of all pictures in the messages of a request, and of all frames of its videos."""
FRAMES_MAX = 768
"""Most frames of all videos of a request: `max_frames` of Qwen2-VL's video processor."""
FPS = 24.0
"""Frames of a video in a second where a request has no other number, as in transformers (`VideoMetadata`)."""
_MARKS = range(0xE000, 0xF8FF)


@dataclass(frozen=True, slots=True)
class Marks:
    """Characters that stand for a picture and for a video in the texts of a request; '' for none.

    video_texts: what is written in place of each video's placeholder, in order, for a model that describes its frames.
    """

    image: str = ""
    video: str = ""
    video_texts: tuple[str, ...] = ()


NO_MARKS = Marks()


@dataclass(frozen=True, slots=True, eq=False)
class Video:
    """A video of a request: uint8 [frames, H, W, 3], with `fps` frames in a second."""

    frames: np.ndarray
    fps: float = FPS


def with_parts(turns: Sequence[Mapping[str, Any]], marks: Marks) -> list[dict[str, Any]]:
    """Return checked messages with contents as lists of parts, one at each mark; empty contents stay texts."""
    return [{**turn, "content": _parts(turn["content"], marks) if turn["content"] else ""} for turn in turns]


def _parts(text: str, marks: Marks) -> list[dict[str, str]]:
    kinds = {mark: kind for mark, kind in ((marks.image, "image"), (marks.video, "video")) if mark}
    pieces = re.split(f"([{''.join(kinds)}])", text) if kinds else [text]
    return [{"type": kinds[one]} if one in kinds else {"type": "text", "text": one} for one in pieces if one]


def free_marks(value: Any) -> Marks:
    """Return private-use characters that occur in no text of a JSON value; InputError where there are none."""
    present = set().union(*_texts(value))
    free = [chr(code) for code in _MARKS if chr(code) not in present][:2]
    if len(free) < 2:
        raise InputError("prompt: found all private-use characters, expected two that are free for pictures and videos")
    return Marks(free[0], free[1])


def in_order(
    marked: Any, marks: Marks, images: Sequence[np.ndarray], videos: Sequence[Video]
) -> list[np.ndarray | Video]:
    """Return pictures and videos in the order of their marks in a prompt or in messages."""
    following: dict[str, Iterator[np.ndarray | Video]] = {marks.image: iter(images), marks.video: iter(videos)}
    return [next(following[char]) for text in _texts(marked) for char in text if char in following]


def _texts(value: Any, depth: int = 8) -> Iterator[str]:
    """Yield the texts of message contents, which are not nested deeper than `depth`."""
    if isinstance(value, str):
        yield value
    elif depth and isinstance(value, Mapping):
        for name, one in value.items():
            if name != "image_url":
                yield from _texts(one, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one, depth - 1)


def mark_prompt(prompt: str, images: int, videos: int, marks: Marks) -> str:
    """Return a prompt with a mark for each of its pictures and videos.

    They are at U+FFFC and U+FFFB, or before the text where there is none, pictures first. In a request without pictures
    U+FFFC is text, and without videos U+FFFB.
    """
    before = ""
    for shown, char, mark, count, kind in (
        ("U+FFFC", PICTURE, marks.image, images, "images"),
        ("U+FFFB", VIDEO, marks.video, videos, "videos"),
    ):
        if not count:
            continue
        found = prompt.count(char)
        if found and found != count:
            shows = f"shows {found} {'pictures' if kind == 'images' else kind} ({shown}), and input {kind} has {count}"
            raise InputError(f"prompt: {shows}; expected as many, or no {shown}", param="prompt")
        before += "" if found else mark * count
        prompt = prompt.replace(char, mark)
    return before + prompt


def mark_messages(
    messages: Sequence[Any],
    images: Sequence[np.ndarray],
    videos: Sequence[Video],
    marks: Marks,
    decode: Decode = decode_image,
) -> tuple[list[Any], list[np.ndarray | Video]]:
    """Return messages with marks for pictures and videos, and these in order.

    images, videos: those of the inputs. Parts {type: image} and {type: video} show them in order; without such parts
    they are put before the text of the last user message.

    decode: decodes the pictures of URLs.
    """
    reader = _Reader(images, videos, marks, decode)
    marked = [reader.message(f"messages[{place}]", message) for place, message in enumerate(messages)]
    for kind, given, shown in (("image", images, reader.shown_images), ("video", videos, reader.shown_videos)):
        if shown and shown != len(given):
            found = f"parts of type {kind} show {shown} {'pictures' if kind == 'image' else 'videos'}"
            raise InputError(f"messages: {found}, and input {kind}s has {len(given)}", param="messages")
    unshown_images = [] if reader.shown_images else list(images)
    unshown_videos = [] if reader.shown_videos else list(videos)
    found_images = reader.images
    if unshown_images or unshown_videos:
        added = marks.image * len(unshown_images) + marks.video * len(unshown_videos)
        marked, before = _before_last_user(marked, added, marks.image)
        found_images = [*found_images[:before], *unshown_images, *found_images[before:]]
    return marked, in_order(marked, marks, found_images, [*reader.videos, *unshown_videos])


def _before_last_user(messages: list[Any], added: str, mark: str) -> tuple[list[Any], int]:
    """Return messages with marks added before the last user's text, and the number of pictures before these."""
    users = [at for at, one in enumerate(messages) if isinstance(one, Mapping) and one.get("role") == "user"]
    if not users:
        found = "found no user message to show the pictures or videos of the inputs in"
        raise InputError(f"messages: {found}", param="messages")
    last = users[-1]
    before = sum(str(one.get("content")).count(mark) for one in messages[:last] if isinstance(one, Mapping))
    content = messages[last].get("content")
    shown = [{"type": "text", "text": added}, *content] if isinstance(content, list) else f"{added}{content or ''}"
    return [*messages[:last], {**messages[last], "content": shown}, *messages[last + 1 :]], before


class _Reader:
    """Reads messages in order.

    images, videos: those so far. shown_images, shown_videos: how many of the inputs' were shown.
    """

    def __init__(
        self, images: Sequence[np.ndarray], videos: Sequence[Video], marks: Marks, decode: Decode = decode_image
    ) -> None:
        self._decode = decode
        self.images: list[np.ndarray] = []
        self.videos: list[Video] = []
        self._given_images, self._given_videos = images, videos
        self.shown_images = self.shown_videos = 0
        self._marks = marks
        self._pixels = 0

    def message(self, where: str, message: Any) -> Any:
        """Return a message whose content is one text where it has media; other messages as they are."""
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list) or not any(map(_is_media, content)):
            return message
        texts = [self._part(f"{where}.content[{place}]", part) for place, part in enumerate(content)]
        return {**message, "content": "".join(texts)}

    def _part(self, where: str, part: Any) -> str:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "video":
            self._add_video(where, part)
            return self._marks.video
        if kind in ("image", "image_url"):
            self._add_image(where, part)
            return self._marks.image
        if kind == "video_url":
            fix = "send its frames as input videos, and show them here by a part {type: video}"
            raise InputError(
                f"{where}: found a video_url; no videos are decoded here\n    fix: {fix}", param="messages"
            )
        if kind == "text" and isinstance(part.get("text"), str):
            return str(part["text"])
        raise InputError(f"{where}: expected a part of type text, image_url, image or video", param="messages")

    def _add_video(self, where: str, part: Mapping[str, Any]) -> None:
        if self.shown_videos < len(self._given_videos):
            video = self._given_videos[self.shown_videos]
            fps = video.fps if part.get("fps") is None else check_fps(part["fps"], f"{where}.fps", "messages")
            self.videos.append(Video(video.frames, fps))
        self.shown_videos += 1

    def _add_image(self, where: str, part: Mapping[str, Any]) -> None:
        if part["type"] == "image":
            if self.shown_images < len(self._given_images):
                self.images.append(self._given_images[self.shown_images])
            self.shown_images += 1
        else:
            pixels_max = min(PIXELS_MAX, REQUEST_PIXELS_MAX - self._pixels)
            self.images.append(decoded(part, where, pixels_max, self._decode))
            self._pixels += self.images[-1].size // 3
        check_count(len(self.images), "messages")


def read_videos(inputs: Mapping[str, Any]) -> list[Video]:
    """Return the videos of input `videos`, with the frames per second of input `fps`; InputError where one is invalid.

    An array uint8 [frames, H, W, 3] or a list of pictures is one video; a list of such arrays is several.
    """
    given = inputs.get("videos")
    if given is None or (len(given) == 0 and not isinstance(given, np.ndarray)):
        return []
    try:
        found: list[np.ndarray] = [given]
        if not isinstance(given, np.ndarray):
            found = list(given) if is_video(given[0]) else [to_video(given)]
    except ValueError as error:
        raise InputError(f"videos: {error}", param="videos") from None
    if not all(map(is_video, found)):
        raise InputError("videos: expected arrays uint8[frames, height, width, 3], or pictures", param="videos")
    check_count(len(found), "videos", "videos")
    frames = sum(len(video) for video in found)
    if frames > FRAMES_MAX or not all(map(len, found)):
        raise InputError(f"videos: found {frames} frames, expected 1 to {FRAMES_MAX} together", param="videos")
    if (pixels := sum(video.size // 3 for video in found)) > REQUEST_PIXELS_MAX:
        raise InputError(f"videos: found {pixels} pixels, expected at most {REQUEST_PIXELS_MAX}", param="videos")
    rates = inputs.get("fps")
    rates = rates if isinstance(rates, list) else [FPS if rates is None else rates] * len(found)
    if len(rates) != len(found):
        raise InputError(f"fps: found {len(rates)} numbers for {len(found)} videos", param="fps")
    return [Video(video, check_fps(fps, "fps", "fps")) for video, fps in zip(found, rates, strict=True)]


def check_fps(fps: object, where: str, param: str) -> float:
    """Return a number of frames per second; InputError unless it is within limits."""
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 1e-3 <= fps <= 1e3:
        raise InputError(f"{where}: found {fps!r:.40}, expected frames per second, from 0.001 to 1000", param=param)
    return float(fps)


def _is_media(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image_url", "image", "video", "video_url")


def has_media(messages: object, kinds: Sequence[str] = ("image", "video")) -> bool:
    """Return whether a message has a part with a picture or a video."""
    if not isinstance(messages, list):
        return False
    contents = [one.get("content") for one in messages if isinstance(one, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content if _is_media(part)]
    return any(str(part["type"]).removesuffix("_url") in kinds for part in parts)


def shows_media(inputs: Mapping[str, Any], kinds: Sequence[str] = ("image", "video")) -> bool:
    """Return whether a request has pictures or videos. kinds: which are looked for."""
    given = (inputs.get(f"{kind}s") for kind in kinds)
    shown = any(one is not None and (isinstance(one, np.ndarray) or len(one) > 0) for one in given)
    return shown or has_media(inputs.get("messages"), kinds)


def refuse_media(inputs: Mapping[str, Any], shown: str) -> None:
    """Raise InputError for pictures or videos in a request to a model of texts."""
    for kind, found in (("image", "pictures"), ("video", "videos")):
        for param in (f"{kind}s", "messages"):
            if shows_media({param: inputs.get(param)}, (kind,)):
                reads = f"{shown} reads texts only; {found} need one of {listed(videos=kind == 'video')}"
                raise InputError(f"{param}: found {found}, and model {reads}", param=param)


def refuse_videos(inputs: Mapping[str, Any], reason: str) -> None:
    """Raise InputError for videos in a request to a model of pictures alone. reason: why it has none."""
    for param in ("videos", "messages"):
        if shows_media({param: inputs.get(param)}, ("video",)):
            raise InputError(f"{param}: found videos; {reason}", param=param)


def check_count(found: int, param: str, kind: str = "pictures") -> None:
    """Raise InputError for more pictures, or videos, than a request may have."""
    if found > IMAGES_MAX:
        raise InputError(f"{param}: found {found} {kind}, expected at most {IMAGES_MAX}", param=param)


def encoded_chars(inputs: Mapping[str, Any]) -> int:
    """Return the size of the encoded pictures in messages, in characters."""
    messages = inputs.get("messages")
    contents = (
        [one.get("content") for one in messages if isinstance(one, Mapping)] if isinstance(messages, list) else []
    )
    parts = [part for content in contents if isinstance(content, list) for part in content if _is_media(part)]
    inner = [part.get("image_url") for part in parts]
    urls = [one.get("url") if isinstance(one, Mapping) else one for one in inner]
    return sum(len(one) for one in urls if isinstance(one, str))


def decoded(part: Mapping[str, Any], where: str, pixels_max: int, decode: Decode = decode_image) -> np.ndarray:
    """Return the picture of an `image_url` part as uint8 [H, W, 3]; its URL holds the picture itself."""
    data = data_of_url(part, where)
    try:
        return decode(data, pixels_max)
    except InputError as error:
        raise InputError(f"{where}.image_url: {error}", param="messages") from None


def data_of_url(part: Mapping[str, Any], where: str) -> bytes:
    """Return the encoded picture of an `image_url` part with a `data:` URL; InputError names what is wrong."""
    inner = part.get("image_url")
    url = inner.get("url") if isinstance(inner, Mapping) else inner
    where = f"{where}.image_url.url"
    if not isinstance(url, str) or url[:5].lower() != "data:":
        found = "an address" if isinstance(url, str) else type(url).__name__
        fix = "no URL is fetched here; send the picture itself as data:image/png;base64,..."
        raise InputError(f"{where}: found {found}, expected a data: URL\n    fix: {fix}", param="messages")
    head, comma, data = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InputError(f"{where}: expected data:image/...;base64,...", param="messages")
    if len(data) * 3 // 4 > MESSAGE_IMAGE_BYTES_MAX:
        found = f"found a picture of about {len(data) * 3 // 4} bytes"
        raise InputError(f"{where}: {found}, expected at most {MESSAGE_IMAGE_BYTES_MAX}", param="messages")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise InputError(f"{where}: found no valid base64", param="messages") from None
