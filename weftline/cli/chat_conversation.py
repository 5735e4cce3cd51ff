"""Chat history: messages sent with every request, saved to a file on request.

Each question brings all earlier messages along unchanged, so the model finds them in its prefix cache. A conversation
changes only when a question was answered: one that failed leaves no trace. Pure but for `save` and `load`.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weftline.errors import InputError

FORMAT = 1
"""Version of a saved conversation."""

FILE_BYTES_MAX = 16 << 20
"""Largest saved conversation that is read, far more than any model's context."""

ROLES = ("system", "user", "assistant")

Message = dict[str, str]
"""{role, content}, as the llm node takes it."""


class Conversation:
    """Messages in order; the first may be the system's, then user and assistant take turns."""

    def __init__(self, system: str = "", messages: Sequence[Mapping[str, str]] = ()) -> None:
        self._messages = [dict(message) for message in messages]
        if system:
            self.say_first(system)

    @property
    def messages(self) -> list[Message]:
        return [dict(message) for message in self._messages]

    @property
    def system(self) -> str:
        return self._messages[0]["content"] if self._messages and self._messages[0]["role"] == "system" else ""

    @property
    def turns(self) -> int:
        """How many questions were answered."""
        return sum(message["role"] == "user" for message in self._messages)

    def asking(self, question: str) -> list[Message]:
        """Return what the model is sent for a question; the conversation stays as it is."""
        return [*self.messages, {"role": "user", "content": question}]

    def asking_plainly(self, question: str) -> str:
        """Return the same as one text, a line for each message, for a model without a chat template."""
        return "\n".join(message["content"] for message in self.asking(question))

    def answered(self, question: str, answer: str) -> None:
        """Keep a question with its answer."""
        self._messages = [*self.asking(question), {"role": "assistant", "content": answer}]

    def say_first(self, system: str) -> None:
        """Say `system` to the model before everything else, instead of what was said there; '' says nothing."""
        rest = self._messages[1:] if self.system else self._messages
        self._messages = [{"role": "system", "content": system}, *rest] if system else list(rest)

    def reset(self) -> None:
        """Forget every question and answer; what the system says stays."""
        self._messages = [{"role": "system", "content": self.system}] if self.system else []

    def save(self, file: Path, more: Mapping[str, Any]) -> None:
        """Write the conversation as JSON, with `more` beside it; all of it or nothing.

        InputError when the file cannot be written, or is there already and is no saved conversation.
        """
        if file.exists() and not _is_saved(file):
            raise InputError(f"{file}: is there already and is no saved conversation; choose another name")
        text = json.dumps({"weftline_chat": FORMAT, **more, "messages": self._messages}, ensure_ascii=False, indent=1)
        try:
            handle, part = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as stream:
                    stream.write(text + "\n")
                Path(part).replace(file)
            except BaseException:
                Path(part).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise InputError(f"{file}: cannot be written: {error.strerror}") from None

    @classmethod
    def load(cls, file: Path) -> Conversation:
        """Return the conversation in a file that `save` wrote, or in a JSON list of messages; InputError says more."""
        value = _read(file)
        if isinstance(value, dict) and value.get("weftline_chat") == FORMAT:
            value = value.get("messages")
        if not isinstance(value, list):
            raise InputError(f"{file}: is no saved conversation and no list of messages")
        for place, message in enumerate(value):
            where = f"{file}: messages[{place}]"
            if not isinstance(message, dict) or set(message) != {"role", "content"}:
                raise InputError(f"{where}: expected an object with the keys role and content, and no others")
            if message["role"] not in ROLES or (message["role"] == "system" and place):
                raise InputError(f"{where}.role: found {message['role']!r:.40}, expected user or assistant")
            if not isinstance(message["content"], str):
                raise InputError(f"{where}.content: found {type(message['content']).__name__}, expected text")
        return cls(messages=value)


def _read(file: Path) -> Any:
    try:
        with file.open("rb") as stream:
            raw = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from None
    if len(raw) > FILE_BYTES_MAX:
        raise InputError(f"{file}: more than {FILE_BYTES_MAX} bytes, which is no conversation")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise InputError(f"{file}: is no JSON; expected a saved conversation") from None


def _is_saved(file: Path) -> bool:
    try:
        value = _read(file)
    except InputError:
        return False
    return isinstance(value, dict) and "weftline_chat" in value
