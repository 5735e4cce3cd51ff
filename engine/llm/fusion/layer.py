"""Fused forward of a decoder's attention, MLP, layer and stack for packed rows.

Each function here makes the lean form of one kind of module: attention, MLP, whole layer, whole stack of layers. The
modules stay where they are with their weights and children; what changes is their `forward`. Linear layers are looked
up by name at every call, so that an adapter or a quantised layer put in their place is used.

transformers' arguments without a meaning here (caches, masks) are ignored: callers pack tokens into one row and attend
over pages. A call that asks for more goes to the model's own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from weftline.engine.llm.attention import paged_attention
from weftline.engine.llm.fusion.probe import Facts
from weftline.engine.llm.fusion.rows import NormForm, add_rms_norm, gated, rms_norm, turn

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden [1, rows, hidden], cos, sin [rows, turned width]) to [1, rows, hidden]."""
Step = Callable[[Tensor, Tensor | None, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(residual, what is to be added to it, cos, sin) to the next layer's first two; [1, rows, hidden] each."""

TABLE_BYTES = 32 << 20
"""Most memory for rotary embeddings computed ahead; places beyond are computed each time."""
_STEADY_ROPES = {"default", "linear", "llama3", "yarn"}
"""Rotary embeddings of a place that do not depend on the other places of a pass."""


@dataclass(frozen=True, slots=True)
class Norms:
    """The forms of the norms that were recognised, by module."""

    forms: Mapping[nn.Module, NormForm]

    def of(self, module: Any) -> Callable[[Tensor], Tensor]:
        form = self.forms.get(module)
        return module if form is None else lambda values: rms_norm(values, form)

    def after_add(self, module: Any) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return (values, delta) to values + delta, in the memory of delta, and its norm."""
        form = self.forms.get(module)
        if form is not None:
            return lambda values, delta: add_rms_norm(values, delta, form)

        def plain(values: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
            delta += values
            return delta, module(delta)

        return plain


def attention(module: Any, facts: Facts, norms: Norms) -> Attend:
    """Return the lean form of an attention module with `qkv_proj`, `o_proj` and perhaps `q_norm`, `k_norm`."""
    heads, kv_heads, width = facts.heads, facts.kv_heads, facts.width
    linear, turned = module._modules, heads + kv_heads
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
        turning = getattr(layer.form, "attend_turning", None)
        if turning is not None and layer.keys is not None:
            query, key, value = split(hidden)
            if first is not None and second is not None:
                query, key = first(query), second(key)
            out = turning(layer, query, key, value, cos, sin, facts.scale, facts.window, facts.softcap)[None]
        else:
            if first is not None and second is not None:
                query, key, value = split(hidden)
                query, key = turn(first(query), cos, sin), turn(second(key), cos, sin)
            else:
                flat = linear["qkv_proj"](hidden)[0]
                every = flat.view(flat.shape[0], turned + kv_heads, width)
                both = turn(every[:, :turned], cos, sin)
                query, key, value = both[:, :heads], both[:, heads:], every[:, turned:]
            query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
            out = paged_attention(module, query, key, value, None, **options)[0]
        projected: Tensor = linear["o_proj"](out.reshape(1, out.shape[1], heads * width))
        return projected

    return attend


def attention_forward(attend: Attend) -> Callable[..., tuple[Tensor, None]]:
    """Return the forward of an attention module around its lean form."""

    def forward(hidden_states: Tensor, position_embeddings: Any = None, *_: Any, **__: Any) -> tuple[Tensor, None]:
        cos, sin = position_embeddings
        return attend(hidden_states, cos[0], sin[0]), None

    return forward


def attention_as_it_is(module: Any) -> Attend:
    """Return an attention module that was not fused, called as lean ones are."""

    def attend(hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out: Tensor = module(hidden_states=hidden, position_embeddings=(cos[None], sin[None]), attention_mask=None)[0]
        return out

    return attend


def mlp(module: Any) -> Callable[[Tensor], Tensor]:
    """Return the lean form of an MLP with `gate_up_proj`, `down_proj` and an activation."""
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
    """Return the lean form of a layer. `names`: its norms before and after attention, before and after the MLP."""
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
    """Return the forward of a decoder layer around its lean form."""

    def forward(hidden_states: Tensor, *_: Any, position_embeddings: Any = None, **__: Any) -> Tensor:
        cos, sin = position_embeddings
        residual, delta = step(hidden_states, None, cos[0], sin[0])
        return delta.add_(residual)

    return forward


class RotaryTable:
    """Rotary embeddings by place. On a CPU they are computed ahead as far as they were needed, at most TABLE_BYTES."""

    def __init__(self, module: Any) -> None:
        self._module = module
        kind = getattr(module, "rope_type", None)
        self._steady = kind in _STEADY_ROPES
        self._table = torch.empty(0)

    def at(self, places: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [rows, turned width] of `places` [1, rows], of the dtype of `like`."""
        if self._steady and places.device.type == "cpu" and self._reaches(int(places.max()) + 1, like):
            cos, sin = self._table.index_select(0, places[0]).chunk(2, dim=-1)
            return cos, sin
        cos, sin = self._module(like, places)
        return cos[0], sin[0]

    def _reaches(self, places: int, like: Tensor) -> bool:
        """Whether the table has so many places of the dtype of `like`, or now has."""
        if places <= len(self._table) and self._table.dtype is like.dtype:
            return True
        rows = 1 << max(places - 1, 255).bit_length()
        if rows * 4 * int(self._module.inv_freq.numel()) * like.element_size() > TABLE_BYTES:
            return False
        self._table = torch.cat(self._module(like, torch.arange(rows)[None]), dim=-1)[0]
        return True


def stack_forward(module: Any, steps: Sequence[Step], norms: Norms, result: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of a decoder around its layers' lean forms; `result` makes what it returns."""
    own = type(module).forward
    embed, turns = module._modules["embed_tokens"], RotaryTable(module._modules["rotary_emb"])
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
        cos, sin = turns.at(position_ids, embedded)
        residual, delta = steps[0](embedded, None, cos, sin)
        for step in steps[1:]:
            residual, delta = step(residual, delta, cos, sin)
        return result(last_hidden_state=close(residual, delta)[1])

    return forward
