"""Template node: renders text from other steps' outputs with Jinja2.

Inputs are the wired ports. A port named `see__detections` is `see.detections` in the template; any other port is a
variable of its name. With option `images` the pictures that the text shows are an output too, and each is U+FFFC in the
text (object replacement character). With option `videos` so are the videos, and each is U+FFFB. Rendering is limited in
time, loops, memory and length (see weftline.nodes.template_sandbox); the worker's run_max_ms is the outer limit.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np

from weftline.fields import REQUEST
from weftline.node import Batch, BatchNode, ConfigError, OpenContext, Outputs, Ports, StepContext, StepError, port

if TYPE_CHECKING:
    from weftline.nodes.template_sandbox import Sandbox

TEMPLATES_KEPT = 256
"""Most compiled templates of steps that share the node."""

VIDEOS = "videos"
"""Name of the input whose pictures are the frames of a video."""

VIDEO_TYPE = "uint8[?, ?, ?, 3]"
"""Port type of a video: frames, height, width and colours."""

CHAR_BYTES_MAX = 4
"""Most bytes of one character in UTF-8."""

PICTURE = "\ufffc"
"""Place of a picture in a text: the object replacement character."""

VIDEO = "\ufffb"
"""Place of a video in a text: an annotation character that texts do not have."""

SEPARATOR = "__"
"""Between a step's name and its output's in the name of an input port, since a port's name has no dots."""


@dataclass(frozen=True, slots=True)
class TemplateConfig:
    """Options of `template`.

    template:         Jinja2 text, such as 'The photo shows: {{ see.detections | describe }}.'
    output_chars_max: longest result, in characters.
    render_max_ms:    time limit for one item, in milliseconds.
    images:           show pictures as U+FFFC and return them as output `images`. A step with `prompt:` sets it itself.
    videos:           show videos as U+FFFB and return them as output `videos`, likewise. A video is an array
                      uint8[frames, H, W, 3], or the frames in input `videos`, as a list of pictures.
    """

    template: Annotated[str, REQUEST]
    output_chars_max: Annotated[int, REQUEST] = 100_000
    render_max_ms: Annotated[float, REQUEST] = 200.0
    images: Annotated[bool, REQUEST] = False
    videos: Annotated[bool, REQUEST] = False


class Template(BatchNode):
    """Renders a template for each item."""

    Config: ClassVar[type[Any]] = TemplateConfig
    batch_default: ClassVar[tuple[int, float]] = (8, 0.0)
    mixed_options: ClassVar[bool] = True

    _sandbox: Sandbox
    _compiled: Callable[[str], tuple[Any, Any]]

    @classmethod
    def ports(cls, config: TemplateConfig, step: StepContext) -> Ports:
        if config.output_chars_max < 1 or config.render_max_ms <= 0:
            option = "output_chars_max" if config.output_chars_max < 1 else "render_max_ms"
            raise ConfigError(option, f"{getattr(config, option)}", "a number above 0")
        _check_names(config.template, step.wired)
        inputs = tuple(port(name, "any") for name in step.wired)
        outputs = [port("text", "text", about="the rendered text")]
        if config.images:
            outputs.append(port("images", "list[image]", about="the pictures that the text shows, in order"))
        if config.videos:
            outputs.append(port("videos", f"list[{VIDEO_TYPE}]", about="the videos that the text shows, in order"))
        return Ports(inputs=inputs, outputs=tuple(outputs))

    @classmethod
    def light_output_bytes(cls, config: TemplateConfig) -> int | None:
        return None if config.images or config.videos else CHAR_BYTES_MAX * config.output_chars_max

    def open(self, context: OpenContext) -> None:
        from weftline.nodes.template_sandbox import Sandbox

        self._sandbox = Sandbox()
        self._compiled = lru_cache(TEMPLATES_KEPT)(self._sandbox.prepared)
        try:
            self._compiled(self.config.template)
        except ValueError as error:
            raise ConfigError("template", str(error)) from None

    def run(self, batch: Batch) -> Outputs:
        rows = [{name: batch[name][position] for name in batch.ports} for position in range(len(batch))]
        config, configs = self.config, self.configs(batch)
        if not (config.images or config.videos):
            return {"text": [self._try_render(row, own) for row, own in zip(rows, configs, strict=True)]}
        shown = [self._try_show(row, own) for row, own in zip(rows, configs, strict=True)]
        ports = ("text", *(["images"] if config.images else ()), *(["videos"] if config.videos else ()))
        return {port: [one if isinstance(one, StepError) else one[port] for one in shown] for port in ports}

    def _try_show(self, inputs: Mapping[str, Any], config: TemplateConfig) -> dict[str, Any] | StepError:
        """Return the rendered text of an item with a character for each picture and video, and these."""
        media = Media(config.images, config.videos)
        try:
            marked = {name: media.mark(value, name) for name, value in inputs.items()}
        except ValueError as error:
            return StepError(f"the template: {error}")
        text = self._try_render(marked, config)
        return text if isinstance(text, StepError) else media.taken(text)

    def _try_render(self, inputs: Mapping[str, Any], config: TemplateConfig) -> str | StepError:
        from jinja2.exceptions import TemplateError

        from weftline.nodes.template_sandbox import Overrun

        try:
            values, (template, _) = variables(inputs), self._compiled(config.template)
            return self._sandbox.generate(template, values, config.output_chars_max, config.render_max_ms)
        except Overrun as error:
            return StepError(f"the template makes {error}" if "limit" not in str(error) else f"the template: {error}")
        except (TemplateError, TypeError, ValueError, KeyError, LookupError, ArithmeticError, RecursionError) as error:
            return StepError(f"the template failed: {str(error) or type(error).__name__:.300}")


class Media:
    """Pictures and videos of one rendering. Each is a mark in the template, which no other value can contain."""

    def __init__(self, images: bool, videos: bool) -> None:
        self._start = f"{PICTURE}{secrets.randbelow(10**18):018d}."
        self._images, self._videos = images, videos
        self._found: list[np.ndarray] = []

    def mark(self, value: Any, name: str = "") -> Any:
        """Return the mark of a picture or video, or those of a list of them; other values as they are.

        name: the input's; pictures in input `videos` are the frames of one video.

        ValueError: frames have several sizes.
        """
        from weftline.nodes.template_sandbox import Marks

        if isinstance(value, list) and value:
            if self._videos and name == VIDEOS and all(map(_is_picture, value)):
                return self.mark(to_video(value))
            if all(map(self._is_shown, value)):
                return Marks([self.mark(one) for one in value])
        if not self._is_shown(value):
            return value
        self._found.append(value)
        return f"{self._start}{len(self._found) - 1};"

    def _is_shown(self, value: Any) -> bool:
        return (self._images and _is_picture(value)) or (self._videos and is_video(value))

    def taken(self, text: str) -> dict[str, Any]:
        """Return the text with a character at each mark and nowhere else, and the pictures and videos in order."""
        parts = re.split(f"{self._start}([0-9]+);", text)
        found = [self._found[int(place)] for place in parts[1::2]]
        texts = [part.replace(PICTURE, "").replace(VIDEO, "") for part in parts[::2]]
        marks = [VIDEO if is_video(one) else PICTURE for one in found]
        return {
            "text": texts[0] + "".join(mark + part for mark, part in zip(marks, texts[1:], strict=True)),
            "images": [one for one in found if not is_video(one)],
            "videos": [one for one in found if is_video(one)],
        }


def _is_picture(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3 and value.shape[2] == 3


def is_video(value: Any) -> bool:
    """Return whether a value is uint8 [frames, H, W, 3]."""
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 4 and value.shape[3] == 3


def to_video(frames: Sequence[np.ndarray]) -> np.ndarray:
    """Return pictures of one size as a video, uint8 [frames, H, W, 3]; ValueError for several sizes."""
    sizes = {frame.shape[:2] for frame in frames}
    if len(sizes) > 1:
        found = ", ".join(f"{width} x {height}" for height, width in sorted(sizes)[:2])
        raise ValueError(f"found frames of {found} pixels in one video, expected frames of one size")
    return np.stack(frames)


def variables(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template's variables: `see__detections` is attribute `detections` of variable `see`."""
    from weftline.nodes.template_sandbox import Step, to_template

    plain: dict[str, Any] = {}
    steps: dict[str, dict[str, Any]] = {}
    for name, value in inputs.items():
        step, separator, output = name.partition(SEPARATOR)
        if separator and step and output:
            steps.setdefault(step, {})[output] = to_template(value)
        else:
            plain[name] = to_template(value)
    return {**plain, **{step: Step(outputs) for step, outputs in steps.items()}}


def _check_names(source: str, wired: tuple[str, ...]) -> None:
    """Raise ConfigError when the template cannot be parsed or uses a variable that is not wired.

    Where Jinja2 is not installed nothing is checked: a pipeline is checked in places where it will not run.
    """
    try:
        from weftline.nodes.template_sandbox import Sandbox
    except ImportError:
        return
    try:
        _, used = Sandbox().prepared(source)
    except ValueError as error:
        raise ConfigError("template", str(error)) from None
    unknown = sorted(used - {name.partition(SEPARATOR)[0] for name in wired} - set(wired))
    if unknown:
        have = ", ".join(name.replace(SEPARATOR, ".", 1) for name in wired) or "nothing"
        raise ConfigError("template", f"uses {', '.join(unknown)}, which is not wired", f"of what is wired: {have}")
