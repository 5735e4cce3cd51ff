"""A served model as its server describes it: ports with v2's datatypes and, from a Weftline server, their true types.

v2's metadata knows datatypes and shapes only, so a Weftline server writes the type of each port into the parameters of
the model's configuration. Without them, as from Triton, values go by datatype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weftline.engine.ingress.v2.metadata import INPUT, OUTPUT, PIECES
from weftline.errors import InputError
from weftline.nodes.ports import PortType


@dataclass(frozen=True, slots=True)
class DescribedPort:
    """One input or output.

    datatype: v2's: BYTES, FP32, ...
    shape:    of one value, without a batch dimension; -1 for what may vary.
    type:     what it is to a Weftline server; None: not known, and the datatype is all there is.
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

    streams:     it may answer a request with several responses.
    says_pieces: its outputs' `pieces` are known.
    """

    name: str
    version: str
    inputs: Mapping[str, DescribedPort]
    outputs: Mapping[str, DescribedPort]
    streams: bool = False
    says_pieces: bool = False

    def check_inputs(self, given: Mapping[str, Any]) -> None:
        """Raise InputError when inputs are unknown, or missing."""
        unknown = sorted(given.keys() - self.inputs.keys())
        missing = [name for name, port in self.inputs.items() if not port.optional and name not in given]
        if unknown or missing:
            told = [f"unknown: {', '.join(unknown)}"] if unknown else []
            told += [f"missing: {', '.join(missing)}"] if missing else []
            known = ", ".join(
                f"{name} ({port}{', may be left out' if port.optional else ''})" for name, port in self.inputs.items()
            )
            raise InputError(f"inputs {'; '.join(told)}; the inputs of {self.name} are {known or 'none'}")

    def check_outputs(self, wanted: Any) -> tuple[str, ...]:
        """Return the names of the wanted outputs, () for all; InputError names what the model does not have."""
        if wanted is None:
            return ()
        if isinstance(wanted, str) or not all(isinstance(name, str) for name in wanted):
            raise InputError("outputs: expected a list of names")
        names = tuple(dict.fromkeys(wanted))
        unknown = [name for name in names if name not in self.outputs]
        if unknown or not names:
            known = ", ".join(self.outputs)
            raise InputError(f"no output is called {', '.join(unknown) or 'nothing'}; outputs: {known}")
        return names


def described(name: str, metadata: Any, config: Any) -> DescribedModel:
    """Return the model called `name` in a ModelMetadataResponse and the ModelConfig that belongs to it."""
    types = {key: one.string_value for key, one in config.parameters.items()}
    optional = {one.name for one in config.input if one.optional}
    return DescribedModel(
        name,
        metadata.versions[-1] if metadata.versions else "",
        {one.name: _port(one, INPUT, types, one.name in optional) for one in metadata.inputs},
        {one.name: _port(one, OUTPUT, types, False) for one in metadata.outputs},
        config.model_transaction_policy.decoupled,
        any(key.startswith(PIECES) for key in types),
    )


def _port(tensor: Any, side: str, types: Mapping[str, str], optional: bool) -> DescribedPort:
    written = types.get(side + tensor.name, "")
    try:
        known = PortType.parse(written) if written else None
    except ValueError:  # a type that a later version may have: what v2 says of it still holds
        known = None
    pieces = types.get(PIECES + tensor.name) == "true"
    return DescribedPort(tensor.name, tensor.datatype, tuple(tensor.shape), known, optional, pieces)
