"""A model read from a folder or the hub. Nothing of it is executed: no remote code, weights from safetensors only."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from weftline.engine.llm import attention
from weftline.engine.llm.fitness import FIX, check_kind
from weftline.engine.llm.quantised import plan_weights
from weftline.errors import ModelError
from weftline.nodes.hugging_face import check_weights, first_line


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """How a model is opened.

    device:      'cpu', or 'cuda:0' and so on.
    dtype:       'auto' (float32 on CPU, what the checkpoint says elsewhere), or a torch dtype's name.
    page_tokens: tokens in a page.
    kv_bytes:    KV memory in bytes; None: KV_BYTES_DEFAULT, or less when the model cannot fill it.
    context_max: longest sequence in tokens; None: what the model was made for.
    kv_dtype:    'auto' (that of the weights), or 'fp8'.
    weights:     'auto' (as the checkpoint has them), 'fp8', 'int8' or 'int4'.
    fuse:        merge weights where that gives the same results.
    form:        of attention: 'cpu', 'gpu', or 'auto' for the device's own.
    rows_max:    most tokens of a round, where the form needs to know.
    """

    device: str = "cpu"
    dtype: str = "auto"
    page_tokens: int = 16
    kv_bytes: int | None = None
    context_max: int | None = None
    kv_dtype: str = "auto"
    weights: str = "auto"
    fuse: bool = True
    form: str = "auto"
    rows_max: int = 8192


def load_model(
    source: str | Path,
    options: RunnerOptions,
    progress: Callable[[str, float], None] = lambda phrase, fraction: None,
    shown: str | None = None,
    kind: str = "AutoModelForCausalLM",
) -> tuple[Any, RunnerOptions]:
    """Read a model into the host's memory, its attention ours, and say how it is to be run.

    In the options returned, `weights` is what is left to be done with them: 'auto' for nothing.

    kind: transformers' class that chooses the model's class by its config.
    """
    import transformers

    shown = shown or str(source)
    attention.register()
    progress("reading the model's config", 0.0)
    _check_folder(source, shown)
    try:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever its many parts raise
        raise ModelError(f"model {shown}: its config cannot be read: {first_line(error, source, shown)}") from None
    check_kind(config, shown)
    progress("reading weights", 0.2)
    plan = plan_weights(options.weights, options.dtype, options.device, config, shown)
    dtype = getattr(torch, plan.dtype) if plan.dtype else _dtype(options, config)
    try:
        with _no_progress_bars():
            model, info = getattr(transformers, kind).from_pretrained(
                source,
                config=config,
                dtype=dtype,
                attn_implementation=attention.NAME,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except Exception as error:
        reason = first_line(error, source, shown)
        if attention.NAME in reason:
            raise ModelError(f"model {shown}: its attention cannot be replaced by the paged one{FIX}") from None
        raise ModelError(f"model {shown}: its weights cannot be loaded: {reason}") from None
    missing = sorted(map(str, info.get("missing_keys") or ())) + sorted(map(str, info.get("mismatched_keys") or ()))
    if missing:
        raise ModelError(f"model {shown}: {len(missing)} weights missing or of another shape: {missing[0]} ...")
    return model, replace(options, weights=plan.form or "auto")


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keep transformers' own bars off standard error while a model loads: `progress` tells how far it is."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _check_folder(source: str | Path, shown: str) -> None:
    folder = Path(source)
    if not folder.is_dir():
        looks_local = isinstance(source, Path) or str(source).startswith((".", "/", "~")) or str(source).count("/") > 1
        if looks_local:
            raise ModelError(
                f"model {shown}: no such folder\n    fix: give a folder with config.json and *.safetensors"
            )
        return
    if not (folder / "config.json").is_file():
        raise ModelError(f"model {shown}: the folder has no config.json")
    check_weights(folder, shown)
    try:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (ValueError, UnicodeError) as error:
        raise ModelError(f"model {shown}: config.json is not JSON: {first_line(error)}") from None


def _dtype(options: RunnerOptions, config: Any) -> Any:
    if options.dtype == "auto":
        on_cpu = options.device == "cpu"
        return torch.float32 if on_cpu else (getattr(config, "dtype", None) or torch.bfloat16)
    found = getattr(torch, options.dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ModelError(f"dtype: found {options.dtype!r:.40}, expected auto, float32, bfloat16 or float16")
    return found
