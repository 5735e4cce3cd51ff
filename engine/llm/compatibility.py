"""Compatibility check of a model with paged attention, when it is opened.

A round packs tokens of many sequences into one row. That is correct only if attention alone carries information between
tokens, positions are the `position_ids` passed in, and each layer attends once, to earlier tokens, through
transformers' attention interface. Any other model would produce wrong answers and is refused. One short pass with
attention that returns zeros checks this.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from weftline.engine.llm import attention
from weftline.engine.llm.attention import AttentionForm, LayerPages
from weftline.errors import ModelError
from weftline.nodes.hugging_face import first_line

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
    model: Any, form: AttentionForm, forward: Callable[[list[int], list[int], list[int]], Tensor]
) -> list[LayerPages]:
    """Return the places for pages of a model's attention layers, in order; ModelError when it cannot be paged.

    forward: computes tokens at places as one row, and returns the logits [kept, vocabulary] of those to keep.
    """
    config, name = model.config.get_text_config(decoder=True), type(model).__name__
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - set(LAYERS_KNOWN))
    if unknown:
        raise ModelError(f"{name} has layers of kind {', '.join(unknown)}; expected {' or '.join(LAYERS_KNOWN)}{FIX}")
    seats = attention.seat_all(model, form)
    try:
        found = forward([0, 1], [0, 1], [1])
        layers = [layer for layer in seats if layer.seen]
        _check_count(name, layers, config.num_hidden_layers)
        other = forward([2, 1], [0, 1], [1])
    except ModelError as error:
        raise ModelError(f"{name} cannot be paged: {error}") from None
    except Exception as error:
        raise ModelError(f"{name} cannot be paged: {first_line(error)}") from error
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ModelError(f"{name} cannot be paged: its forward does not accept position_ids{FIX}")
    allowed = (_MIXED_SHARE if model.dtype.itemsize >= 4 else _MIXED_SHARE_ROUGH) * float(found.abs().max())
    if float((found - other).abs().max()) > allowed:
        raise ModelError(f"{name} cannot be paged: its tokens see each other beside attention{FIX}")
    attention.unseat_others(model, layers)
    return layers


def _check_count(name: str, layers: list[LayerPages], expected: int) -> None:
    if len(layers) != expected or any(layer.seen != 1 for layer in layers):
        raise ModelError(
            f"{len(layers)} of its {expected} layers attend through transformers' attention interface; "
            f"all must, once{FIX}"
        )
