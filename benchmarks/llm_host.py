"""What the engine itself costs in a decode round: everything but the model, the drawing of tokens and their text.

    python -m benchmarks.llm_host                 # 128 sequences that decode, pages as after a long run
    python -m benchmarks.llm_host --sequences 32

A runner without a model takes its place: it does all that the real one does for a round on the host (collecting tokens,
places and slots, telling the attention what to read) and returns logits that were made before. Text, pieces and the
drawing of tokens are not in the figure: on a GPU the former overlap with the model, the latter runs there. Both are
printed beside it.
"""

from __future__ import annotations

import argparse
import cProfile
import platform
import pstats
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from weftline.engine.llm.attention import Span
from weftline.engine.llm.cpu.attention import CpuAttention
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.rounds import RoundLimits, Share

VOCABULARY = 4096


class NoModel:
    """Stands in for a runner: prepares rounds as the real one does and computes nothing."""

    def __init__(self, pages: int, page_tokens: int) -> None:
        self.pages, self.page_tokens, self.page_bytes = pages, page_tokens, 1
        self.context_max, self.vocabulary = 4096, VOCABULARY
        self.ends: frozenset[int] = frozenset()
        self.head = self.graphs = None
        self.drawing_s = 0.0
        self._form = CpuAttention(page_tokens)
        self._logits = torch.randn(256, VOCABULARY)

    def adapter(self, name: str) -> tuple[int, bytes]:
        return 0, b""

    def hold_adapter(self, name: str) -> None: ...

    def release_adapter(self, name: str) -> None: ...

    def run(self, shares: Sequence[Share], copies: Sequence[tuple[int, int]] = ()) -> Any:
        tokens: list[int] = []
        places: list[int] = []
        spans: list[Span] = []
        keep: list[int] = []
        for share in shares:
            row, start, count = len(tokens), share.start, share.count
            spans.append(Span(row, start, count, share.sequence.table))
            tokens += share.tokens if count > 1 else share.sequence.tokens[start : start + 1]
            places += range(start, start + count)
            keep += range(row + count - share.rows, row + count)
        self._form.fill(spans)
        torch.tensor([tokens, places])
        torch.tensor(keep)
        return self._logits[: len(keep)]


def time_rounds(engine: Engine, sampler: Any, rounds: int) -> tuple[list[float], list[float]]:
    """Return milliseconds of each round without drawing, and of the drawing."""
    drawing: list[float] = []
    pick = sampler.pick

    def timed(*args: Any) -> Any:
        started = time.perf_counter()
        picked = pick(*args)
        drawing.append((time.perf_counter() - started) * 1e3)
        return picked

    sampler.pick = timed
    whole = []
    for _ in range(rounds):
        started = time.perf_counter()
        engine.step(started * 1e3)
        whole.append((time.perf_counter() - started) * 1e3)
    sampler.pick = pick
    return [a - b for a, b in zip(whole, drawing, strict=True)], drawing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    engine = Engine(NoModel(16_384, 16), None, RoundLimits(16_384, options.sequences))  # type: ignore[arg-type]
    for at in range(options.sequences):
        engine.add(at, [at] * (100 + at), SamplingParams(tokens_max=2000, ignore_eos=True))
    for _ in range(50):
        engine.step()
    sampler = engine._compute._sampler
    if options.profile:
        profiler = cProfile.Profile()
        profiler.runcall(time_rounds, engine, sampler, options.rounds)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
        return
    host, drawing = time_rounds(engine, sampler, options.rounds)
    quarter = len(host) // 4
    host, drawing = sorted(host), sorted(drawing)
    print(f"Python {platform.python_version()}, torch {torch.__version__}; {options.sequences} sequences decode")
    print(
        f"host, a round   {statistics.median(host):.2f} ms [{host[quarter]:.2f}-{host[3 * quarter]:.2f}], "
        f"least {host[0]:.2f}"
    )
    print(f"drawing, on CPU {statistics.median(drawing):.2f} ms (greedy; on a GPU it runs there)")


if __name__ == "__main__":
    main()
