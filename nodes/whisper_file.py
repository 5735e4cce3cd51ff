"""Whisper checkpoints, located by path or name and validated before use."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weftline.errors import ModelError
from weftline.nodes.contract import ConfigError, OpenContext, model_error
from weftline.nodes.hugging_face import find_weights, read_json
from weftline.nodes.model_file import check_state, check_torch_zip, find_model, load_into, load_torch, load_weights

KNOWN = (
    "tiny.en", "tiny", "base.en", "base", "small.en", "small", "medium.en", "medium", "large-v1", "large-v2",
    "large-v3", "large", "large-v3-turbo", "turbo",
)  # fmt: skip
"""openai-whisper's names for its published checkpoints."""

LANGUAGES = (
    "en", "zh", "de", "es", "ru", "ko", "fr", "ja", "pt", "tr", "pl", "ca", "nl", "ar", "sv", "it", "id", "hi", "fi",
    "vi", "he", "uk", "el", "ms", "cs", "ro", "da", "hu", "ta", "no", "th", "ur", "hr", "bg", "lt", "la", "mi", "ml",
    "cy", "sk", "te", "fa", "lv", "bn", "sr", "az", "sl", "kn", "et", "mk", "br", "eu", "is", "hy", "ne", "mn", "bs",
    "kk", "sq", "sw", "gl", "mr", "pa", "si", "km", "sn", "yo", "so", "af", "oc", "ka", "be", "tg", "sd", "gu", "am",
    "yi", "lo", "uz", "fo", "ht", "ps", "tk", "nn", "mt", "sa", "lb", "my", "bo", "tl", "mg", "as", "tt", "haw",
    "ln", "ha", "ba", "jw", "su", "yue",
)  # fmt: skip
"""Codes of Whisper's languages in the order of their tokens. Models before large-v3 lack the last one."""

PUBLISHED_TEXT_CONTEXT = 448
"""Text context of all published checkpoints, in tokens: their dims.n_text_ctx."""

CONNECT_MAX_S = 10.0
"""Longest wait for the server of the published checkpoints before it counts as unreachable."""

VOCABULARY_MIN = 51_864
"""Tokens of the English-only vocabulary, the smaller of the two that openai-whisper can decode."""

VOCABULARIES = (51_864, 51_865, 51_866)
"""Sizes of the vocabularies that openai-whisper's tokenizers have: English, multilingual, and large-v3's."""

OWN_DIMS = {
    "n_mels": "num_mel_bins", "n_audio_ctx": "max_source_positions", "n_audio_state": "d_model",
    "n_audio_head": "encoder_attention_heads", "n_audio_layer": "encoder_layers", "n_vocab": "vocab_size",
    "n_text_ctx": "max_target_positions", "n_text_state": "d_model", "n_text_head": "decoder_attention_heads",
    "n_text_layer": "decoder_layers",
}  # fmt: skip
"""openai-whisper's dims, and the keys of Hugging Face's config.json that hold them."""

OWN_NAMES = tuple(
    (re.compile(pattern), own)
    for pattern, own in (
        (r"^model\.", ""), (r"\.layers\.", ".blocks."), (r"\.self_attn\.", ".attn."),
        (r"\.encoder_attn\.", ".cross_attn."), (r"\.q_proj\.", ".query."), (r"\.k_proj\.", ".key."),
        (r"\.v_proj\.", ".value."), (r"\.out_proj\.", ".out."), (r"\.self_attn_layer_norm\.", ".attn_ln."),
        (r"\.encoder_attn_layer_norm\.", ".cross_attn_ln."), (r"\.final_layer_norm\.", ".mlp_ln."),
        (r"\.fc1\.", ".mlp.0."), (r"\.fc2\.", ".mlp.2."), (r"^encoder\.layer_norm\.", "encoder.ln_post."),
        (r"^decoder\.layer_norm\.", "decoder.ln."), (r"\.embed_tokens\.", ".token_embedding."),
        (r"\.embed_positions\.weight$", ".positional_embedding"),
    )
)  # fmt: skip
"""From the names of Hugging Face's tensors to those of openai-whisper's, in this order."""

RANGES = {
    "n_mels": (80, 128), "n_audio_ctx": (16, 1 << 16), "n_audio_state": (8, 8192), "n_audio_head": (1, 256),
    "n_audio_layer": (1, 256), "n_vocab": (VOCABULARY_MIN, 1 << 20), "n_text_ctx": (16, 1 << 16),
    "n_text_state": (8, 8192), "n_text_head": (1, 256), "n_text_layer": (1, 256),
}  # fmt: skip
"""Sensible values of a checkpoint's dims; large-v3 has 1280 states, 32 layers, 20 heads."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Location of a checkpoint, its name in errors, and openai-whisper's name if it is a published one."""

    path: Path
    shown: str
    published: str = ""


def load_whisper(model: str, context: OpenContext, float16: bool) -> Any:
    """Return a whisper.model.Whisper on the context's device; raise ModelError for an invalid checkpoint.

    float16: it will be called in float16, and its weights are kept accordingly.
    """
    from whisper import _ALIGNMENT_HEADS
    from whisper.model import ModelDimensions
    from whisper.model import Whisper as Network

    found = _locate(model, context)
    context.progress("reading weights", 0.2)
    checkpoint = _converted(found.path, found.shown) if found.path.is_dir() else load_torch(found.path, found.shown)
    if not isinstance(checkpoint, dict) or not {"dims", "model_state_dict"} <= checkpoint.keys():
        raise ModelError(f"{found.shown} is no Whisper checkpoint: it has no dims or no model_state_dict")
    dims, state = checkpoint["dims"], checkpoint["model_state_dict"]
    check_state(state, found.shown)
    _check_dims(dims, state, found.shown)
    network = Network(ModelDimensions(**dims))
    load_into(network, state, found.shown)
    if found.published:
        network.set_alignment_heads(_ALIGNMENT_HEADS[found.published])
    elif found.path.is_dir():
        _set_heads(network, _alignment_heads(found.path, found.shown))
    context.progress("moving weights", 0.8)
    if float16:
        halve(network)
    return network.to(context.framework_device).eval()


def check_whisper(path: Path, shown: str) -> None:
    """Raise ConfigError when a file or folder is no checkpoint that `load_whisper` reads, by the names of its files."""
    if path.is_dir():
        is_converted(path, shown)
        return
    try:
        check_torch_zip(path, shown)
    except ModelError:
        expected = "a checkpoint of openai-whisper (.pt), or a folder with model.pt or config.json and *.safetensors"
        fix = "name its folder" if path.suffix == ".safetensors" else ""
        raise ConfigError("model", f"{shown} is no torch checkpoint", expected, fix) from None


def english_only(path: Path | None, model: str) -> bool:
    """Return whether a model is known to be English-only before it is read; a .pt file shows it only when opened.

    path: its file or folder; None: one of KNOWN.
    """
    if path is None:
        return model.endswith(".en")
    config = read_json(path / "config.json", f"{model}/config.json") if path.is_dir() else None
    return isinstance(config, dict) and config.get("vocab_size") == VOCABULARY_MIN


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
        try:
            return Checkpoint(path if is_converted(path, model) else path / "model.pt", model)
        except ConfigError as error:
            raise model_error(error) from None
    return Checkpoint(path, model)


def is_converted(folder: Path, shown: str) -> bool:
    """Return whether a folder is Hugging Face's form of Whisper, False for model.pt; ConfigError when it is neither."""
    if (folder / "model.pt").is_file():
        return False
    config = read_json(folder / "config.json", f"{shown}/config.json")
    expected = "model.pt of openai-whisper, or Whisper in Hugging Face's form: config.json and *.safetensors"
    if not isinstance(config, dict):
        raise ConfigError("model", f"the folder {shown} has no model.pt and no config.json", expected)
    if config.get("model_type") != "whisper":
        kind = f"config.json of a {config['model_type']}" if "model_type" in config else "a config.json of no Whisper"
        raise ConfigError("model", f"the folder {shown} has {kind:.80}", expected, "name a Whisper model")
    if config.get("vocab_size") not in VOCABULARIES:
        found = f"vocab_size in {shown}/config.json is {config.get('vocab_size')!r:.40}"
        raise ConfigError("model", found, f"one of Whisper's own: {', '.join(map(str, VOCABULARIES))}")
    if config.get("activation_function", "gelu") != "gelu":
        raise ConfigError("model", f"activation_function in {shown}/config.json is no gelu", "gelu")
    _alignment_heads(folder, shown)
    find_weights(folder, shown, "WhisperForConditionalGeneration")
    return True


def _alignment_heads(folder: Path, shown: str) -> list[list[int]]:
    """Return [layer, head] of each attention head that aligns words, from generation_config.json; [] if it has none.

    ConfigError: they are not heads of the model.
    """
    file = "generation_config.json"
    settings = read_json(folder / file, f"{shown}/{file}")
    heads = settings.get("alignment_heads") if isinstance(settings, dict) else None
    if heads is None:
        return []
    config = read_json(folder / "config.json", f"{shown}/config.json") or {}
    most = [config.get("decoder_layers"), config.get("decoder_attention_heads")]
    if not isinstance(heads, list) or not heads or not all(is_head(head, most) for head in heads):
        expected = f"pairs of a layer below {most[0]} and a head below {most[1]}"
        raise ConfigError("model", f"alignment_heads in {shown}/{file} are {heads!r:.60}", expected)
    return heads


def is_head(head: Any, most: list[Any]) -> bool:
    """Return whether `head` is a list of a layer and a head below `most`, the counts of both."""
    known = isinstance(head, list) and len(head) == 2 and all(type(one) is int for one in [*head, *most])
    return known and 0 <= head[0] < most[0] and 0 <= head[1] < most[1]


def _set_heads(network: Any, heads: list[list[int]]) -> None:
    """Set the attention heads that align words; without any, openai-whisper's default: the upper half of the layers."""
    import torch

    if heads:
        mask = torch.zeros(network.dims.n_text_layer, network.dims.n_text_head, dtype=torch.bool)
        layers, places = zip(*heads, strict=True)
        mask[list(layers), list(places)] = True
        network.register_buffer("alignment_heads", mask.to_sparse(), persistent=False)


def _converted(folder: Path, shown: str) -> dict[str, Any]:
    """Return Hugging Face's form of a checkpoint as openai-whisper's: the same tensors under its names."""
    config = read_json(folder / "config.json", f"{shown}/config.json") or {}
    state: dict[str, Any] = {}
    for file in find_weights(folder, shown):
        for name, tensor in load_weights(file, f"{shown}/{file.name}").items():
            if name != "proj_out.weight":  # the embedding again
                for pattern, own in OWN_NAMES:
                    name = pattern.sub(own, name)
                state[name] = tensor.float()
    return {"dims": {own: config.get(name) for own, name in OWN_DIMS.items()}, "model_state_dict": state}


def _fetch(name: str, context: OpenContext) -> Path:
    """Return a published checkpoint's file from openai-whisper's cache; it downloads and checks what is not there."""
    import whisper

    if name not in whisper._MODELS:
        raise ModelError(f"there is no file {name}, and it is no name that openai-whisper knows: {', '.join(KNOWN)}")
    context.progress(f"fetching {name}", 0.0)
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(CONNECT_MAX_S)
    try:
        cache = (
            Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "whisper"
        )  # where openai-whisper looks
        return Path(str(whisper._download(whisper._MODELS[name], str(cache), False)))
    except Exception as error:  # urllib, ssl, sockets, openai-whisper, a missing home folder
        fix = f"put {name}.pt where the pipeline can name it, model: path/to/{name}.pt"
        reason = getattr(error, "reason", None) or error
        raise ModelError(
            f"{name} is not in openai-whisper's cache and cannot be fetched: {reason}\n    fix: {fix}"
        ) from None
    finally:
        socket.setdefaulttimeout(before)


def _check_dims(dims: Any, state: dict[str, Any], shown: str) -> None:
    """Raise ModelError unless `dims` are sensible and agree with the weights: a network is allocated from them."""
    if not isinstance(dims, dict) or set(dims) != set(RANGES):
        raise ModelError(f"{shown} is no Whisper checkpoint: its dims are not {', '.join(RANGES)}")
    for name, (low, high) in RANGES.items():
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
