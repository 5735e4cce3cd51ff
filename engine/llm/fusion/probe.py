"""Numerical verification of fused modules against recorded calls.

The probe pass has PROBE_ROWS tokens of one synthetic sequence, some at distant positions of the rotary embedding.
`ProbeForm` computes attention among these rows without KV pages and records its arguments (scale, window, soft cap). A
fused module agrees if, called with the recorded arguments, each row of its result differs from the recorded one by at
most `TOLERANCE` of that row's largest magnitude.
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
"""Largest position of the probe, if the model's context is that long."""
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float64: 1e-9}
"""Relative tolerance by dtype: a few roundings of a row's largest magnitude, as one layer causes.

Roundings do not accumulate: `fuse` compares the stack with the model's own forward over the same fused layers."""
SMALL = 1e-3
"""Factor of the second input of norms, at which their epsilon matters."""


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """Arguments of a module's attention call: head counts, head width, scale, window and soft cap."""

    heads: int
    kv_heads: int
    width: int
    scale: float
    window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True)
class Call:
    """A recorded call of a module: arguments and result."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class ProbeForm:
    """Attention among the probe's rows; an `AttentionBackend` without pages. facts: by id of LayerPages."""

    def __init__(self) -> None:
        self.facts: dict[int, AttentionFacts] = {}

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
        self.facts[id(layer)] = AttentionFacts(heads, key.shape[0], width, scale, window, softcap)
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
def probing(model: nn.Module, form: ProbeForm) -> Iterator[None]:
    """Attach `form` to every module of `model` within the context; restore the previous pages afterwards.

    Linear layers are skipped and not referenced, since they may be freed meanwhile.
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


def probe_inputs(model: Any) -> dict[str, Any]:
    """Return the probe pass's keyword arguments: `input_ids` and `position_ids` int64 [1, PROBE_ROWS].

    Positions in three dimensions are [3, 1, PROBE_ROWS].
    """
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    farthest = rope.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None) or 64
    far = min(int(farthest) - 1, FAR_TOKENS)
    near = PROBE_ROWS - 3
    places = [min(at, far) for at in range(near)] + [far // 3, far // 2, far]
    ids = [(7 + 31 * at) % int(config.vocab_size) for at in range(PROBE_ROWS)]
    made = torch.tensor([ids, places], device=next(model.parameters()).device)
    positions = made[1:]
    if rope.get("mrope_section"):  # a picture's tokens have other rows and columns than times
        positions = torch.stack([positions, positions.flip(1), positions // 2])
    return {"input_ids": made[:1], "position_ids": positions, "use_cache": False}


def record_calls(modules: Iterable[nn.Module], run: Callable[[], Any]) -> dict[nn.Module, Call]:
    """Record the first call of each of `modules` during `run`; modules without a call are absent."""
    calls: dict[nn.Module, Call] = {}

    def record(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        calls.setdefault(module, Call(args, kwargs, result))

    hooks = [module.register_forward_hook(record, with_kwargs=True) for module in modules]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def mismatch(module: Callable[..., Any], call: Call) -> str | None:
    """Repeat `call` on `module`; return how the result differs, or None if it agrees."""
    try:
        found = module(*call.args, **call.kwargs)
    except Exception as error:  # a pattern that does not fit can fail in any way
        return f"fused it fails: {type(error).__name__}"
    return difference(output_of(found), output_of(call.result))


def output_of(result: Any) -> Any:
    """Return the main tensor of a result: itself, a tuple's first item, or the last hidden state."""
    if isinstance(result, tuple):
        return result[0]
    return result if isinstance(result, Tensor) else getattr(result, "last_hidden_state", None)


def difference(found: Any, expected: Any) -> str | None:
    """Return how two tensors differ beyond TOLERANCE, or None if they agree."""
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor):
        return f"it gives a {type(expected).__name__}"
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"fused it gives {found.dtype} {list(found.shape)}, not {expected.dtype} {list(expected.shape)}"
    size = expected.abs().amax(-1, keepdim=True).double()
    error = ((found.double() - expected.double()).abs() / size.clamp_min(1e-30)).max()
    allowed = TOLERANCE.get(expected.dtype, 0.0)
    # NaN compares false, so it counts as different
    return None if bool(error <= allowed) else f"fused it differs by {float(error):.1e} of a row's largest number"
