"""Statistics of an llm step: the engine's snapshot and the token counters of its node."""

from __future__ import annotations

from dataclasses import dataclass

from weftline.engine.llm.request import TokenUpdate


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Snapshot: pages by state, requests by state, and totals since the engine was created.

    paused:        running or waiting requests that are not scheduled for now.
    drafted:       draft tokens of speculation; accepted: how many were accepted.
    page_bytes:    size of one page.
    prompts_max:   most prompt tokens of a round for now; reduced after out-of-memory errors.
    out_of_memory: passes that ran out of memory.
    graphs:        CUDA graphs of rounds; ungraphed: round sizes whose graph could not be recorded.
    """

    pages_free: int
    pages_idle: int
    pages_used: int
    running: int
    waiting: int
    rounds: int
    preemptions: int
    prefix_asked_tokens: int
    prefix_hit_tokens: int
    paused: int = 0
    drafted: int = 0
    accepted: int = 0
    page_bytes: int = 0
    prompts_max: int = 0
    out_of_memory: int = 0
    graphs: int = 0
    ungraphed: int = 0


@dataclass(slots=True)
class TokenCounters:
    """Tokens of prompts and answers, and ends of answers; a request with several answers counts each.

    stopped: ended by a stop token or stop string.   cut: ended at the token limit.
    failed:  ended with an error or deadline.        dropped: cancelled by the caller.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    stopped: int = 0
    cut: int = 0
    failed: int = 0
    dropped: int = 0

    def add(self, update: TokenUpdate, first: bool) -> None:
        """Count an update; `first`: the first one of its request."""
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

    def figures(self) -> dict[str, float]:
        """Return the counters under the names that the worker reports."""
        return {
            "prompt_tokens_total": self.prompt_tokens,
            "completion_tokens_total": self.completion_tokens,
            "finished_stop_total": self.stopped,
            "finished_length_total": self.cut,
            "finished_error_total": self.failed,
            "finished_abort_total": self.dropped,
        }


def figures(counters: TokenCounters, stats: EngineStats) -> dict[str, float]:
    """Return counters and gauges under the names that the worker reports."""
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
        "out_of_memory_total": stats.out_of_memory,
        "graphs": stats.graphs,
        "sizes_without_graph": stats.ungraphed,
        "preemptions_total": stats.preemptions,
        "prefix_asked_tokens_total": stats.prefix_asked_tokens,
        "prefix_hit_tokens_total": stats.prefix_hit_tokens,
        "draft_tokens_total": stats.drafted,
        "accepted_tokens_total": stats.accepted,
        **counters.figures(),
    }
