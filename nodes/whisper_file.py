"""Whisper checkpoints, by path or by openai-whisper's names, checked before a network is built from them."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weftline.errors import ModelError
from weftline.nodes.contract import OpenContext
from weftline.nodes.model_file import find_model
from weftline.nodes.weights import check_state, load_into, load_torch

KNOWN = (
    "tiny.en", "tiny", "base.en", "base", "small.en", "small", "medium.en", "medium", "large-v1", "large-v2",
    "large-v3", "large", "large-v3-turbo", "turbo",
)  # fmt: skip
"""openai-whisper's names for its published checkpoints."""

PUBLISHED_TEXT_CONTEXT = 448
"""Text context of all published checkpoints, in tokens: their dims.n_text_ctx."""

CONNECT_MAX_S = 10.0
"""Longest wait for the server of the published checkpoints before it counts as unreachable."""

VOCABULARY_MIN = 51_864
"""Tokens of the English-only vocabulary, the smaller of the two that openai-whisper can decode."""

_RANGES = {
    "n_mels": (80, 128), "n_audio_ctx": (16, 1 << 16), "n_audio_state": (8, 8192), "n_audio_head": (1, 256),
    "n_audio_layer": (1, 256), "n_vocab": (VOCABULARY_MIN, 1 << 20), "n_text_ctx": (16, 1 << 16),
    "n_text_state": (8, 8192), "n_text_head": (1, 256), "n_text_layer": (1, 256),
}  # fmt: skip
"""Sensible values of a checkpoint's dims; large-v3 has 1280 states, 32 layers, 20 heads."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a checkpoint lies, its name in errors, and openai-whisper's name if it is a published one."""

    path: Path
    shown: str
    published: str = ""


def load_whisper(model: str, context: OpenContext) -> Any:
    """Return a whisper.model.Whisper on the context's device; ModelError says what is wrong with the checkpoint."""
    from whisper import _ALIGNMENT_HEADS
    from whisper.model import ModelDimensions
    from whisper.model import Whisper as Network

    found = _locate(model, context)
    context.progress("reading weights", 0.2)
    checkpoint = load_torch(found.path, found.shown)
    if not isinstance(checkpoint, dict) or not {"dims", "model_state_dict"} <= checkpoint.keys():
        raise ModelError(f"{found.shown} is no Whisper checkpoint: it has no dims or no model_state_dict")
    dims, state = checkpoint["dims"], checkpoint["model_state_dict"]
    check_state(state, found.shown)
    _check_dims(dims, state, found.shown)
    network = Network(ModelDimensions(**dims))
    load_into(network, state, found.shown)
    if found.published:
        network.set_alignment_heads(_ALIGNMENT_HEADS[found.published])
    context.progress("moving weights", 0.8)
    if context.framework_device.startswith("cuda"):
        halve(network)
    return network.to(context.framework_device).eval()


def halve(network: Any) -> None:
    """Keep the weights in float16 that a float16 call would round at every use: the same numbers from half the memory.

    The other layers compute in float32 whatever they are given.
    """
    from whisper.model import Conv1d, Linear

    for module in network.modules():
        if isinstance(module, Linear | Conv1d):
            module.half()


def _locate(model: str, context: OpenContext) -> Checkpoint:
    path = find_model(model, context.base_dir)
    if path is None:
        return Checkpoint(_fetch(model, context), model, model)
    if path.is_dir():
        if not (path / "model.pt").is_file():
            raise ModelError(f"the folder {model} has no model.pt")
        path = path / "model.pt"
    return Checkpoint(path, model)


def _fetch(name: str, context: OpenContext) -> Path:
    """Return a published checkpoint's file from openai-whisper's cache; it downloads and checks what is not there."""
    import whisper

    if name not in whisper._MODELS:
        raise ModelError(f"there is no file {name}, and it is no name that openai-whisper knows: {', '.join(KNOWN)}")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "whisper"  # where openai-whisper looks
    context.progress(f"fetching {name}", 0.0)
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(CONNECT_MAX_S)
    try:
        return Path(str(whisper._download(whisper._MODELS[name], str(cache), False)))
    except Exception as error:  # urllib, ssl, sockets and openai-whisper itself each have their own
        fix = f"put {name}.pt where the pipeline can name it, model: path/to/{name}.pt"
        reason = getattr(error, "reason", None) or error
        raise ModelError(
            f"{name} is not in openai-whisper's cache and cannot be fetched: {reason}\n    fix: {fix}"
        ) from None
    finally:
        socket.setdefaulttimeout(before)


def _check_dims(dims: Any, state: dict[str, Any], shown: str) -> None:
    """Raise ModelError unless `dims` are sensible and agree with the weights: a network is allocated from them."""
    if not isinstance(dims, dict) or set(dims) != set(_RANGES):
        raise ModelError(f"{shown} is no Whisper checkpoint: its dims are not {', '.join(_RANGES)}")
    for name, (low, high) in _RANGES.items():
        if type(dims[name]) is not int or not low <= dims[name] <= high:
            raise ModelError(f"{shown}: {name} is {dims[name]!r:.40}, expected from {low} to {high}")
    layers = {
        side: len({key.split(".")[2] for key in state if key.startswith(f"{side}.blocks.")})
        for side in ("encoder", "decoder")
    }
    wanted = {
        "encoder.positional_embedding": (dims["n_audio_ctx"], dims["n_audio_state"]),
        "decoder.positional_embedding": (dims["n_text_ctx"], dims["n_text_state"]),
        "decoder.token_embedding.weight": (dims["n_vocab"], dims["n_text_state"]),
    }
    wrong = [name for name, shape in wanted.items() if name not in state or tuple(state[name].shape) != shape]
    if wrong or layers != {"encoder": dims["n_audio_layer"], "decoder": dims["n_text_layer"]}:
        raise ModelError(
            f"{shown}: its weights are not of the sizes its dims claim ({wrong[0] if wrong else 'layers'})"
        )
    if (
        dims["n_mels"] not in (80, 128)
        or dims["n_audio_state"] % dims["n_audio_head"]
        or dims["n_text_state"] % dims["n_text_head"]
    ):
        raise ModelError(f"{shown}: its dims do not divide into heads, or n_mels is neither 80 nor 128")
