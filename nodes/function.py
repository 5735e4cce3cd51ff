"""A user's own Python function as a step.

Its ports are read from its annotations, out of the source text: checking a pipeline imports nothing of the user's.

    def crop(image: "image", box: list, margin: int = 4) -> "image": ...       # margin may be left unwired
    def split(text: str) -> {"first": "text", "rest": "text"}: ...             # two outputs
    def scale(x: Annotated[np.ndarray, "float32[C, 32, 32]"]) -> "float32[C, 32, 32]": ...

A class works too: it is made once, when the node opens, and its `__call__` is the function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from weftline.errors import ModelError, StepError
from weftline.nodes.annotations import SINGLE, read_ports
from weftline.nodes.contract import Batch, BatchNode, OpenContext, Outputs, StepContext
from weftline.nodes.ports import Port, Ports
from weftline.nodes.user_code import definition, load, locate
from weftline.nodes.values import describe, mismatch


@dataclass(frozen=True, slots=True)
class FunctionConfig:
    """Options of `function`.

    function: what to call: 'file.py:name' relative to the pipeline file, or 'package.module:name'.
    batched:  the function takes a list for every parameter, one value per item, and returns a list (or, with several
              outputs, a dict of lists). Otherwise it is called item by item, and one item's exception fails it alone.
    """

    function: str
    batched: bool = False


class Function(BatchNode):
    """Calls a Python function of the user's."""

    Config: ClassVar[type[Any]] = FunctionConfig
    batch_default: ClassVar[tuple[int, float]] = (8, 0.0)

    _call: Callable[..., Any]
    _outputs: tuple[Port, ...]

    @classmethod
    def ports(cls, config: FunctionConfig, step: StepContext) -> Ports:
        source = locate(config.function, step.base_dir, "function")
        return read_ports(definition(source, "function"), source.path.name, "function")

    def open(self, context: OpenContext) -> None:
        self._outputs = self.ports(self.config, StepContext(context.base_dir)).outputs
        found = load(self.config.function, context.base_dir, "function")
        try:
            call = found() if isinstance(found, type) else found
        except Exception as error:
            raise ModelError(f"{self.config.function}() failed: {type(error).__name__}: {error}") from error
        if not callable(call):
            raise ModelError(f"{self.config.function} cannot be called")
        self._call = call

    def run(self, batch: Batch) -> Outputs:
        if self.config.batched:
            return self._together(self._call(**{name: list(batch[name]) for name in batch.ports}), len(batch))
        answers = [self._alone({name: batch[name][place] for name in batch.ports}) for place in range(len(batch))]
        return {
            port.name: [answer if isinstance(answer, Exception) else answer[place] for answer in answers]
            for place, port in enumerate(self._outputs)
        }

    def _alone(self, inputs: Mapping[str, Any]) -> list[Any] | Exception:
        """Return one item's checked value for each output port, in port order, or why it failed."""
        try:
            answer = self._by_name(self._call(**inputs))
            return [_checked(port, answer[port.name]) for port in self._outputs]
        except Exception as error:
            return error

    def _together(self, answer: Any, items: int) -> Outputs:
        lists = self._by_name(answer)
        for name, values in lists.items():
            if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__") or len(values) != items:
                raise StepError(f"the function was given {items} items; its answer for {name} is no list of {items}")
        return {port.name: [_tried(port, value) for value in lists[port.name]] for port in self._outputs}

    def _by_name(self, answer: Any) -> Mapping[str, Any]:
        """Return the function's answer as a mapping of output port to value."""
        wanted = [port.name for port in self._outputs]
        if wanted == [SINGLE]:
            return {SINGLE: answer}
        if not isinstance(answer, Mapping) or set(answer) != set(wanted):
            found = f"a dict of {sorted(map(str, answer))}" if isinstance(answer, Mapping) else describe(answer)
            raise StepError(f"the function returned {found}; its annotation promises a dict of {wanted}")
        return answer


def _checked(port: Port, value: Any) -> Any:
    wrong = mismatch(port.type, value)
    if wrong:
        raise StepError(f"the function's {port.name} {wrong}")
    return value


def _tried(port: Port, value: Any) -> Any:
    if isinstance(value, Exception):
        return value
    try:
        return _checked(port, value)
    except StepError as error:
        return error
