"""Paged attention as an attention function of transformers.

Any model whose attention implementation can be selected by name can use it. The tokens of all sequences of a round are
packed in one row, with their own positions; visibility between them is decided here:

    query  [1, heads, rows, width]      rows: one per token of the round
    key    [1, kv_heads, rows, width]   written to the pages of the layer first, then read back with what was there
    keys   [kv_heads, slots, width]     a layer's pages; token t is at slot pages[t // size] * size + t % size

Heads come first in the pages so that a sequence whose pages are neighbours is, for each head, one dense piece of
memory. How the reading is done depends on the device: `cpu.attention` and `gpu.attention` are two forms of one
operation, and the runner selects one.

Packing is correct only if attention alone carries information between tokens, positions are the `position_ids` passed
in, and each layer attends once, causally, through transformers' attention interface. `find_layers` checks this with a
short pass whose attention returns zeros; other models are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from weftline.engine.llm import attention
from weftline.engine.llm.kv_cache import PageTable
from weftline.engine.llm.kv_memory import KvAllocator, KvMemory
from weftline.errors import ModelError, first_line

NAME = "weftline_paged"
"""Name of `paged_attention` in transformers' attention registry."""

_REFUSED = ("s_aux", "sinks", "position_bias", "head_mask", "indices", "block_indices")
"""Unsupported arguments that change the result; a model that passes one is refused at load."""


@dataclass(slots=True)
class Span:
    """The rows of one sequence: `count` from `row` on are its tokens from `start` on.

    shift: difference of a token's position and its index, behind pictures of a model whose positions count these less.
    """

    row: int
    start: int
    count: int
    table: PageTable
    shift: int = 0


class AttentionBackend(Protocol):
    """Attention of one device; shared by all layers, and filled before each round."""

    def fill(self, spans: Sequence[Span]) -> None:
        """Set where the next round writes and reads keys and values; rows of `spans` are consecutive."""

    def attend(
        self,
        layer: LayerPages,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Write `key` and `value` [kv_heads, rows, width] to the layer's pages; return [rows, heads, value width].

        query: [heads, rows, width].   window: how many tokens back a row sees, itself included; None: all.
        """


@dataclass(slots=True)
class LayerPages:
    """KV memory of one layer, attached to its attention module.

    keys, values: [kv_heads, slots, width], None until the layer's sizes were seen.
    memories:     what holds the keys, and the values.
    seen:         how often the layer attended before it had pages; a decoder layer does so once.
    """

    form: AttentionBackend
    keys: Tensor | None = None
    values: Tensor | None = None
    seen: int = 0
    kv_heads: int = 0
    widths: tuple[int, int] = (0, 0)
    memories: tuple[KvMemory, ...] = ()

    def bind(self, slots: int, allocate: KvAllocator) -> None:
        """Allocate room for `slots` tokens; nothing is kept of an error."""
        self.release()
        self.memories = tuple(allocate(self.kv_heads, width) for width in self.widths)
        self.resize(slots)

    def release(self) -> None:
        """Free the memory until the next `bind`; attention must not run meanwhile."""
        self.keys = self.values = None
        self.memories = ()

    def resize(self, slots: int) -> None:
        """Resize to `slots` tokens, keeping the common slots; after an error the layer is as it was."""
        before = 0 if self.keys is None else self.keys.shape[1]
        made: list[Tensor] = []
        try:
            for memory in self.memories:
                made.append(memory.resize(slots))
        except BaseException:
            for memory, kept in zip(self.memories[: len(made)], (self.keys, self.values)):
                memory.undo(before, kept)  # or it would copy what was there now when it is resized again
            raise
        self.keys, self.values = made

    def undo(self, slots: int) -> None:
        """Return to `slots` tokens after a larger size; never fails."""
        for memory in self.memories:
            memory.undo(slots)
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[:, :slots], self.values[:, :slots]

    def copy(self, old: slice, new: slice) -> None:
        """Copy slots to slots."""
        for memory in (self.keys, self.values):
            if memory is not None:
                memory[:, new] = memory[:, old]


def attach_pages(model: torch.nn.Module, form: AttentionBackend) -> list[LayerPages]:
    """Attach a LayerPages to every module of `model`; one forward marks those that attend as `seen`."""
    seats = []
    for module in model.modules():
        layer = LayerPages(form)
        module.weftline_pages = layer  # type: ignore[assignment]
        seats.append(layer)
    return seats


def detach_others(model: torch.nn.Module, layers: Sequence[LayerPages]) -> None:
    """Detach the LayerPages of every module except those among `layers`."""
    kept = {id(layer) for layer in layers}
    for module in model.modules():
        if id(module.weftline_pages) not in kept:
            del module.weftline_pages


def register() -> None:
    """Register `paged_attention` with transformers; at load, since importing must not load transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, paged_attention)


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Write keys and values to the layer's pages and attend; return [1, rows, heads, value width]."""
    layer: LayerPages = module.weftline_pages  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    width, width_out = key.shape[3], value.shape[3]
    if width != width_out:  # zeros change no product; forms have one width
        query, key, value = (_widened(part, max(width, width_out)) for part in (query, key, value))
    if layer.keys is None:
        _refuse(module, attention_mask, options)
        layer.seen += 1
        layer.kv_heads, layer.widths = key.shape[1], (key.shape[3], value.shape[3])
        return query.new_zeros(1, query.shape[2], query.shape[1], width_out), None
    out = layer.form.attend(layer, query[0], key[0], value[0], scale, sliding_window, softcap)[None]
    return out if width_out == out.shape[3] else out[..., :width_out], None


def _widened(part: Tensor, width: int) -> Tensor:
    return part if part.shape[3] == width else torch.nn.functional.pad(part, (0, width - part.shape[3]))


def _refuse(module: torch.nn.Module, attention_mask: Tensor | None, options: dict[str, Any]) -> None:
    """Raise ModelError for an unsupported kind of attention."""
    refused = [name for name in _REFUSED if options.get(name) is not None]
    if refused:
        raise ModelError(f"its attention uses {', '.join(refused)}, which the paged form does not have")
    if getattr(module, "is_causal", True) is False or options.get("is_causal") is False:
        raise ModelError("its tokens attend to those after them; only decoders have pages")
    if attention_mask is not None:
        raise ModelError("it makes attention masks of its own, which the paged form does not have")


LAYERS_KNOWN = ("full_attention", "sliding_attention")
FIX = "\n    fix: use a plain decoder such as Llama, Qwen3 or Mistral"
"""End of every message about a model that cannot be paged."""
_MIXED_SHARE, _MIXED_SHARE_ROUGH = 1e-4, 0.02
"""Largest relative change of a token's logits when an earlier token changes: in float32, and in fewer bits."""


def check_kind(config: Any, shown: str) -> None:
    """Raise ModelError when the config shows that the model `shown` is not a decoder."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"model {shown}: {config.model_type} has an encoder; only decoders have pages{FIX}")


def find_layers(
    model: Any, form: AttentionBackend, forward: Callable[[list[int], list[int], list[int]], Tensor]
) -> list[LayerPages]:
    """Return the LayerPages of a model's attention layers, in order; ModelError if it cannot be paged.

    forward: computes tokens at places as one row, and returns the logits [kept, vocabulary] of those to keep.
    """
    config, name = model.config.get_text_config(decoder=True), type(model).__name__
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - set(LAYERS_KNOWN))
    if unknown:
        raise ModelError(f"{name} has layers of kind {', '.join(unknown)}; expected {' or '.join(LAYERS_KNOWN)}{FIX}")
    seats = attention.attach_pages(model, form)
    try:
        found = forward([0, 1], [0, 1], [1])
        layers = [layer for layer in seats if layer.seen]
        _check_count(name, layers, config.num_hidden_layers)
        other = forward([2, 1], [0, 1], [1])
    except ModelError as error:
        raise ModelError(f"{name} cannot be paged: {error}") from None
    except Exception as error:
        raise ModelError(f"{name} cannot be paged: {first_line(error):.300}") from error
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ModelError(f"{name} cannot be paged: its forward does not accept position_ids{FIX}")
    allowed = (_MIXED_SHARE if model.dtype.itemsize >= 4 else _MIXED_SHARE_ROUGH) * float(found.abs().max())
    if float((found - other).abs().max()) > allowed:
        raise ModelError(f"{name} cannot be paged: its tokens see each other beside attention{FIX}")
    attention.detach_others(model, layers)
    return layers


def _check_count(name: str, layers: list[LayerPages], expected: int) -> None:
    if len(layers) != expected or any(layer.seen != 1 for layer in layers):
        raise ModelError(
            f"{len(layers)} of its {expected} layers attend through transformers' attention interface; "
            f"all must, once{FIX}"
        )
