"""Start parameters of an ingress process: addresses and configuration, as bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from weftline.engine.serving.config import ServeConfig

GRPC, HTTP = "grpc", "http"
"""The doors there are."""


@dataclass(frozen=True, slots=True)
class IngressSpec:
    """One ingress process.

    name:   for logs.
    doors:  which to open, each as `config` says.
    config: the whole of it; files it names are read by the ingress process itself.
    """

    name: str
    doors: tuple[str, ...]
    config: ServeConfig

    def at(self, ports: dict[str, int]) -> IngressSpec:
        """Return the same with its doors at these ports: one that was restarted is where it was."""
        config = self.config
        if GRPC in ports:
            config = replace(config, grpc=replace(config.grpc, port=ports[GRPC]))
        if HTTP in ports and config.http is not None:
            config = replace(config, http=replace(config.http, port=ports[HTTP]))
        return replace(self, config=config)


def frame_bytes_max(config: ServeConfig) -> int:
    """Return the longest message that an ingress process may send: a request whose inputs found no room elsewhere."""
    return 2 * config.limits.message_bytes_max + (16 << 20)


def encode_spec(spec: IngressSpec) -> bytes:
    return msgspec.msgpack.encode(spec, enc_hook=_written)


def decode_spec(data: bytes) -> IngressSpec:
    """Return what `encode_spec` wrote; msgspec's errors for anything else."""
    return msgspec.msgpack.decode(data, type=IngressSpec, dec_hook=_read)


def _written(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.absolute())  # it is read in a process that may stand elsewhere
    raise NotImplementedError(f"a {type(value).__name__} in a configuration")


def _read(type: type[Any], value: Any) -> Any:
    if type is Path:
        return Path(value)
    raise NotImplementedError(f"a {type.__name__} in a configuration")
