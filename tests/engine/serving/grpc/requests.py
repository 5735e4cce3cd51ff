"""Requests for the gRPC server: tensors for the stock client, and raw messages for a bare channel."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2

METHOD = "/inference.GRPCInferenceService/"


def tensor(name: str, array: Any, datatype: str) -> Any:
    """Return an input with these values."""
    one = triton.InferInput(name, list(array.shape), datatype)
    one.set_data_from_numpy(array)
    return one


def numbers(values: Any, name: str = "x") -> Any:
    return tensor(name, np.asarray(values, np.uint8), "UINT8")


def text(value: str, name: str = "text") -> Any:
    return tensor(name, np.array([value.encode()], np.object_), "BYTES")


def request(model: str = "echo", values: bytes = b"\1\2\3", id: str = "", name: str = "x") -> Any:
    """Return a ModelInferRequest of one UINT8 tensor."""
    message: Any = service_pb2.ModelInferRequest(model_name=model, id=id)  # type: ignore[attr-defined]
    message.inputs.add(name=name, datatype="UINT8", shape=[len(values)])
    message.raw_input_contents.append(values)
    return message


def text_request(model: str, value: str, id: str = "", name: str = "text", **parameters: Any) -> Any:
    """Return a ModelInferRequest of one text."""
    message: Any = service_pb2.ModelInferRequest(model_name=model, id=id)  # type: ignore[attr-defined]
    message.inputs.add(name=name, datatype="BYTES", shape=[1])
    message.raw_input_contents.append(len(value.encode()).to_bytes(4, "little") + value.encode())
    for key, given in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(given)]
        setattr(message.parameters[key], kind, given)
    return message


def call_bytes(address: str, data: bytes, method: str = "ModelInfer", **options: Any) -> bytes:
    """Send raw bytes to a unary method."""
    with grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)]) as channel:
        answer: bytes = channel.unary_unary(METHOD + method)(data, timeout=60, **options)
        return answer


def wait_until(condition: Callable[[], bool], within_s: float = 10.0) -> float:
    """Wait until a condition holds, and return how long that took, in seconds."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < within_s, "it did not come to that in time"
        time.sleep(0.005)
    return time.monotonic() - started
