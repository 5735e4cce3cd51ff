"""Models in Hugging Face's format: a local folder or a hub name; safetensors only, and never code from the model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from weftline.errors import MissingPackage, ModelError
from weftline.nodes.contract import ConfigError, OpenContext
from weftline.nodes.model_file import find_model
from weftline.nodes.text_tokens import TextTokens
from weftline.nodes.weights import check_safetensors

CONFIG_BYTES_MAX = 4 << 20
TOKENS_MAX = 512
"""Most tokens of one text when the model's config does not say."""


def find_config(model: str, base_dir: Path) -> dict[str, Any] | None:
    """Return config.json of a local folder or of a hub model that is in the cache; None when it is not here.

    ConfigError when `model` is neither a folder nor could be a hub name, or its config.json is not JSON.
    """
    path = find_model(model, base_dir)
    if path is not None:
        return read_config(path, model)
    if is_path(model, base_dir):
        raise ConfigError("model", f"there is no folder {model}", "a folder with config.json, or a hub name")
    snapshots = _hub_cache() / f"models--{model.replace('/', '--')}" / "snapshots"
    found = sorted(snapshots.glob("*/config.json")) if "\0" not in model else []
    return read_config(found[-1].parent, model) if found else None


def _hub_cache() -> Path:
    """Return where huggingface_hub keeps models, by its own rules."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")


def read_config(folder: Path, shown: str) -> dict[str, Any]:
    """Return `folder`/config.json as a dict; ConfigError about option `model` when there is none or it is corrupt."""
    path = folder / "config.json"
    try:
        if path.stat().st_size > CONFIG_BYTES_MAX:
            raise ConfigError("model", f"{shown}/config.json is larger than {CONFIG_BYTES_MAX} bytes")
        config = json.loads(path.read_bytes())
    except OSError:
        raise ConfigError("model", f"{shown} has no config.json", "a folder with config.json") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        raise ConfigError("model", f"{shown}/config.json is not valid JSON") from None
    if not isinstance(config, dict):
        raise ConfigError("model", f"{shown}/config.json is no JSON object")
    return config


def load_network(auto_class: str, model: str, context: OpenContext) -> Any:
    """Return the network of `model` by transformers' `auto_class`: float32, in eval mode, on the context's device."""
    try:
        import torch
        import transformers
    except ImportError:
        raise MissingPackage("transformers", "llm") from None
    torch.set_num_threads(max(context.threads, 1))
    source = local_or_hub(model, context.base_dir)
    if isinstance(source, Path):
        check_weights(source, model)
    context.progress("reading weights", 0.2)
    try:
        found = getattr(transformers, auto_class).from_pretrained(
            str(source), use_safetensors=True, trust_remote_code=False, dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:
        raise ModelError(f"{model} cannot be opened by transformers: {first_line(error, source, model)}") from None
    network, report = found
    missing = sorted(map(str, report.get("missing_keys") or ()))
    if missing:  # transformers would leave them at random and only warn
        raise ModelError(f"{model}: its weights lack {', '.join(missing[:3])} ({len(missing)} tensors in all)")
    return network.to(context.framework_device).eval()


def check_weights(folder: Path, shown: str) -> None:
    """Raise ModelError unless `folder`, called `shown` in errors, has safetensors files, and all of them are sound."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{shown} has no *.safetensors; pickled weights are not loaded")
    for file in files:
        check_safetensors(file, f"{shown}/{file.name}")


def load_tokens(model: str, context: OpenContext, tokens_max: int) -> TextTokens:
    """Return the model's tokenizer; ModelError when it has none of the fast kind."""
    import transformers

    source = local_or_hub(model, context.base_dir)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(source), trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"{model} has no usable tokenizer: {first_line(error, source, model)}") from None
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        raise ModelError(f"{model} has no tokenizer.json")
    return TextTokens(fast, tokens_max, tokenizer.pad_token_id or 0)


def tokens_limit(config: dict[str, Any]) -> int:
    """Return how many tokens a model of this config can read; position tables of RoBERTa hold two extra rows."""
    positions = config.get("max_position_embeddings")
    if type(positions) is not int or positions < 8:
        return TOKENS_MAX
    extra = 2 if config.get("model_type") in ("roberta", "xlm-roberta", "camembert", "mpnet") else 0
    return min(positions - extra, TOKENS_MAX)


def is_path(model: str, base_dir: Path) -> bool:
    """Whether `model` can only be a path: a hub name is one or two words, and no folder here starts like it."""
    parts = model.split("/")
    return model.startswith((".", "/", "~")) or len(parts) > 2 or (len(parts) == 2 and (base_dir / parts[0]).is_dir())


def local_or_hub(model: str, base_dir: Path) -> Path | str:
    """Return the local folder that `model` names, else the name itself for the hub."""
    return find_model(model, base_dir) or model


def first_line(error: BaseException, source: Path | str | None = None, shown: str = "") -> str:
    """Return the first line of an error's message, with `shown` in place of `source`: where a model lies is private."""
    text = (str(error) if source is None else str(error).replace(str(source), shown)).strip()
    return f"{text.splitlines()[0]:.300}" if text else type(error).__name__
