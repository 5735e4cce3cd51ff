"""Implementation of `weftline chat`.

Ctrl-C stops an answer and keeps what was said of it; a question that fails leaves the conversation as it was.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from weftline.cli.chat_commands import COMMANDS, Command, changed, help_lines, read_line
from weftline.cli.chat_conversation import Conversation
from weftline.cli.chat_figures import Figures, summary
from weftline.cli.chat_step import ChatStep, chat_step
from weftline.cli.chat_terminal import Terminal
from weftline.cli.progress import loading_shown
from weftline.engine.result import OutputStream
from weftline.engine.session import load
from weftline.errors import InputError, SessionClosed, WeftlineError, traceback_of
from weftline.pipelines.spec.loader import load_file

NO_TEMPLATE = "no chat template"
"""How the llm step refuses messages when its model takes only plain text."""

TOO_LONG = re.compile(r"found (\d+) tokens, expected at most (\d+)")
"""How it refuses a prompt that does not fit the model's context."""

ANSWERS_MAX = 10_000
"""Most answers whose figures are kept for /stats."""

Ask = Callable[..., AbstractContextManager[OutputStream]]
"""`Session.stream` of a step alone, or what behaves like it."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One use of `weftline chat`, as typed.

    step:     which llm step; '' when there is only one.
    once:     the only question; None: they are read from standard input.
    system:   said to the model first; None: what the step says.
    sampling: changes to the step's sampling options, each KEY=VALUE.
    load:     a saved conversation to go on with.
    quiet:    no progress while the model loads.
    """

    file: str
    step: str = ""
    once: str | None = None
    system: str | None = None
    sampling: tuple[str, ...] = ()
    load: Path | None = None
    quiet: bool = False


def run_chat(asked: ChatRequest, source: TextIO, out: TextIO, err: TextIO) -> int:
    """Chat until nobody asks; return 1 when a question from a pipe failed, else 0.

    What can be known to be wrong without a model is refused before one is loaded. Whatever happens, no process stays.
    """
    step = chat_step(load_file(asked.file), asked.step)
    conversation = Conversation.load(asked.load) if asked.load else Conversation(step.system)
    if asked.system is not None:
        conversation.say_first(asked.system)
    terminal = Terminal(source, out, err)
    changes: dict[str, Any] = {}
    for one in asked.sampling:
        if "=" not in one:
            raise InputError(f"--set {one:.80}: expected KEY=VALUE, such as --set temperature=0.7")
        changes = _checked(step, changed(changes, one))
    pipeline = load(step.pipeline)
    with loading_shown(err, asked.quiet) as progress:
        session = pipeline.open(progress)
    with session:
        chat = Chat(step, conversation, changes, session.stream, terminal)
        if asked.once is None:
            return chat.talk()
        chat.turn(asked.once)
        return 0


def _checked(step: ChatStep, changes: dict[str, Any]) -> dict[str, Any]:
    """Return sampling changes that the step's options allow; InputError names the key."""
    step.sampled(changes)
    return changes


class Chat:
    """A conversation that goes on: what is typed, what is answered, and what both changed."""

    def __init__(
        self, step: ChatStep, conversation: Conversation, changes: dict[str, Any], ask: Ask, terminal: Terminal
    ) -> None:
        self._step = step
        self._conversation = conversation
        self._changes = changes
        self._ask = ask
        self._terminal = terminal
        self._answers: list[Figures] = []
        self._stopped = 0
        self._plain = False

    def talk(self) -> int:
        """Answer what is typed until it ends; return 1 when something from a pipe failed, else 0."""
        terminal, failed = self._terminal, False
        if terminal.interactive:
            terminal.completes(self._completions)
            terminal.note(f"{self._step.model}, step {self._step.name}; /help lists commands, Ctrl-D leaves")
        while (line := terminal.read()) is not None:
            try:
                asked = read_line(line)
                if asked == Command("/quit"):
                    break
                if isinstance(asked, Command):
                    self._obey(asked)
                elif asked.strip():
                    self.turn(asked)
            except SessionClosed:
                raise
            except WeftlineError as error:
                terminal.end()
                terminal.warn("\n".join(filter(None, (traceback_of(error), f"error: {error}"))))
                failed = True
        return int(failed and not terminal.interactive)

    def turn(self, question: str) -> None:
        """Ask one question and write its answer; one that fails leaves the conversation as it is, and raises why."""
        try:
            self._answer(question)
        except InputError as error:
            if NO_TEMPLATE in str(error) and not self._plain:
                self._speak_plainly()
                return self.turn(question)
            raise self._explained(error) from None

    def _answer(self, question: str) -> None:
        terminal, said, whole, usage = self._terminal, [], "", None
        started_s, first_s = time.monotonic(), None
        try:
            with self._ask(**self._inputs(question)) as pieces:
                for piece in pieces:
                    if piece.output == "usage":
                        usage = piece.value
                    elif piece.last:
                        whole = piece.value
                    else:
                        first_s = first_s or time.monotonic()
                        said.append(piece.value)
                        terminal.say(piece.value)
        except KeyboardInterrupt:
            if not terminal.interactive:
                raise
            return self._stop(question, "".join(said))
        ended_s = time.monotonic()
        if not said:
            terminal.say(whole)
        terminal.end()
        self._conversation.answered(question, whole)
        if usage is not None:
            self._count(Figures.read(usage, ((first_s or ended_s) - started_s) * 1e3, (ended_s - started_s) * 1e3))

    def _inputs(self, question: str) -> dict[str, Any]:
        talk = self._conversation
        asked = {"prompt": talk.asking_plainly(question)} if self._plain else {"messages": talk.asking(question)}
        return {**asked, "sampling": self._changes} if self._changes else asked

    def _stop(self, question: str, said: str) -> None:
        """Keep the part of an answer that was said before Ctrl-C."""
        self._stopped += 1
        self._terminal.end()
        if said:
            self._conversation.answered(question, said)
            self._terminal.note("stopped; the part so far stays in the conversation")
        else:
            self._terminal.note("stopped before the first word; the question is taken back")

    def _count(self, figures: Figures) -> None:
        self._answers = [*self._answers[1 - ANSWERS_MAX :], figures]
        if self._terminal.wide:
            self._terminal.note(str(figures))
        if figures.finish != "length":
            return
        most = self._step.sampled(self._changes).tokens_max
        if figures.tokens >= most:
            self._terminal.note(f"cut after tokens_max, {most} tokens; /set tokens_max changes it")
        else:
            self._terminal.note(f"cut: the context is full; {_BEGIN_ANEW}")

    def _speak_plainly(self) -> None:
        self._plain = True
        if self._conversation.system:
            self._conversation.say_first("")
            self._terminal.note("the model has no chat template, so no system text can be said to it; it is left out")
        self._terminal.note("the model has no chat template: it goes on with what was written, as plain text")

    def _explained(self, error: InputError) -> InputError:
        """Return what to do about a question that was refused because of those before it."""
        if not self._conversation.turns:
            return error
        if found := TOO_LONG.search(str(error)):
            return InputError(
                f"the context is full: the conversation with this question has {found[1]} tokens, "
                f"and the model takes at most {found[2]}\n    fix: {_BEGIN_ANEW}"
            )
        return InputError(f"{error}\n    the conversation is as it was before this question; {_BEGIN_ANEW}")

    def _obey(self, command: Command) -> None:
        note, talk, file = self._terminal.note, self._conversation, Path(command.rest).expanduser()
        match command.name:
            case "/help":
                note("\n".join(help_lines()))
            case "/reset":
                talk.reset()
                note("a new conversation")
            case "/system":
                if self._plain and command.rest:
                    raise InputError("/system: the model has no chat template, so no system text can be said to it")
                talk.say_first(command.rest)
                note("said from the next question on" if command.rest else "nothing is said first")
            case "/set":
                self._set(command.rest)
            case "/save":
                talk.save(file, {"model": self._step.model, "sampling": self._changes})
                note(f"wrote {file}")
            case "/load":
                self._conversation = Conversation.load(file)
                note(f"a conversation of {self._conversation.turns} questions")
            case _:
                note("\n".join(summary(self._answers, talk.turns, self._stopped)))

    def _set(self, rest: str) -> None:
        if rest:
            self._changes = _checked(self._step, changed(self._changes, rest))
        shown = ", ".join(f"{key} {value!r}" for key, value in self._changes.items())
        self._terminal.note(f"changed from the step's own: {shown or 'nothing'}")

    def _completions(self, line: str) -> list[str]:
        if line.startswith("/set "):
            return [f"/set {key} " for key in self._step.sampling_keys if key.startswith(line[5:])]
        return [name for name in COMMANDS if line and name.startswith(line)]


_BEGIN_ANEW = "/reset begins a new conversation, /save FILE keeps this one"
