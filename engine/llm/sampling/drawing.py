"""Batched draw of one token for each row, by its temperature and filters.

    settings = DrawSettings(temperature, seed, position, top_p=top_p)
    tokens = draw(logits, settings)

A draw is the token with the largest logit / temperature + Gumbel noise (`weftline.engine.llm.sampling.noise`), among
those that narrowing leaves (`weftline.engine.llm.sampling.narrowing`); of equal ones the lowest. `draw` waits for
nothing and has no shape that depends on data, so a CUDA graph can hold it. On a GPU it is one kernel that sorts nothing
(`weftline.engine.llm.kernels.draw`). In torch's operations, which define the result, narrowing costs sorting whole
rows; `try_draw` sorts their beginnings, and says for which rows that was enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from weftline.engine.llm.sampling.mass import log_mass, parts
from weftline.engine.llm.sampling.narrowing import keep_likely, keep_typical
from weftline.engine.llm.sampling.noise import to_keys, to_log_waits, to_uniforms

COLD = 1e-5
"""A temperature below it is 0: nothing but the likeliest token has a chance that float32 could tell from none."""


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """How each row is drawn; all tensors are [rows], on the logits' device. None: off for all rows.

    temperature: float32; 0 takes the likeliest.   seed, position: int64, what the row's noise comes from.
    top_k: int64, 0 is off.   top_p, typical_p: float32, 1 is off.   min_p: float32, 0 is off.
    """

    temperature: Tensor
    seed: Tensor
    position: Tensor
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    typical_p: Tensor | None = None

    @property
    def narrows(self) -> bool:
        return any(one is not None for one in (self.top_k, self.top_p, self.min_p, self.typical_p))


@cache
def draw_kernel(device: torch.device) -> Callable[..., Tensor] | None:
    """Return the kernel that draws on `device`, None where torch's operations do."""
    from weftline.engine.llm.kernels.availability import available

    if available(device) is not None:
        return None
    from weftline.engine.llm.kernels.draw import draw_tokens

    return draw_tokens


def draw(logits: Tensor, settings: DrawSettings) -> Tensor:
    """Return int64 [rows], a token for each row of `logits`, float32 [rows, vocabulary], which is left as it is."""
    kernel = draw_kernel(logits.device)
    if kernel is not None:
        return kernel(
            *(logits, settings.temperature, settings.seed, settings.position),
            *(settings.top_k, settings.top_p, settings.min_p, settings.typical_p),
        )
    if settings.narrows:
        return try_draw(logits, settings, logits.shape[1])[0]
    keys = to_keys(settings.seed, settings.position)
    warm = settings.temperature >= COLD
    scale = torch.where(warm, settings.temperature, 1.0)[:, None]
    tokens = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)[None]
    return torch.cat([_best(logits[at] / scale[at], keys[at], tokens, warm[at]) for at in parts(logits)])


def try_draw(logits: Tensor, settings: DrawSettings, count: int) -> tuple[Tensor, Tensor]:
    """Return what `draw` does, from the `count` largest logits of each row, and bool [rows]: whether that was enough.

    Where it was not, the token is of no use. It always is enough when `count` is the vocabulary.
    """
    warm = settings.temperature >= COLD
    if draw_kernel(logits.device) is not None:
        return draw(logits, settings), torch.ones_like(warm)
    scale = torch.where(warm, settings.temperature, 1.0)[:, None]
    whole = count >= logits.shape[1]
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True) if whole else logits.topk(count)
    ordered = ordered / scale
    mass = None if whole or settings.top_p is None else log_mass(logits, scale)
    ordered = keep_likely(ordered, mass, settings.top_k, settings.top_p, settings.min_p)
    enough = torch.ones_like(warm) if whole else ~warm | (ordered[:, -1] == -torch.inf)
    if settings.typical_p is not None:
        ordered = keep_typical(ordered, settings.typical_p)
    keys = to_keys(settings.seed, settings.position)
    place = _best(ordered, keys, tokens.to(torch.int32), warm)
    return tokens.gather(1, place[:, None])[:, 0], enough


def _best(values: Tensor, keys: Tensor, tokens: Tensor, warm: Tensor) -> Tensor:
    """Return int64 [rows], the columns of the winners; `values` is overwritten."""
    # No wait is 0 or endless, so a cold row has exactly its own values, and the likeliest wins.
    return values.addcmul_(to_log_waits(to_uniforms(keys, tokens)), -warm.to(values.dtype)[:, None]).argmax(-1)
