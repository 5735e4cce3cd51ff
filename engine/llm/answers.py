"""What one request has said so far, put together from the engine's updates for whoever reads the step's outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from weftline.engine.llm.reply import TokenInfo
from weftline.engine.llm.request import Update


@dataclass(slots=True)
class _Answer:
    texts: list[str] = field(default_factory=list)
    finish: str | None = None
    tokens: int = 0
    guessed: int = 0
    right: int = 0
    logprobs: list[TokenInfo] = field(default_factory=list)


class Answers:
    """The answers of one request. decode: token ids to text, for the names of tokens beside their log-probabilities."""

    def __init__(self, count: int, decode: Callable[[Sequence[int]], str]) -> None:
        self._answers = [_Answer() for _ in range(count)]
        self._decode = decode
        self._prompt: tuple[TokenInfo, ...] = ()
        self._prompt_tokens = self._cached = 0

    @property
    def streams(self) -> bool:
        """Whether pieces of text can be told as they come: of one answer, not of several at once."""
        return len(self._answers) == 1

    @property
    def begun(self) -> bool:
        """Whether anything was taken yet: a prompt has at least one token."""
        return self._prompt_tokens > 0

    def take(self, update: Update) -> None:
        answer = self._answers[update.index]
        if update.text:
            answer.texts.append(update.text)
        answer.finish = update.finish or answer.finish
        answer.tokens = update.completion_tokens
        answer.logprobs += update.logprobs
        self._prompt = update.prompt_logprobs or self._prompt
        self._prompt_tokens, self._cached = update.prompt_tokens, update.cached_tokens
        answer.guessed, answer.right = update.guessed_tokens, update.right_tokens

    def outputs(self) -> dict[str, Any]:
        """Return the step's outputs: text and usage of the first answer, and all answers."""
        first = self._answers[0]
        usage = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": sum(answer.tokens for answer in self._answers),
            "cached_tokens": self._cached,
            "finish_reason": first.finish,
        }
        if any(answer.guessed for answer in self._answers):
            usage["guessed_tokens"] = sum(answer.guessed for answer in self._answers)
            usage["right_tokens"] = sum(answer.right for answer in self._answers)
        answers = [self._to_json(index, answer) for index, answer in enumerate(self._answers)]
        if self._prompt:
            answers[0]["prompt_logprobs"] = [None, *map(self._token, self._prompt)]
        return {"text": "".join(first.texts), "usage": usage, "answers": answers}

    def _to_json(self, index: int, answer: _Answer) -> dict[str, Any]:
        told: dict[str, Any] = {"index": index, "text": "".join(answer.texts), "finish_reason": answer.finish}
        if answer.logprobs:
            told["logprobs"] = [self._token(one) for one in answer.logprobs]
        return told

    def _token(self, one: TokenInfo) -> dict[str, Any]:
        top = [{"id": token, "token": self._decode([token]), "logprob": logprob} for token, logprob in one.top]
        return {"id": one.token, "token": self._decode([one.token]), "logprob": one.logprob, "top": top}
