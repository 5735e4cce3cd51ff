"""Decode the responses of a stream into outputs. Pure.

A Weftline server sends only what is new: text as it grows, other outputs once they are finished. The text is joined
here, so that a stream ends as `Session.stream` does: with every output whole, `last` set.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weftline.engine.client.decoder import Garbled, value_of
from weftline.engine.client.described import DescribedModel, DescribedPort
from weftline.engine.client.refusal import RETRY_AFTER, Refusal, Refused
from weftline.engine.result import StreamedOutput
from weftline.engine.serving.v2.messages import STATUS
from weftline.engine.serving.v2.protobuf import parse_stream_response
from weftline.errors import InputError

FINAL = "triton_final_response"
RETRY_MS = RETRY_AFTER.replace("-", "_")


class Pieces:
    """The outputs of one stream."""

    def __init__(self, model: DescribedModel) -> None:
        self._model = model
        self._grown: dict[str, list[Any]] = {}
        self.version = ""

    def take(self, data: bytes) -> Iterator[StreamedOutput]:
        """Yield the outputs of one response; Refused for a response with an error, Garbled for an invalid one."""
        try:
            wrong, response = parse_stream_response(data)
        except InputError as error:  # which is the server's here
            raise Garbled(f"the answer cannot be read: {error}") from None
        parameters = response.parameters
        if wrong:
            pushback = parameters.get(RETRY_MS)
            status = parameters.get(STATUS) or ("RESOURCE_EXHAUSTED" if pushback else "UNKNOWN")
            raise Refused(Refusal(str(status), wrong, float(pushback) if type(pushback) is int else None))
        self.version = response.version
        for tensor in response.outputs:
            port = self._model.outputs.get(tensor.name)
            value, grows = value_of(tensor, port), self._grows(port)
            if grows:
                self._grown.setdefault(tensor.name, []).append(value)
            yield StreamedOutput(tensor.name, value, not grows)
        if parameters.get(FINAL):
            for name, parts in self._grown.items():
                if all(isinstance(one, str) for one in parts):
                    yield StreamedOutput(name, "".join(parts), True)

    def _grows(self, port: DescribedPort | None) -> bool:
        """Return True if responses carry parts of this output; without that metadata, text outputs do."""
        if port is None or not self._model.streams:
            return False
        return port.pieces or (not self._model.says_pieces and (port.type is None or port.type.kind == "text"))
