"""Statistics line of a chat answer: tokens, rate, time to first token and prefix cache hits.

Pure: the times are handed in, the counts come from the llm step's `usage`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Figures:
    """One answer in numbers.

    tokens:        of the answer.
    prompt_tokens: of all that was sent, the conversation so far among it.
    cached_tokens: of these, how many the model did not have to read again.
    first_ms:      from asking to the first piece of text.
    total_ms:      from asking to the end.
    finish:        `stop`: the answer ended; `length`: it was cut.
    """

    tokens: int
    prompt_tokens: int
    cached_tokens: int
    first_ms: float
    total_ms: float
    finish: str = "stop"

    @classmethod
    def read(cls, usage: Mapping[str, Any], first_ms: float, total_ms: float) -> Figures:
        """Return the figures of an answer from its `usage` output and two times in milliseconds."""
        return cls(
            usage["completion_tokens"],
            usage["prompt_tokens"],
            usage["cached_tokens"],
            first_ms,
            total_ms,
            usage["finish_reason"],
        )

    def __str__(self) -> str:
        rate = rate_per_s([self])
        tokens = _counted(self.tokens, "token") + (f" at {rate:.1f}/s" if rate else "")
        return f"{tokens}, first after {self.first_ms:.0f} ms, {_cached([self])}"


def rate_per_s(answers: Sequence[Figures]) -> float | None:
    """Return tokens a second after the first of each answer; None when no answer has a second one."""
    more = sum(one.tokens - 1 for one in answers if one.tokens > 1)
    took_ms = sum(one.total_ms - one.first_ms for one in answers if one.tokens > 1)
    return more / took_ms * 1e3 if more and took_ms > 0 else None


def summary(answers: Sequence[Figures], turns: int, stopped: int) -> list[str]:
    """Return lines about all answers of a chat.

    turns:   questions and answers that the conversation has now.
    stopped: answers that were cut short with Ctrl-C, which have no figures.
    """
    lines = [f"conversation: {_counted(turns, 'question')}"]
    if answers:
        last, rate = answers[-1], rate_per_s(answers)
        lines[0] += f", {last.prompt_tokens + last.tokens} tokens at the last answer"
        first_ms = sorted(one.first_ms for one in answers)[len(answers) // 2]
        tokens = _counted(sum(one.tokens for one in answers), "token")
        lines.append(f"answers: {len(answers)} with {tokens}" + (f" at {rate:.1f}/s" if rate else ""))
        lines.append(f"first token: after {first_ms:.0f} ms (median)")
        lines.append(f"prefix cache: {_cached(answers)}")
    if stopped:
        lines.append(f"stopped: {_counted(stopped, 'answer')}")
    return lines


def _cached(answers: Sequence[Figures]) -> str:
    cached, prompt = sum(one.cached_tokens for one in answers), sum(one.prompt_tokens for one in answers)
    share = 100 * cached / prompt if prompt else 0.0
    return f"{cached} of {_counted(prompt, 'prompt token')} cached ({share:.0f}%)"


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'s' if count != 1 else ''}"
