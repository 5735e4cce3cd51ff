"""Messages of a chat, saved to a file on request, and the token counts of its answers.

Each question is sent with all earlier messages unchanged, so the model finds them in its prefix cache. Only an answered
question changes a conversation. Pure but for `save` and `load`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from weftline.cli.plan import counted
from weftline.errors import InputError
from weftline.nodes.json_value import NotJson
from weftline.nodes.strict_json import parse

FILE_BYTES_MAX = 16 << 20
"""Largest saved conversation that is read, far more than any model's context."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message in the form of the llm node's `messages` input."""

    role: Literal["system", "user", "assistant"]
    content: str


class Saved(msgspec.Struct, frozen=True):
    """File format of a conversation. weftline_chat: version of the format."""

    weftline_chat: Literal[1]
    messages: list[Message]
    model: str = ""
    sampling: dict[str, Any] = {}


class Conversation:
    """Messages in order: optionally one of the system, then of user and assistant in turn."""

    def __init__(self, system: str = "", messages: Sequence[Message] = ()) -> None:
        self._messages = list(messages)
        if system:
            self.set_system(system)

    @property
    def messages(self) -> list[dict[str, str]]:
        return [msgspec.to_builtins(message) for message in self._messages]

    @property
    def system(self) -> str:
        return self._messages[0].content if self._messages and self._messages[0].role == "system" else ""

    @property
    def turns(self) -> int:
        """Number of answered questions."""
        return sum(message.role == "user" for message in self._messages)

    def with_question(self, question: str) -> list[dict[str, str]]:
        """Return the messages to send for a question; the conversation is unchanged."""
        return [*self.messages, {"role": "user", "content": question}]

    def as_text(self, question: str) -> str:
        """Return the messages to send as plain text, for a model without a chat template."""
        return "\n".join(message["content"] for message in self.with_question(question))

    def add(self, question: str, answer: str) -> None:
        """Append a question and its answer."""
        self._messages += [Message("user", question), Message("assistant", answer)]

    def set_system(self, system: str) -> None:
        """Replace the system message; '' removes it."""
        rest = self._messages[1:] if self.system else self._messages
        self._messages = [Message("system", system), *rest] if system else list(rest)

    def reset(self) -> None:
        """Remove all messages but the system's."""
        self._messages = self._messages[:1] if self.system else []

    def save(self, file: Path, *, model: str = "", sampling: Mapping[str, Any] | None = None) -> None:
        """Write the conversation as JSON, atomically.

        InputError when the file cannot be written, or exists and is not a saved conversation.
        """
        if file.exists() and not _is_saved(file):
            raise InputError(f"{file}: exists and is not a saved conversation; choose another name")
        encoded = msgspec.json.encode(Saved(1, self._messages, model, dict(sampling or {})))
        try:
            handle, part = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
            try:
                with os.fdopen(handle, "wb") as stream:
                    stream.write(msgspec.json.format(encoded, indent=1) + b"\n")
                Path(part).replace(file)
            except BaseException:
                Path(part).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise InputError(f"{file}: cannot be written: {error.strerror}") from None

    @classmethod
    def load(cls, file: Path) -> Conversation:
        """Return the conversation in a file of `save`, or in a JSON list of messages; InputError names the mistake."""
        saved = _read(file)
        messages = saved.messages if isinstance(saved, Saved) else saved
        if any(message.role == "system" for message in messages[1:]):
            raise InputError(f"{file}: only the first message may have the role system")
        return cls(messages=messages)


def _read(file: Path) -> Saved | list[Message]:
    try:
        with file.open("rb") as stream:
            raw = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from None
    if len(raw) > FILE_BYTES_MAX:
        raise InputError(f"{file}: more than {FILE_BYTES_MAX} bytes, too large for a conversation")
    try:
        return msgspec.convert(parse(raw), Saved | list[Message])
    except (msgspec.ValidationError, NotJson) as error:
        raise InputError(f"{file}: is not a saved conversation: {error}") from None


def _is_saved(file: Path) -> bool:
    try:
        return isinstance(_read(file), Saved)
    except InputError:
        return False


@dataclass(frozen=True, slots=True)
class AnswerStats:
    """Counts and times of one answer.

    cached_tokens: prompt tokens found in the prefix cache.
    first_ms:      from the question to the first chunk of text.
    finish:        `stop`: the answer is complete; `length`: it was cut.
    """

    tokens: int
    prompt_tokens: int
    cached_tokens: int
    first_ms: float
    total_ms: float
    finish: str = "stop"

    @classmethod
    def from_usage(cls, usage: Mapping[str, Any], first_ms: float, total_ms: float) -> AnswerStats:
        """Return the statistics of an answer from the llm step's `usage` output and two times.

        A count that an external engine does not send is 0.
        """
        tokens, prompt, cached = (usage[key] or 0 for key in ("completion_tokens", "prompt_tokens", "cached_tokens"))
        return cls(tokens, prompt, cached, first_ms, total_ms, usage["finish_reason"])

    def __str__(self) -> str:
        return f"{_tokens([self])}, first after {self.first_ms:.0f} ms, {_cached([self])}"


def summary(answers: Sequence[AnswerStats], turns: int, stopped: int) -> list[str]:
    """Return the lines of /stats. turns: questions in the conversation; stopped: answers ended with Ctrl-C."""
    lines = [f"conversation: {counted(turns, 'question')}"]
    if answers:
        lines[0] += f", {answers[-1].prompt_tokens + answers[-1].tokens} tokens at the last answer"
        first_ms = sorted(one.first_ms for one in answers)[len(answers) // 2]
        lines.append(f"answers: {len(answers)} with {_tokens(answers)}")
        lines.append(f"first token: after {first_ms:.0f} ms (median)")
        lines.append(f"prefix cache: {_cached(answers)}")
    if stopped:
        lines.append(f"stopped: {counted(stopped, 'answer')}")
    return lines


def _tokens(answers: Sequence[AnswerStats]) -> str:
    """Return '11 tokens at 10.0/s': the rate counts tokens after the first of each answer."""
    text = counted(sum(one.tokens for one in answers), "token")
    timed = [one for one in answers if one.tokens > 1]
    took_ms = sum(one.total_ms - one.first_ms for one in timed)
    return f"{text} at {sum(one.tokens - 1 for one in timed) / took_ms * 1e3:.1f}/s" if took_ms > 0 else text


def _cached(answers: Sequence[AnswerStats]) -> str:
    cached, prompt = sum(one.cached_tokens for one in answers), sum(one.prompt_tokens for one in answers)
    return f"{cached} of {counted(prompt, 'prompt token')} cached ({100 * cached / prompt if prompt else 0:.0f}%)"
