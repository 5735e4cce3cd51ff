"""Fused forward of a decoder's attention, MLP, layer and stack for packed rows.

Each function builds the fused forward of one kind of module: attention, MLP, layer, or stack of layers. Modules keep
their weights and children; only `forward` changes. Linear layers are looked up by name at every call, so a LoRA or
quantised layer that replaces one is used.

transformers' cache and mask arguments are ignored: tokens are packed into one row and attention reads KV pages. A call
with unsupported arguments falls back to the model's own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from weftline.engine.llm.attention import paged_attention
from weftline.engine.llm.fusion.probe import AttentionFacts
from weftline.engine.llm.fusion.rows import NormForm, add_rms_norm, gated, rms_norm, rotate

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden [1, rows, hidden], cos, sin [rows, rotary width]) to [1, rows, hidden]."""
Step = Callable[[Tensor, Tensor | None, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(residual, delta or None, cos, sin) to the next layer's (residual, delta), [1, rows, hidden] each."""

TABLE_BYTES = 32 << 20
"""Largest rotary embedding table; embeddings of later positions are computed per call."""
_STEADY_ROPES = {"default", "linear", "llama3", "yarn"}
"""Rope types whose embedding of a position does not depend on the other positions of a pass."""


@dataclass(frozen=True, slots=True)
class Norms:
    """Recognised RMS norms by module."""

    forms: Mapping[nn.Module, NormForm]

    def of(self, module: Any) -> Callable[[Tensor], Tensor]:
        form = self.forms.get(module)
        return module if form is None else lambda values: rms_norm(values, form)

    def after_add(self, module: Any) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return a function of (values, delta): adds `values` to `delta` in place, returns the sum and its norm."""
        form = self.forms.get(module)
        if form is not None:
            return lambda values, delta: add_rms_norm(values, delta, form)

        def plain(values: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
            delta += values
            return delta, module(delta)

        return plain


def attention(module: Any, facts: AttentionFacts, norms: Norms) -> Attend:
    """Build the fused attention of a module with `qkv_proj`, `o_proj` and optional `q_norm`, `k_norm`."""
    heads, kv_heads, width = facts.heads, facts.kv_heads, facts.width
    linear, rotated_heads = module._modules, heads + kv_heads
    q_norm, k_norm = linear.get("q_norm"), linear.get("k_norm")
    options: dict[str, Any] = {
        "scaling": facts.scale, "sliding_window": facts.window, "softcap": facts.softcap,
    }  # fmt: skip

    def split(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = linear["qkv_proj"](hidden)[0]
        rows = flat.shape[0]
        query, key, value = flat.split((heads * width, kv_heads * width, kv_heads * width), dim=-1)
        return query.view(rows, heads, width), key.view(rows, kv_heads, width), value.view(rows, kv_heads, width)

    def normed(norm: Any) -> Callable[[Tensor], Tensor]:
        call, per_head = norms.of(norm), norm.weight.numel() == width
        return call if per_head else lambda values: call(values.flatten(1)).view(values.shape)

    first, second = (None, None) if q_norm is None or k_norm is None else (normed(q_norm), normed(k_norm))

    def attend(hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        layer = module.__dict__["weftline_pages"]
        fused = getattr(layer.form, "attend_rotary", None)
        if fused is not None and layer.keys is not None:
            query, key, value = split(hidden)
            if first is not None and second is not None:
                query, key = first(query), second(key)
            out = fused(layer, query, key, value, cos, sin, facts.scale, facts.window, facts.softcap)[None]
        else:
            if first is not None and second is not None:
                query, key, value = split(hidden)
                query, key = rotate(first(query), cos, sin), rotate(second(key), cos, sin)
            else:
                flat = linear["qkv_proj"](hidden)[0]
                every = flat.view(flat.shape[0], rotated_heads + kv_heads, width)
                both = rotate(every[:, :rotated_heads], cos, sin)
                query, key, value = both[:, :heads], both[:, heads:], every[:, rotated_heads:]
            query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
            out = paged_attention(module, query, key, value, None, **options)[0]
        projected: Tensor = linear["o_proj"](out.reshape(1, out.shape[1], heads * width))
        return projected

    return attend


def attention_forward(attend: Attend) -> Callable[..., tuple[Tensor, None]]:
    """Wrap fused attention in the signature of an attention module's forward."""

    def forward(hidden_states: Tensor, position_embeddings: Any = None, *_: Any, **__: Any) -> tuple[Tensor, None]:
        cos, sin = position_embeddings
        return attend(hidden_states, cos[0], sin[0]), None

    return forward


def unfused_attention(module: Any) -> Attend:
    """Adapt an unfused attention module to the signature of fused ones."""

    def attend(hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out: Tensor = module(hidden_states=hidden, position_embeddings=(cos[None], sin[None]), attention_mask=None)[0]
        return out

    return attend


def mlp(module: Any) -> Callable[[Tensor], Tensor]:
    """Build the fused forward of an MLP with `gate_up_proj`, `down_proj` and an activation."""
    linear = module._modules
    activation: Any = linear.get("act_fn") or linear.get("activation_fn")
    silu = isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"
    activate: Callable[[Tensor], Tensor] = functional.silu if silu else activation
    tanh = type(activation).__name__ in ("GELUTanh", "PytorchGELUTanh") or (
        isinstance(activation, nn.GELU) and activation.approximate == "tanh"
    )
    name = "silu" if silu else "gelu_tanh" if tanh else ""

    def forward(hidden: Tensor) -> Tensor:
        projected: Tensor = linear["down_proj"](gated(linear["gate_up_proj"](hidden), activate, name))
        return projected

    return forward


def layer(
    names: Sequence[str | None], module: Any, attend: Attend, feed: Callable[[Tensor], Tensor], norms: Norms
) -> Step:
    """Build the fused step of a layer.

    names: its norms before and after attention, before and after the MLP; None: absent.
    """
    before, after_attention, between, after_mlp = (None if name is None else module._modules[name] for name in names)
    start = norms.of(before) if before is not None else None
    start_added = norms.after_add(before) if before is not None else None
    middle = norms.after_add(between) if between is not None else None
    close_attention = norms.of(after_attention) if after_attention is not None else None
    close_mlp = norms.of(after_mlp) if after_mlp is not None else None

    def step(residual: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if delta is None:
            hidden = residual if start is None else start(residual)
        elif start_added is None:
            residual = hidden = delta.add_(residual)
        else:
            residual, hidden = start_added(residual, delta)
        delta = attend(hidden, cos, sin)
        if close_attention is not None:
            delta = close_attention(delta)
        if middle is None:
            residual = hidden = delta.add_(residual)
        else:
            residual, hidden = middle(residual, delta)
        delta = feed(hidden)
        return residual, (delta if close_mlp is None else close_mlp(delta))

    return step


def layer_forward(step: Step) -> Callable[..., Tensor]:
    """Wrap a fused step in the signature of a decoder layer's forward."""

    def forward(hidden_states: Tensor, *_: Any, position_embeddings: Any = None, **__: Any) -> Tensor:
        cos, sin = position_embeddings
        residual, delta = step(hidden_states, None, cos[0], sin[0])
        return delta.add_(residual)

    return forward


class RotaryTable:
    """Rotary embeddings by position; on a CPU cached in a table that grows up to TABLE_BYTES."""

    def __init__(self, module: Any) -> None:
        self._module = module
        kind = getattr(module, "rope_type", None)
        self._steady = kind in _STEADY_ROPES
        self._table = torch.empty(0)

    def at(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [rows, rotary width] of `positions` [1, rows], of the dtype of `like`."""
        if self._steady and positions.device.type == "cpu" and self._reaches(int(positions.max()) + 1, like):
            cos, sin = self._table.index_select(0, positions[0]).chunk(2, dim=-1)
            return cos, sin
        cos, sin = self._module(like, positions)
        return cos[0], sin[0]

    def _reaches(self, positions: int, like: Tensor) -> bool:
        """Grow the table to `positions` rows of the dtype of `like`; return False above TABLE_BYTES."""
        if positions <= len(self._table) and self._table.dtype is like.dtype:
            return True
        rows = 1 << max(positions - 1, 255).bit_length()
        if rows * 4 * int(self._module.inv_freq.numel()) * like.element_size() > TABLE_BYTES:
            return False
        self._table = torch.cat(self._module(like, torch.arange(rows)[None]), dim=-1)[0]
        return True


def stack_forward(module: Any, steps: Sequence[Step], norms: Norms, result: Callable[..., Any]) -> Callable[..., Any]:
    """Build the forward of a decoder from its layers' fused steps; `result` constructs its output."""
    own = type(module).forward
    embed, rotary = module._modules["embed_tokens"], RotaryTable(module._modules["rotary_emb"])
    close = norms.after_add(module._modules["norm"])

    def forward(
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **options: Any,
    ) -> Any:
        if input_ids is None or position_ids is None or past_key_values is not None or use_cache or options:
            return own(
                module, input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
                past_key_values=past_key_values, inputs_embeds=inputs_embeds, use_cache=use_cache, **options,
            )  # fmt: skip
        embedded: Tensor = embed(input_ids)
        cos, sin = rotary.at(position_ids, embedded)
        residual, delta = steps[0](embedded, None, cos, sin)
        for step in steps[1:]:
            residual, delta = step(residual, delta, cos, sin)
        return result(last_hidden_state=close(residual, delta)[1])

    return forward
