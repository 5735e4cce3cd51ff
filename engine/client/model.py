"""Description of a served model: ports with v2 datatypes and port types.

v2 metadata has datatypes and shapes only, so a Weftline server writes the type of each port into the parameters of the
model's configuration. Without them, as from Triton, values are encoded by datatype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weftline.engine.request import options_hint
from weftline.engine.serving.v2.metadata import INPUT, OUTPUT, PIECES, PLATFORM
from weftline.errors import InputError
from weftline.nodes.ports import PortType


@dataclass(frozen=True, slots=True)
class DescribedPort:
    """One input or output.

    datatype: v2's: BYTES, FP32, ...
    shape:    of one value, without a batch dimension; -1 for a variable dimension.
    type:     port type on a Weftline server; None: unknown, only the datatype is.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    type: PortType | None = None
    optional: bool = False
    pieces: bool = False

    def __str__(self) -> str:
        return str(self.type) if self.type else f"{self.datatype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """A model's ports by name, as of `version`.

    streams:     True if a request may have several responses.
    reports_streaming: True if `pieces` of its outputs is known.
    """

    name: str
    version: str
    inputs: Mapping[str, DescribedPort]
    outputs: Mapping[str, DescribedPort]
    streams: bool = False
    reports_streaming: bool = False

    def check_inputs(self, given: Mapping[str, Any]) -> None:
        """Raise InputError if inputs are unknown or missing."""
        unknown = sorted(given.keys() - self.inputs.keys())
        missing = [name for name, port in self.inputs.items() if not port.optional and name not in given]
        if unknown or missing:
            problems = [f"unknown: {', '.join(unknown)}"] if unknown else []
            problems += [f"missing: {', '.join(missing)}"] if missing else []
            known = ", ".join(
                f"{name} ({port}{', may be left out' if port.optional else ''})" for name, port in self.inputs.items()
            )
            raise InputError(
                f"inputs {'; '.join(problems)}; the inputs of {self.name} are {known or 'none'}{options_hint(unknown)}"
            )

    def check_outputs(self, wanted: tuple[str, ...] | None) -> tuple[str, ...]:
        """Return the names of the wanted outputs, () for all; InputError for unknown ones."""
        if wanted is None:
            return ()
        names = tuple(dict.fromkeys(wanted))
        unknown = [name for name in names if name not in self.outputs]
        if unknown or not names:
            known = ", ".join(self.outputs)
            raise InputError(f"no output is called {', '.join(unknown) or 'nothing'}; outputs: {known}")
        return names


def described(name: str, metadata: Any, config: Any) -> DescribedModel:
    """Return a model's description from its ModelMetadataResponse and ModelConfig."""
    types = {key: one.string_value for key, one in config.parameters.items()}
    optional = {one.name for one in config.input if one.optional}
    batched = config.platform == PLATFORM and config.max_batch_size > 0  # values are sent without a batch dimension
    return DescribedModel(
        name,
        metadata.versions[-1] if metadata.versions else "",
        {one.name: _port(one, INPUT, types, one.name in optional, batched) for one in metadata.inputs},
        {one.name: _port(one, OUTPUT, types, False, batched) for one in metadata.outputs},
        config.model_transaction_policy.decoupled,
        any(key.startswith(PIECES) for key in types),
    )


def _port(tensor: Any, side: str, types: Mapping[str, str], optional: bool, batched: bool) -> DescribedPort:
    written = types.get(side + tensor.name, "")
    try:
        known = PortType.parse(written) if written else None
    except ValueError:  # a type of a later version: its datatype and shape are still valid
        known = None
    pieces = types.get(PIECES + tensor.name) == "true"
    return DescribedPort(tensor.name, tensor.datatype, tuple(tensor.shape)[batched:], known, optional, pieces)
