"""Command `weftline chat`: a conversation with one llm step.

Ctrl-C stops an answer and keeps its text so far; a failed question leaves the conversation unchanged. Answers go to
standard output, everything else to standard error. The prompt's history is kept in memory only.
"""

from __future__ import annotations

import difflib
import os
import posixpath
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from rich.console import Console
from rich.text import Text

from weftline.cli.chat_conversation import AnswerStats, Conversation, summary
from weftline.cli.chat_step import ChatStep, chat_step
from weftline.cli.options import PipelineFile, Quiet, Verbose
from weftline.cli.progress import loading_shown
from weftline.cli.show import printable
from weftline.engine.flags import Flag
from weftline.engine.result import OutputStream
from weftline.engine.session import load as load_pipeline
from weftline.errors import InputError, SessionClosed, WeftlineError, traceback_of
from weftline.nodes.json_value import NotJson
from weftline.nodes.strict_json import parse
from weftline.pipelines.spec.loader import load_file

COMMANDS = {
    "/help": ("", "list these commands"),
    "/reset": ("", "start a new conversation; the system message stays"),
    "/system": ("TEXT", "set the system message; without TEXT remove it"),
    "/set": ("KEY VALUE", "change a sampling option; without VALUE restore the step's own"),
    "/save": ("FILE", "write the conversation to a file"),
    "/load": ("FILE", "continue a conversation from a file"),
    "/stats": ("", "print tokens, speed and cache use of this chat"),
    "/quit": ("", "leave; so do Ctrl-D, and Ctrl-C at the prompt"),
}
"""Argument and purpose of each command."""

NO_TEMPLATE = "no chat template"
"""Text of the llm step's error when its model accepts only plain text."""

TOO_LONG = re.compile(r"found (\d+) tokens, expected at most (\d+)")
"""Text of its error when a prompt does not fit the model's context."""

PROMPT, CONTINUATION = "> ", "... "
LINE_CHARS_MAX = 1 << 20
LINES_MAX = 10_000
"""Longest line from a pipe, and most lines of one question."""

ANSWERS_MAX = 10_000
"""Most answers whose statistics are kept for /stats."""

RESET_HINT = "/reset starts a new conversation, /save FILE keeps this one"

Ask = Callable[..., AbstractContextManager[OutputStream]]
"""`Session.stream`, or a fake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Options of `weftline chat`."""

    file: PipelineFile
    step: Annotated[str, Flag("--step", "NAME")] = ""
    """Name of the llm step, when there are several."""

    once: Annotated[str | None, Flag("--once", "QUESTION")] = None
    """Answer this question and exit, without reading standard input."""

    system: Annotated[str | None, Flag("--system", "TEXT")] = None
    """System message, instead of the step's own."""

    sampling: Annotated[tuple[str, ...], Flag("--set", "KEY=VALUE")] = ()
    """Change a sampling option, such as temperature=0.7; repeatable."""

    load: Annotated[Path | None, Flag("--load", "SAVED")] = None
    """Continue a saved conversation."""

    quiet: Quiet = False
    verbose: Verbose = False


def chat(options: ChatOptions) -> int:
    """Chat with the llm step of a pipeline, without its other steps. Answers stream.

    Type /help for commands. Through a pipe, each line is a question.

    \b
    Examples:
      weftline chat assistant.yaml
      weftline chat assistant.yaml --step answer --system "Answer in one sentence." --set temperature=0.7
      weftline chat assistant.yaml --once "What can you do?"
      weftline chat assistant.yaml < questions.txt > answers.txt
    """
    opened = chat_step(load_file(options.file), options.step)
    conversation = Conversation.load(options.load) if options.load else Conversation(opened.system)
    if options.system is not None:
        conversation.set_system(options.system)
    changes: dict[str, Any] = {}
    for one in options.sampling:
        if "=" not in one:
            raise InputError(f"--set {one:.80}: expected KEY=VALUE, such as --set temperature=0.7")
        changes = changed(changes, one)
        opened.sampled(changes)
    pipeline = load_pipeline(opened.pipeline)
    with loading_shown(sys.stderr, options.quiet) as progress:
        session = pipeline.open(progress)
    with session:
        talk = Chat(opened, conversation, changes, session.stream, Terminal(sys.stdin, sys.stdout, sys.stderr))
        if options.once is None:
            return talk.run()
        talk.ask(options.once)
        return 0


class Terminal(Completer):
    """Input and output of one chat: a prompt on a terminal, lines through pipes.

    interactive:     questions and answers are on a terminal.
    shows_notes:     notes are on a terminal.
    completions:     function from the text before the cursor to its completions.
    """

    def __init__(self, source: TextIO, out: TextIO, err: TextIO) -> None:
        self.interactive = source.isatty() and out.isatty()
        self.shows_notes = err.isatty()
        self.completions: Callable[[str], Sequence[str]] = lambda text: ()
        self._source, self._out, self._err = source, out, err
        self._console = Console(file=err, highlight=False, markup=False, emoji=False)
        self._prompt: PromptSession[str] | None = None
        self._line_open = self._reasoning_open = False
        self._dim = "" if os.environ.get("NO_COLOR") else "dim"

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        typed = document.text_before_cursor
        return (Completion(text, start_position=-len(typed)) for text in self.completions(typed))

    def read(self) -> str | None:
        """Return the next question, with continued lines joined; None at the end of input."""
        return self._read_prompt() if self.interactive else self._read_pipe()

    def write(self, chunk: str) -> None:
        """Write a chunk of an answer."""
        self._out.write(printable(chunk))
        self._out.flush()
        self._line_open = not chunk.endswith("\n")

    def write_reasoning(self, chunk: str) -> None:
        """Write a chunk of reasoning to standard error, dim; nothing unless that is a terminal."""
        if self.shows_notes:
            self._console.print(Text(printable(chunk), self._dim), end="", soft_wrap=True)
            self._reasoning_open = True

    def end_reasoning(self) -> None:
        """End the reasoning before an answer: the answer starts a line."""
        if self._reasoning_open:
            self._console.print()
            self._reasoning_open = False

    def end_line(self) -> None:
        """End an answer: the next output starts a line."""
        if self._line_open:
            self.write("\n")

    def note(self, text: str) -> None:
        """Write to standard error: dim and wrapped on a terminal, plain elsewhere."""
        self._console.print(Text(printable(text), self._dim), soft_wrap=not self.shows_notes)

    def warn(self, text: str) -> None:
        """Write an error message to standard error."""
        print(printable(text), file=self._err, flush=True)

    def _read_prompt(self) -> str | None:
        if self._prompt is None:
            continues = Condition(lambda: get_app().current_buffer.text.endswith("\\"))
            self._prompt = PromptSession(
                PROMPT, multiline=continues, prompt_continuation=CONTINUATION, completer=self,
                complete_while_typing=False,
            )  # fmt: skip
        try:
            return self._prompt.prompt().replace("\\\n", "\n")
        except (EOFError, KeyboardInterrupt):
            return None

    def _read_pipe(self) -> str | None:
        lines: list[str] = []
        while len(lines) < LINES_MAX:
            try:
                line = self._source.readline(LINE_CHARS_MAX + 1)
            except UnicodeDecodeError:
                raise InputError("standard input: found bytes that are not UTF-8") from None
            if len(line) > LINE_CHARS_MAX:
                raise InputError(f"standard input: found a line of more than {LINE_CHARS_MAX} characters")
            if not line:
                return "\n".join(lines) if lines else None
            line = line.rstrip("\r\n")
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                break
        return "\n".join(lines)


class Chat:
    """A conversation in progress: questions, commands, and the state that both change."""

    def __init__(
        self, step: ChatStep, conversation: Conversation, changes: dict[str, Any], ask: Ask, terminal: Terminal
    ) -> None:
        self._step, self._conversation, self._changes = step, conversation, changes
        self._ask, self._terminal = ask, terminal
        self._answers: list[AnswerStats] = []
        self._stopped = 0
        self._plain_text = False

    def run(self) -> int:
        """Process questions and commands until the end of input; return 1 when one from a pipe failed, else 0."""
        terminal, failed = self._terminal, False
        if terminal.interactive:
            terminal.completions = self._completions
            terminal.note(f"{self._step.model}, step {self._step.name}; /help lists commands, Ctrl-D leaves")
        while (line := terminal.read()) is not None:
            try:
                name, text = parse_line(line)
                if name == "/quit":
                    break
                if name:
                    self._run_command(name, text)
                elif text.strip():
                    self.ask(text)
            except SessionClosed:
                raise
            except WeftlineError as error:
                terminal.end_line()
                terminal.warn("\n".join(filter(None, (traceback_of(error), f"error: {error}"))))
                failed = True
        return int(failed and not terminal.interactive)

    def ask(self, question: str) -> None:
        """Stream the answer to a question; on an error the conversation is unchanged."""
        try:
            self._answer(question)
        except InputError as error:
            if NO_TEMPLATE not in str(error) or self._plain_text:
                raise self._with_hint(error) from None
            self._use_plain_text()
            self.ask(question)

    def _answer(self, question: str) -> None:
        terminal, chunks, whole, usage = self._terminal, list[str](), "", None
        started_s, first_s = time.monotonic(), None
        try:
            with self._ask(**self._inputs(question)) as outputs:
                for output in outputs:
                    if not output.last:
                        first_s = first_s or time.monotonic()
                    if output.output == "usage":
                        usage = output.value
                    elif output.output == "reasoning":
                        if not output.last:
                            terminal.write_reasoning(output.value)
                    elif output.last:
                        whole = output.value
                    else:
                        chunks.append(output.value)
                        terminal.end_reasoning()
                        terminal.write(output.value)
        except KeyboardInterrupt:
            if not terminal.interactive:
                raise
            return self._interrupted(question, "".join(chunks))
        ended_s = time.monotonic()
        terminal.end_reasoning()
        if not chunks:
            terminal.write(whole)
        terminal.end_line()
        self._conversation.add(question, whole)
        if usage is not None:
            times_ms = ((first_s or ended_s) - started_s) * 1e3, (ended_s - started_s) * 1e3
            self._record(AnswerStats.from_usage(usage, *times_ms))

    def _inputs(self, question: str) -> dict[str, Any]:
        if self._plain_text:
            inputs: dict[str, Any] = {"prompt": self._conversation.as_text(question)}
        else:
            inputs = {"messages": self._conversation.with_question(question)}
        return {**inputs, "sampling": self._changes} if self._changes else inputs

    def _interrupted(self, question: str, answer: str) -> None:
        self._stopped += 1
        self._terminal.end_reasoning()
        self._terminal.end_line()
        if answer:
            self._conversation.add(question, answer)
            self._terminal.note("stopped; the part so far stays in the conversation")
        else:
            self._terminal.note("stopped before the first word; the question is removed")

    def _record(self, stats: AnswerStats) -> None:
        self._answers = [*self._answers[1 - ANSWERS_MAX :], stats]
        if self._terminal.shows_notes:
            self._terminal.note(str(stats))
        if stats.finish != "length":
            return
        tokens_max = self._step.sampled(self._changes).tokens_max
        if stats.tokens >= tokens_max:
            self._terminal.note(f"cut after tokens_max, {tokens_max} tokens; /set tokens_max changes it")
        else:
            self._terminal.note(f"cut: the context is full; {RESET_HINT}")

    def _use_plain_text(self) -> None:
        self._plain_text = True
        if self._conversation.system:
            self._conversation.set_system("")
            self._terminal.note("the model has no chat template and accepts no system message; it is removed")
        self._terminal.note("the model has no chat template: the conversation is sent as plain text")

    def _with_hint(self, error: InputError) -> InputError:
        """Add a remedy to the error of a question that failed because of earlier ones."""
        if not self._conversation.turns:
            return error
        if found := TOO_LONG.search(str(error)):
            return InputError(
                f"the context is full: the conversation with this question has {found[1]} tokens, "
                f"and the model accepts at most {found[2]}\n    fix: {RESET_HINT}"
            )
        return InputError(f"{error}\n    the conversation is unchanged; {RESET_HINT}")

    def _run_command(self, name: str, text: str) -> None:
        note, file = self._terminal.note, Path(posixpath.expanduser(text))
        match name:
            case "/help":
                note("\n".join(help_lines()))
            case "/reset":
                self._conversation.reset()
                note("a new conversation")
            case "/system":
                if self._plain_text and text:
                    raise InputError("/system: the model has no chat template and accepts no system message")
                self._conversation.set_system(text)
                note("system message set" if text else "system message removed")
            case "/set":
                self._set(text)
            case "/save":
                self._conversation.save(file, model=self._step.model, sampling=self._changes)
                note(f"wrote {file}")
            case "/load":
                self._conversation = Conversation.load(file)
                note(f"a conversation of {self._conversation.turns} questions")
            case _:
                note("\n".join(summary(self._answers, self._conversation.turns, self._stopped)))

    def _set(self, text: str) -> None:
        if text:
            changes = changed(self._changes, text)
            self._step.sampled(changes)
            self._changes = changes
        shown = ", ".join(f"{key} {value!r}" for key, value in self._changes.items())
        self._terminal.note(f"changed from the step's own: {shown or 'nothing'}")

    def _completions(self, typed: str) -> list[str]:
        if typed.startswith("/set "):
            return [f"/set {key} " for key in self._step.sampling_keys if key.startswith(typed[5:])]
        return [name for name in COMMANDS if typed and name.startswith(typed)]


def parse_line(line: str) -> tuple[str, str]:
    """Return (command, argument), or ('', text) for a question; InputError for a malformed command.

    A question that starts with a slash is written with two.
    """
    if not line.startswith("/") or line.startswith("//"):
        return "", line.removeprefix("/")
    name, _, argument = line.partition(" ")
    name, argument = name.strip(), argument.strip()
    if name not in COMMANDS:
        near = difflib.get_close_matches(name[:40], COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else "/help lists them"
        raise InputError(f"{name:.40}: no such command; {hint} (double the slash of a text that starts with one)")
    expected = COMMANDS[name][0]
    if argument and not expected:
        raise InputError(f"{name}: has no argument, found {argument:.40}")
    if not argument and expected == "FILE":
        raise InputError(f"{name}: the name of a file is missing")
    return name, argument


def changed(changes: dict[str, Any], text: str) -> dict[str, Any]:
    """Return sampling changes after `KEY VALUE` or `KEY=VALUE`; `KEY` alone removes a change.

    The value is JSON, or else a text. The step's sampling options validate the key.
    """
    key, _, value = (text.replace("=", " ", 1) if "=" in text.partition(" ")[0] else text).partition(" ")
    if not value.strip():
        return {name: one for name, one in changes.items() if name != key}
    try:
        return {**changes, key: parse(value)}
    except NotJson:
        return {**changes, key: value.strip()}


def help_lines() -> list[str]:
    """Return a line for each command, and one about keys."""
    written = {f"{name} {argument}".strip(): about for name, (argument, about) in COMMANDS.items()}
    width = max(map(len, written))
    lines = [f"{command:<{width}}  {about}" for command, about in written.items()]
    return [*lines, "A line that ends with a backslash continues on the next. Ctrl-C stops an answer."]
