"""GGUF files as models: transformers' loader, with the settings that it leaves out.

    header = open_header("models/chat.Q4_K_M.gguf", "models/chat.Q4_K_M.gguf")
    with alone("models/chat.Q4_K_M.gguf") as folder:
        config = read_gguf_config(folder, header)
        model, info = load_gguf(folder, config, torch.float32, attention.NAME)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=NAME)

Weights are unpacked to plain ones of the model's dtype. The header is checked by `weftline.nodes.gguf_file` first.
transformers also reads what lies beside a file, so the file is linked into a folder of its own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weftline.errors import MissingPackage, ModelError
from weftline.nodes.contract import ConfigError, model_error
from weftline.nodes.gguf_file import ROPE_FACTORS, GgufHeader, check_gguf, read_gguf
from weftline.nodes.model_limits import open_file

if TYPE_CHECKING:
    import torch

NAME = "model.gguf"
PACKAGES = ("gguf", "accelerate")
GEMMA2_27B_LAYERS = 46


def is_gguf(source: str | Path) -> bool:
    """Return whether a model's source is a GGUF file."""
    return str(source).endswith(".gguf") and Path(source).is_file()


@contextmanager
def alone(source: str | Path) -> Iterator[Path]:
    """Link a file as NAME into an empty folder, which exists meanwhile."""
    with tempfile.TemporaryDirectory(prefix="weftline-gguf-") as folder:
        (Path(folder) / NAME).symlink_to(Path(source).resolve())
        yield Path(folder)


def open_header(source: str | Path, shown: str) -> GgufHeader:
    """Return the checked header of a file; ModelError for one that cannot be loaded, MissingPackage likewise."""
    for package in PACKAGES:
        if find_spec(package) is None:
            raise MissingPackage(package, "quantised")
    try:
        header = read_gguf(Path(source), shown)
        check_gguf(header, shown)
    except ConfigError as error:
        raise model_error(error) from None
    return header


def read_gguf_config(folder: Path, header: GgufHeader) -> Any:
    """Return transformers' config of the file in `folder`, with the settings that its reader leaves out."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, gguf_file=NAME, trust_remote_code=False)
    if (width := header.of_model("attention.key_length")) is not None:
        config.head_dim = width
    if config.model_type in ("phi3", "mistral"):
        config.sliding_window = header.of_model("attention.sliding_window") or None
    if config.model_type == "gemma2":  # as llama.cpp scales attention, which the file does not say
        largest = config.num_hidden_layers == GEMMA2_27B_LAYERS
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if largest else config.head_dim
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if (cap := header.of_model(key)) is not None:
            setattr(config, key, cap)
    ends = [header.settings.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    config.eos_token_id = list(dict.fromkeys(end for end in ends if end is not None)) or None
    config.bos_token_id = header.settings.get("tokenizer.ggml.bos_token_id")
    return config


def load_gguf(folder: Path, config: Any, dtype: torch.dtype, attention: str) -> tuple[Any, Any]:
    """Return the model of the file in `folder`, its weights unpacked, and transformers' report.

    attention: name of its attention function.
    """
    import transformers

    # with weights that stay packed, kernels would be downloaded as code; before this class existed they never did
    kept_packed = getattr(transformers, "GgufConfig", None)
    unpack = {} if kept_packed is None else {"quantization_config": kept_packed(dequantize=True)}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        gguf_file=NAME,
        dtype=dtype,
        attn_implementation=attention,
        trust_remote_code=False,
        output_loading_info=True,
        **unpack,
    )
    return model, info


def scale_positions(model: Any, source: str | Path, header: GgufHeader, shown: str) -> None:
    """Divide the model's rotary frequencies by the file's factors, where it has some: Llama 3.1 and later do."""
    import torch

    entry = header.tensors.get(ROPE_FACTORS)
    if entry is None:
        return
    with open_file(Path(source)) as file:
        file.seek(entry.start)
        factors = torch.frombuffer(bytearray(file.read(entry.size_bytes)), dtype=torch.float32)
    rotary = getattr(model.base_model, "rotary_emb", None)
    if entry.type != 0 or rotary is None or rotary.inv_freq.shape != factors.shape or not bool((factors > 0).all()):
        raise ModelError(f"model {shown}: its {ROPE_FACTORS} does not fit its rotary embedding")
    for name in ("inv_freq", "original_inv_freq"):
        if (frequencies := getattr(rotary, name, None)) is not None:
            frequencies.div_(factors)
