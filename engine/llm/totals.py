"""Counters and gauges of an llm step, exported from its process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weftline.engine.llm.request import Update

if TYPE_CHECKING:
    from weftline.engine.llm.engine import EngineStats


@dataclass(slots=True)
class Totals:
    """Tokens that were read and written, and how answers ended; a request with several answers counts each.

    stopped:   ended by themselves, or by a stop string.   cut: at their most tokens.
    failed:    with an error, deadlines among them.        dropped: cancelled by whoever asked.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    stopped: int = 0
    cut: int = 0
    failed: int = 0
    dropped: int = 0

    def take(self, update: Update, first: bool) -> None:
        """Take in what a round brought; `first`: nothing came of this request before."""
        if update.error is not None:
            self.failed += 1
            return
        if first:
            self.prompt_tokens += update.prompt_tokens
        self.completion_tokens += len(update.tokens)
        if update.finish == "stop":
            self.stopped += 1
        elif update.finish is not None:
            self.cut += 1


def figures(totals: Totals, stats: EngineStats) -> dict[str, float]:
    """Return them under the names that leave the worker; pages and requests are those of this moment."""
    return {
        "running": stats.running,
        "waiting": stats.waiting,
        "paused": stats.paused,
        "pages_used": stats.pages_used,
        "pages_idle": stats.pages_idle,
        "pages_free": stats.pages_free,
        "page_bytes": stats.page_bytes,
        "rounds_total": stats.rounds,
        "round_prompt_tokens_max": stats.prompts_max,
        "out_of_memory_total": stats.short,
        "graphs": stats.graphs,
        "sizes_without_graph": stats.ungraphed,
        "preemptions_total": stats.preemptions,
        "prefix_asked_tokens_total": stats.prefix_asked_tokens,
        "prefix_hit_tokens_total": stats.prefix_hit_tokens,
        "guessed_tokens_total": stats.guessed,
        "right_tokens_total": stats.right,
        "prompt_tokens_total": totals.prompt_tokens,
        "completion_tokens_total": totals.completion_tokens,
        "finished_stop_total": totals.stopped,
        "finished_length_total": totals.cut,
        "finished_error_total": totals.failed,
        "finished_abort_total": totals.dropped,
    }
