"""A server of the v2 protocol with programmed failures: a stock gRPC server with canned answers.

with flaky() as server:
    server.refusals = [Refuse("UNAVAILABLE", pushback_ms="5")]     # then it answers
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

pb: Any = service_pb2


@dataclass(frozen=True)
class Refuse:
    status: str
    message: str = "not now"
    pushback_ms: str | None = None


@dataclass
class Flaky:
    """refusals: of the next calls of infer, one each; always: of all calls once they are used up.

    type: of input and output `x`; '': what a server says that knows no types.
    seen: every infer request. dies_after: a stream ends UNAVAILABLE after so many pieces.
    """

    url: str = ""
    refusals: list[Refuse] = field(default_factory=list)
    always: Refuse | None = None
    seen: list[Any] = field(default_factory=list)
    pieces: tuple[str, ...] = ("one ", "two ", "three")
    dies_after: int = -1
    error_message: str = ""
    version: str = "1"
    described: int = 0
    datatype: str = "BYTES"
    type: str = "text"
    answer: bytes | None = None
    metadata: list[dict[str, str]] = field(default_factory=list)

    def refuse(self, context: Any) -> None:
        refusal = self.refusals.pop(0) if self.refusals else self.always
        if refusal is None:
            return
        if refusal.pushback_ms is not None:
            context.set_trailing_metadata((("grpc-retry-pushback-ms", refusal.pushback_ms),))
        context.abort(grpc.StatusCode[refusal.status], refusal.message)

    def infer(self, data: bytes, context: Any) -> bytes:
        request = pb.ModelInferRequest.FromString(data)
        self.seen.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.refuse(context)
        if self.answer is not None:
            return self.answer
        response = pb.ModelInferResponse(model_name=request.model_name, model_version=self.version, id=request.id)
        for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
            response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            response.raw_output_contents.append(raw)
        return bytes(response.SerializeToString())

    def stream(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        for data in requests:
            self.seen.append(pb.ModelInferRequest.FromString(data))
            self.refuse(context)
            for place, piece in enumerate(self.pieces):
                if place == self.dies_after:
                    context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
                raw = len(piece).to_bytes(4, "little") + piece.encode()
                response = pb.ModelStreamInferResponse(error_message=self.error_message)
                inside = response.infer_response
                inside.model_version = self.version
                inside.outputs.add(name="x", datatype="BYTES", shape=[1])
                inside.raw_output_contents.append(raw)
                inside.parameters["triton_final_response"].bool_param = place == len(self.pieces) - 1
                yield bytes(response.SerializeToString())

    def meta(self, data: bytes, context: Any) -> bytes:
        self.described += 1
        port = {"name": "x", "datatype": self.datatype, "shape": [-1]}
        answer = pb.ModelMetadataResponse(name="m", versions=[self.version], inputs=[port], outputs=[port])
        return bytes(answer.SerializeToString())

    def config(self, data: bytes, context: Any) -> bytes:
        answer = pb.ModelConfigResponse()
        answer.config.model_transaction_policy.decoupled = True
        for key in ("input:x", "output:x"):
            answer.config.parameters[key].string_value = self.type
        return bytes(answer.SerializeToString())


@contextmanager
def flaky() -> Iterator[Flaky]:
    one = Flaky()
    methods = {
        "ModelInfer": grpc.unary_unary_rpc_method_handler(one.infer),
        "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(one.stream),
        "ModelMetadata": grpc.unary_unary_rpc_method_handler(one.meta),
        "ModelConfig": grpc.unary_unary_rpc_method_handler(one.config),
    }
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("inference.GRPCInferenceService", methods)])
    one.url = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield one
    finally:
        server.stop(0)
