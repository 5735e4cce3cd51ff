"""Accumulated output of one request of an llm step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from weftline.engine.llm.reply import TokenInfo
from weftline.engine.llm.request import Update

_NOTHING = Update(-1)


@dataclass(slots=True)
class _Answer:
    """One answer so far. latest: the newest update, whose counts are those of the whole answer."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenInfo] = field(default_factory=list)
    latest: Update = field(default_factory=lambda: _NOTHING)


class Answers:
    """The answers of one request. decode: token ids to text, for the names of tokens beside their log-probabilities."""

    def __init__(self, count: int, decode: Callable[[Sequence[int]], str]) -> None:
        self._answers = [_Answer() for _ in range(count)]
        self._decode = decode
        self._prompt: tuple[TokenInfo, ...] = ()
        self._latest = _NOTHING  # of any answer

    @property
    def streams(self) -> bool:
        """Whether pieces of text can be told as they come: of one answer, not of several at once."""
        return len(self._answers) == 1

    @property
    def begun(self) -> bool:
        """Return whether any update was taken yet."""
        return self._latest is not _NOTHING

    def take(self, update: Update) -> None:
        answer = self._answers[update.index]
        answer.latest = self._latest = update
        if update.text:
            answer.texts.append(update.text)
        if update.logprobs:
            answer.logprobs += update.logprobs
        if update.prompt_logprobs:
            self._prompt = update.prompt_logprobs

    def outputs(self) -> dict[str, Any]:
        """Return the step's outputs: text and usage of the first answer, and all answers."""
        first = self._answers[0]
        usage = {
            "prompt_tokens": self._latest.prompt_tokens,
            "completion_tokens": sum(answer.latest.completion_tokens for answer in self._answers),
            "cached_tokens": self._latest.cached_tokens,
            "finish_reason": first.latest.finish,
        }
        if any(answer.latest.guessed_tokens for answer in self._answers):
            usage["guessed_tokens"] = sum(answer.latest.guessed_tokens for answer in self._answers)
            usage["right_tokens"] = sum(answer.latest.right_tokens for answer in self._answers)
        answers = [self._to_json(index, answer) for index, answer in enumerate(self._answers)]
        if self._prompt:
            answers[0]["prompt_logprobs"] = [None, *map(self._token, self._prompt)]
        return {"text": "".join(first.texts), "usage": usage, "answers": answers}

    def _to_json(self, index: int, answer: _Answer) -> dict[str, Any]:
        told: dict[str, Any] = {"index": index, "text": "".join(answer.texts), "finish_reason": answer.latest.finish}
        if answer.logprobs:
            told["logprobs"] = [self._token(one) for one in answer.logprobs]
        return told

    def _token(self, one: TokenInfo) -> dict[str, Any]:
        top = [{"id": token, "token": self._decode([token]), "logprob": logprob} for token, logprob in one.top]
        return {"id": one.token, "token": self._decode([one.token]), "logprob": one.logprob, "top": top}
