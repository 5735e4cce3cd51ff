"""Template node: renders text from other steps' outputs with Jinja2.

Inputs are the wired ports. A port named `see__detections` is `see.detections` in the template; any other port is a
variable of its name. With option `images` the pictures that the text shows are an output too, and each is U+FFFC in the
text (object replacement character). Rendering is limited in time, loops, memory and length (see
weftline.nodes.template_sandbox); the worker's run_max_ms is the outer limit.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from weftline.node import Batch, BatchNode, ConfigError, OpenContext, Outputs, Ports, StepContext, StepError, port

if TYPE_CHECKING:
    from weftline.nodes.template_sandbox import Sandbox

CHAR_BYTES_MAX = 4
"""Most bytes of one character in UTF-8."""

PICTURE = "\ufffc"
"""Place of a picture in a text: the object replacement character."""

SEPARATOR = "__"
"""Between a step's name and its output's in the name of an input port, since a port's name has no dots."""


@dataclass(frozen=True, slots=True)
class TemplateConfig:
    """Options of `template`.

    template:         Jinja2 text, such as 'The photo shows: {{ see.detections | describe }}.'
    output_chars_max: longest result, in characters.
    render_max_ms:    time limit for one item, in milliseconds.
    images:           show pictures as U+FFFC and return them as output `images`. A step with `prompt:` sets it itself.
    """

    template: str
    output_chars_max: int = 100_000
    render_max_ms: float = 200.0
    images: bool = False


class Template(BatchNode):
    """Renders a template for each item."""

    Config: ClassVar[type[Any]] = TemplateConfig
    batch_default: ClassVar[tuple[int, float]] = (8, 0.0)

    _sandbox: Sandbox
    _template: Any

    @classmethod
    def ports(cls, config: TemplateConfig, step: StepContext) -> Ports:
        if config.output_chars_max < 1 or config.render_max_ms <= 0:
            option = "output_chars_max" if config.output_chars_max < 1 else "render_max_ms"
            raise ConfigError(option, f"{getattr(config, option)}", "a number above 0")
        _check_names(config.template, step.wired)
        inputs = tuple(port(name, "any") for name in step.wired)
        images = (port("images", "list[image]", about="the pictures that the text shows, in order"),)
        outputs = (port("text", "text", about="the rendered text"), *(images if config.images else ()))
        return Ports(inputs=inputs, outputs=outputs)

    @classmethod
    def light_output_bytes(cls, config: TemplateConfig) -> int | None:
        return None if config.images else CHAR_BYTES_MAX * config.output_chars_max

    def open(self, context: OpenContext) -> None:
        from weftline.nodes.template_sandbox import Sandbox

        self._sandbox = Sandbox()
        try:
            self._template, _ = self._sandbox.prepared(self.config.template)
        except ValueError as error:
            raise ConfigError("template", str(error)) from None

    def run(self, batch: Batch) -> Outputs:
        rows = [{name: batch[name][position] for name in batch.ports} for position in range(len(batch))]
        if not self.config.images:
            return {"text": [self._try_render(row) for row in rows]}
        shown = [self._try_show(row) for row in rows]
        return {
            "text": [one if isinstance(one, StepError) else one[0] for one in shown],
            "images": [one if isinstance(one, StepError) else one[1] for one in shown],
        }

    def _try_show(self, inputs: Mapping[str, Any]) -> tuple[str, list[np.ndarray]] | StepError:
        """Return the rendered text of an item with U+FFFC for each picture, and these."""
        pictures = Pictures()
        text = self._try_render({name: pictures.mark(value) for name, value in inputs.items()})
        return text if isinstance(text, StepError) else pictures.taken(text)

    def _try_render(self, inputs: Mapping[str, Any]) -> str | StepError:
        from jinja2.exceptions import TemplateError

        from weftline.nodes.template_sandbox import Overrun

        config = self.config
        try:
            values = variables(inputs)
            return self._sandbox.generate(self._template, values, config.output_chars_max, config.render_max_ms)
        except Overrun as error:
            return StepError(f"the template makes {error}" if "limit" not in str(error) else f"the template: {error}")
        except (TemplateError, TypeError, ValueError, KeyError, LookupError, ArithmeticError, RecursionError) as error:
            return StepError(f"the template failed: {str(error) or type(error).__name__:.300}")


class Pictures:
    """Pictures of one rendering. Each is a mark in the template, which no other value can contain."""

    def __init__(self) -> None:
        self._start = f"{PICTURE}{secrets.randbelow(10**18):018d}."
        self._pictures: list[np.ndarray] = []

    def mark(self, value: Any) -> Any:
        """Return the marks of a picture or a list of pictures; other values as they are."""
        from weftline.nodes.template_sandbox import Marks

        if isinstance(value, list) and value and all(map(_is_picture, value)):
            return Marks([self.mark(one) for one in value])
        if not _is_picture(value):
            return value
        self._pictures.append(value)
        return f"{self._start}{len(self._pictures) - 1};"

    def taken(self, text: str) -> tuple[str, list[np.ndarray]]:
        """Return a rendered text with U+FFFC at each mark and nowhere else, and the pictures in this order."""
        parts = re.split(f"{self._start}([0-9]+);", text)
        found = [self._pictures[int(place)] for place in parts[1::2]]
        return PICTURE.join(part.replace(PICTURE, "") for part in parts[::2]), found


def _is_picture(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3 and value.shape[2] == 3


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
