"""Test cases of the sampling kernel and its mismatches against the reference.

The reference is `weftline.engine.llm.sampling.draw` in torch's operations on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weftline.engine.llm.kernels.draw import TILE, draw_launch
from weftline.engine.llm.sampling.draw import DrawSettings, draw

VOCABULARY = 250
"""More than one of the interpreter's tiles, and no multiple of them."""
INTERPRETED_TILE = 128
Options = dict[str, float]


def draw_error(rows: Sequence[tuple[Tensor, Options]], device: torch.device) -> float:
    """Return how many rows' tokens are wrong.

    Where the row's largest logit is not finite, any token of a logit that is not finite is right.
    """
    logits = torch.stack([row for row, _ in rows])
    settings = _settings([options for _, options in rows])
    expected = draw(logits, settings)
    given: dict[str, Any] = {
        name: None if one is None else one.to(device)
        for name in ("temperature", "seed", "position", "top_k", "top_p", "min_p", "typical_p")
        for one in (getattr(settings, name),)
    }
    tile = TILE if device.type == "cuda" else INTERPRETED_TILE
    out, launch = draw_launch(logits.to(device), **given, tile=tile)
    launch.run()
    found = out.cpu()
    wrong = 0
    for row, token, right in zip(logits, found.tolist(), expected.tolist()):
        if not 0 <= token < len(row):
            wrong += 1
        elif torch.isfinite(row.amax()):
            wrong += token != right
        else:
            wrong += bool(torch.isfinite(row[token]))
    return float(wrong)


def _settings(options: Sequence[Options]) -> DrawSettings:
    def column(name: str, off: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor([one.get(name, off) for one in options], dtype=dtype)

    rows = torch.arange(len(options))
    seed, position = rows * 6364136223846793005 - 77, rows * 31 + 5
    temperature = column("temperature", 0.8)
    if not any(name != "temperature" for one in options for name in one):
        return DrawSettings(temperature, seed, position)
    narrowing = (column("top_k", 0, torch.int64), column("top_p", 1), column("min_p", 0), column("typical_p", 1))
    return DrawSettings(temperature, seed, position, *narrowing)


def _random(seed: int, scale: float = 3.0) -> Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * scale


def _few(count: int) -> Tensor:
    row = torch.full((VOCABULARY,), -torch.inf)
    row[7 : 7 + 60 * count : 60] = torch.arange(count) / 3
    return row


def _with(row: Tensor, value: float, *at: int) -> Tensor:
    row = row.clone()
    row[list(at)] = value
    return row


_TIES = _random(3).round()
_BROAD = _random(4, 0.1)
_PEAK = _with(torch.zeros(VOCABULARY), 60.0, 190)
_EACH: tuple[Options, ...] = (
    {"top_k": 1}, {"top_k": 20}, {"top_k": VOCABULARY - 1}, {"top_k": 1 << 40}, {"top_p": 1e-6}, {"top_p": 0.9},
    {"top_p": 0.9999}, {"min_p": 0.05}, {"min_p": 1.0}, {"typical_p": 0.9}, {"typical_p": 1e-9},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9}, {"top_k": 40, "top_p": 0.9, "temperature": 0.0},
)  # fmt: skip


_SOME = (_EACH[1], _EACH[5], _EACH[9], _EACH[11])


def _rounds_of(row: Tensor) -> list[tuple[Tensor, Options]]:
    return [(row, options) for options in (_SOME if len(set(row.tolist())) > 2 else _SOME[:2])]


def draw_cases() -> dict[str, Callable[[], list[tuple[Tensor, Options]]]]:
    """Return rounds by name; made when they are called."""
    whole: dict[str, Callable[[], list[tuple[Tensor, Options]]]] = {
        "nothing narrows": lambda: [(_random(at), {"temperature": (0.0, 0.7, 2.0)[at % 3]}) for at in range(9)],
        "each row its own": lambda: (
            [(_random(at), options) for at, options in enumerate(_EACH)]
            + [(_random(99), {}), (_random(99), {"temperature": 0.0})]
        ),
    }
    rows = {
        "ties": _TIES, "a broad distribution": _BROAD, "uniform": torch.zeros(VOCABULARY), "one peak": _PEAK,
        "both zeros": _with(torch.zeros(VOCABULARY), -0.0, *range(0, VOCABULARY, 3)),
        "few tokens are possible": _few(4), "one token is possible": _few(1),
        "far from zero": _random(5) + 3e4, "very large": _random(6) * 1e36,
    }  # fmt: skip
    for name, row in rows.items():
        whole[name] = partial(_rounds_of, row)
    nothing = torch.full((VOCABULARY,), -torch.inf)
    unsound = (_with(_random(7), torch.nan, 3, 200), _with(_random(7), torch.inf, 5), nothing)
    whole["no usable numbers"] = lambda: [(row, options) for row in unsound for options in (*_SOME[:3], {})]
    return whole
