"""A transformers decoder with its KV memory: loads it, sizes the memory, computes rounds.

The model's code stays transformers' own. Two things are ours: the attention function, and the loop that packs a
round's tokens into one row and keeps only the logits that are needed. Nothing of a model's folder is executed: no
remote code, and weights from safetensors only.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weftline.engine.llm import attention
from weftline.engine.llm.attention import RoundPages, Span
from weftline.engine.llm.rounds import Share
from weftline.errors import ModelError
from weftline.nodes.hugging_face import check_weights, first_line

KV_BYTES_DEFAULT = 256 << 20
"""KV memory when nobody says how much: modest, since other models share the machine."""
SEQUENCES_DEFAULT = 16
"""With a small model the default is less still: room for so many sequences of full length."""
_LAYERS_KNOWN = {"full_attention", "sliding_attention"}
_ROPE_BY_LENGTH = {"dynamic", "longrope"}
"""Rotary embeddings that change for all tokens of a pass once one of them is far along."""


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """How a model is opened.

    device:      'cpu', or 'cuda:0' and so on.
    dtype:       'auto' (float32 on CPU, what the checkpoint says elsewhere), or a torch dtype's name.
    page_tokens: tokens in a page.
    kv_bytes:    KV memory in bytes; None: KV_BYTES_DEFAULT, or less when the model cannot fill it.
    context_max: longest sequence in tokens; None: what the model was made for.
    """

    device: str = "cpu"
    dtype: str = "auto"
    page_tokens: int = 16
    kv_bytes: int | None = None
    context_max: int | None = None


class Runner:
    """One loaded model. `pages` of `page_tokens` tokens each; `context_max` is its longest sequence, in tokens.

    ends: the model's end-of-text tokens.
    """

    def __init__(self, model: Any, options: RunnerOptions) -> None:
        """Take a loaded model whose attention is ours (see `open`), find its attention layers and give them memory."""
        self.model = model.eval().requires_grad_(False)
        self.options = options
        self.device = torch.device(options.device)
        self.page_tokens = options.page_tokens
        config = model.config.get_text_config(decoder=True)
        self.vocabulary = int(config.vocab_size)
        self.ends = _ends(model)
        self.context_max = _context(config, options.context_max)
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._round = RoundPages(options.page_tokens)
        layers = self._find_layers(config)
        like = torch.empty(0, dtype=model.dtype, device=self.device)
        self.token_bytes = sum(layer.kv_heads * sum(layer.widths) for layer in layers) * like.element_size()
        self.pages = self._size(options.kv_bytes)
        for layer in layers:
            layer.bind(self.pages * self.page_tokens, like)

    @classmethod
    def open(
        cls,
        source: str | Path,
        options: RunnerOptions | None = None,
        progress: Callable[[str, float], None] = lambda phrase, fraction: None,
        shown: str | None = None,
    ) -> Runner:
        """Load the model in folder `source`, or of that name on the hub; ModelError says what is wrong with it.

        shown: the model's name in errors, as its user wrote it; None: `source` as it is.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        options, shown = options or RunnerOptions(), shown or str(source)
        attention.register()
        progress("reading the model's config", 0.0)
        _check_folder(source, shown)
        try:
            config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        except Exception as error:  # transformers raises whatever its many parts raise
            raise ModelError(f"model {shown}: its config cannot be read: {first_line(error, source, shown)}") from None
        progress("reading weights", 0.2)
        dtype = _dtype(options, config)
        try:
            with _no_progress_bars():
                model, info = AutoModelForCausalLM.from_pretrained(
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
            raise ModelError(f"model {shown}: its weights cannot be loaded: {reason}") from None
        missing = sorted(map(str, info.get("missing_keys") or ())) + sorted(map(str, info.get("mismatched_keys") or ()))
        if missing:
            raise ModelError(f"model {shown}: {len(missing)} weights missing or of another shape: {missing[0]} ...")
        progress("making room for keys and values", 0.9)
        return cls(model.to(options.device), options)

    @torch.inference_mode()
    def run(self, shares: Sequence[Share]) -> Tensor:
        """Compute the shares' tokens; return float32 [samples, vocabulary], a row for each share that samples."""
        tokens: list[int] = []
        places: list[int] = []
        spans: list[Span] = []
        keep: list[int] = []
        for share in shares:
            stop = share.start + share.count
            spans.append(Span(len(tokens), share.start, share.count, share.sequence.table))
            tokens += share.sequence.tokens[share.start : stop]
            places += range(share.start, stop)
            if share.samples:
                keep.append(len(tokens) - 1)
        self._round.fill(spans, self.device)
        logits = self._forward(tokens, places, keep or [0])
        return logits[: len(keep)].float()

    def _forward(self, tokens: list[int], places: list[int], keep: list[int]) -> Tensor:
        packed = torch.tensor([tokens, places], device=self.device)
        kept = torch.tensor(keep, device=self.device)
        options = {"logits_to_keep": kept} if self._keeps else {}
        out = self.model(input_ids=packed[:1], position_ids=packed[1:], use_cache=False, **options)
        logits: Tensor = out.logits[0]
        return logits if self._keeps else logits[kept]

    @torch.inference_mode()
    def _find_layers(self, config: Any) -> list[attention.LayerPages]:
        """Run one pass in which attention modules make themselves known, and return their places for pages."""
        name = type(self.model).__name__
        unknown = set(getattr(config, "layer_types", None) or ()) - _LAYERS_KNOWN
        if unknown:
            known = ", ".join(sorted(_LAYERS_KNOWN))
            raise ModelError(f"{name} has layers of kind {', '.join(sorted(unknown))}; only {known} can be paged")
        seats = attention.seat_all(self.model, self._round)
        try:
            self._forward([0, 0], [0, 1], [1])
        except Exception as error:
            raise ModelError(f"{name} cannot run with paged attention: {first_line(error)}") from error
        layers = [layer for layer in seats if layer.seen]
        if len(layers) != config.num_hidden_layers or any(layer.seen != 1 for layer in layers):
            raise ModelError(
                f"{name}: {len(layers)} of its {config.num_hidden_layers} layers attend through transformers' "
                "attention interface; all must, once\n    fix: use a plain decoder such as Llama, Qwen3 or Mistral"
            )
        attention.unseat_others(self.model, layers)
        return layers

    def _size(self, kv_bytes: int | None) -> int:
        page_bytes = self.token_bytes * self.page_tokens
        if kv_bytes is None:
            longest = -(-self.context_max // self.page_tokens) * page_bytes
            kv_bytes = min(KV_BYTES_DEFAULT, longest * SEQUENCES_DEFAULT)
        if kv_bytes < 2 * page_bytes:
            raise ModelError(f"kv_bytes: found {kv_bytes}, but one page of this model takes {page_bytes}; give two")
        return kv_bytes // page_bytes


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


def _ends(model: Any) -> frozenset[int]:
    for config in (getattr(model, "generation_config", None), model.config):
        ends = getattr(config, "eos_token_id", None)
        if ends is not None:
            return frozenset([ends] if isinstance(ends, int) else ends)
    return frozenset()


def _context(config: Any, wanted: int | None) -> int:
    made_for = int(getattr(config, "max_position_embeddings", None) or 4096)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _ROPE_BY_LENGTH:
        # Past its first length such a model embeds all tokens of a pass otherwise, and rounds mix sequences.
        made_for = min(made_for, int(rope.get("original_max_position_embeddings") or made_for))
    if wanted is not None and not 1 <= wanted <= made_for:
        raise ModelError(f"context_max: found {wanted}, expected 1 to {made_for}, what the model was made for")
    return wanted or made_for
