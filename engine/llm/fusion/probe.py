"""Numerical verification of fused modules against recorded calls.

The pass has PROBE_ROWS tokens of one made-up sequence, at places that also reach far into the rotary embedding.
Attention is computed plainly among these rows, without pages, by whatever model code calls `weftline_paged`; how it is
called (scale, window, soft cap) is written down. A module agrees when, called with the same arguments again, each row
of its result differs from the noted one by no more than `TOLERANCE` of that row's largest number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weftline.engine.llm.attention import LayerPages, Span

PROBE_ROWS = 9
FAR_TOKENS = 2048
"""The farthest place of the probe, where the model reaches that far."""
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float64: 1e-9}
"""By dtype, relative to the largest number of a row: some roundings of it, one after the other, as one layer makes.

They do not add up over layers: `fuse` compares the stack with the same layers called by the model's own code."""
SMALL = 1e-3
"""Norms are also shown the same numbers so much smaller, where their epsilon matters."""


@dataclass(frozen=True, slots=True)
class Facts:
    """How a module's attention is called: [heads, rows, width] of queries, kv_heads of keys, and its options."""

    heads: int
    kv_heads: int
    width: int
    scale: float
    window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module, and what it returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class ProbeForm:
    """Attention among the rows of the probe; an `AttentionForm` without memory. `facts` are by id of LayerPages."""

    def __init__(self) -> None:
        self.facts: dict[int, Facts] = {}

    def fill(self, spans: Sequence[Span]) -> None:
        raise RuntimeError("a probe has no rounds")

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
        heads, rows, width = query.shape
        self.facts[id(layer)] = Facts(heads, key.shape[0], width, scale, window, softcap)
        key, value = (t.float().repeat_interleave(heads // key.shape[0], dim=0) for t in (key, value))
        scores = query.float() @ key.transpose(1, 2) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        at = torch.arange(rows, device=query.device)
        back = at[:, None] - at[None]
        hidden = (back < 0) | (back >= (rows if window is None else min(window, rows)))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return (weights @ value).transpose(0, 1).to(query.dtype)


@contextmanager
def seated(model: nn.Module, form: ProbeForm) -> Iterator[None]:
    """Let every module of `model` attend through `form`; afterwards they have what they had.

    Linear layers do not attend, and are not held on to: they may be freed in between.
    """
    before: list[tuple[Any, Any]] = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            continue
        before.append((module, module.__dict__.get("weftline_pages")))
        empty = torch.empty(0)
        module.__dict__["weftline_pages"] = LayerPages(form, empty, empty)
    try:
        yield
    finally:
        for module, pages in before:
            if pages is None:
                module.__dict__.pop("weftline_pages", None)
            else:
                module.__dict__["weftline_pages"] = pages


def ask(model: Any) -> dict[str, Any]:
    """Return the keyword arguments of a small pass for `model`: `input_ids` and `position_ids` [1, PROBE_ROWS]."""
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    farthest = rope.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None) or 64
    far = min(int(farthest) - 1, FAR_TOKENS)
    near = PROBE_ROWS - 3
    places = [min(at, far) for at in range(near)] + [far // 3, far // 2, far]
    ids = [(7 + 31 * at) % int(config.vocab_size) for at in range(PROBE_ROWS)]
    made = torch.tensor([ids, places], device=next(model.parameters()).device)
    return {"input_ids": made[:1], "position_ids": made[1:], "use_cache": False}


def watch(modules: Iterable[nn.Module], run: Callable[[], Any]) -> dict[nn.Module, Call]:
    """Return the first call of each of `modules` during `run`; those that were not called are absent."""
    calls: dict[nn.Module, Call] = {}

    def note(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        calls.setdefault(module, Call(args, kwargs, result))

    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in modules]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def differs(module: Callable[..., Any], call: Call) -> str | None:
    """Call `module` again and return how its result differs from the noted one; None when it agrees."""
    try:
        found = module(*call.args, **call.kwargs)
    except Exception as error:  # a pattern that does not fit can fail in any way
        return f"fused it fails: {type(error).__name__}"
    return unequal(first(found), first(call.result))


def first(result: Any) -> Any:
    """Return the tensor that a module's result is about: itself, a tuple's first, or a model's last hidden state."""
    if isinstance(result, tuple):
        return result[0]
    return result if isinstance(result, Tensor) else getattr(result, "last_hidden_state", None)


def unequal(found: Any, expected: Any) -> str | None:
    """Return how two tensors differ, or None when they agree."""
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor):
        return f"it gives a {type(expected).__name__}"
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"fused it gives {found.dtype} {list(found.shape)}, not {expected.dtype} {list(expected.shape)}"
    size = expected.abs().amax(-1, keepdim=True).double()
    error = ((found.double() - expected.double()).abs() / size.clamp_min(1e-30)).max()
    allowed = TOLERANCE.get(expected.dtype, 0.0)
    # written so that NaN, which is neither more nor less, counts as different
    return None if bool(error <= allowed) else f"fused it differs by {float(error):.1e} of a row's largest number"
