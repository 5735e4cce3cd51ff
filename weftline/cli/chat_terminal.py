"""Terminal of `weftline chat`: prompt, history and completion, or plain lines through pipes.

Answers go to standard output, everything else to standard error. On a terminal what is beside the answers is dim,
unless NO_COLOR is set or the terminal cannot do it, and is wrapped to its width. What is typed is written to no file.
"""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Callable, Sequence
from typing import TextIO

from weftline.cli.show import printable
from weftline.errors import InputError

PROMPT, GOES_ON = "> ", "... "

LINE_CHARS_MAX = 1 << 20
"""Longest line taken from a pipe."""

LINES_MAX = 10_000
"""Most lines that one text goes on for."""

WIDTH_MIN = 20
"""Narrower terminals are written as if they were so wide."""

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Terminal:
    """One chat's input and output.

    interactive: somebody types and reads; else lines come from a pipe, or answers go to one.
    wide:        notes are read on a terminal.
    """

    def __init__(self, source: TextIO, out: TextIO, err: TextIO) -> None:
        self._source, self._out, self._err = source, out, err
        self.interactive = source.isatty() and out.isatty()
        self.wide = err.isatty()
        self._dim = self.wide and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._open = False

    def completes(self, words: Callable[[str], Sequence[str]]) -> None:
        """Let the tab key complete what is typed: `words` returns what can stand in place of a line so far."""
        try:
            import readline
        except ImportError:  # some builds of Python have none; typing works, without history
            return

        def complete(_: str, place: int) -> str | None:
            found = words(readline.get_line_buffer()[: readline.get_endidx()])
            return found[place] if place < len(found) else None

        readline.set_completer_delims("")
        readline.set_completer(complete)
        readline.parse_and_bind("tab: complete")

    def read(self) -> str | None:
        """Return what is said next, lines that go on joined; None when nobody says more, or leaves with Ctrl-C."""
        lines: list[str] = []
        while len(lines) < LINES_MAX:
            line = self._line(GOES_ON if lines else PROMPT)
            if line is None:
                return "\n".join(lines) if lines and not self.interactive else None
            goes_on = line.endswith("\\")
            lines.append(line[:-1] if goes_on else line)
            if not goes_on:
                break
        return "\n".join(lines)

    def say(self, piece: str) -> None:
        """Write a piece of an answer."""
        self._out.write(printable(piece))
        self._out.flush()
        self._open = not piece.endswith("\n")

    def end(self) -> None:
        """End the answer: what follows begins on a line of its own."""
        if self._open:
            self._out.write("\n")
            self._out.flush()
        self._open = False

    def note(self, text: str) -> None:
        """Tell something that is beside the conversation."""
        for line in printable(text).splitlines():
            for part in self._wrapped(line):
                print(f"{_DIM}{part}{_PLAIN}" if self._dim else part, file=self._err)
        self._err.flush()

    def warn(self, text: str) -> None:
        """Tell something that went wrong."""
        print(printable(text), file=self._err, flush=True)

    def _line(self, prompt: str) -> str | None:
        try:
            if self.interactive:
                return input(prompt)
            line = self._source.readline(LINE_CHARS_MAX + 1)
        except EOFError:
            self._err.write("\n")  # the prompt's line is still open
            return None
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            self._err.write("\n")
            return None
        except UnicodeDecodeError:
            raise InputError("standard input: found bytes that are no valid text, expected UTF-8") from None
        if len(line) > LINE_CHARS_MAX:
            raise InputError(f"standard input: found a line of more than {LINE_CHARS_MAX} characters")
        return line.rstrip("\r\n") if line else None

    def _wrapped(self, line: str) -> list[str]:
        if not self.wide:
            return [line]
        width = max(shutil.get_terminal_size().columns, WIDTH_MIN)
        return textwrap.wrap(line, width, break_on_hyphens=False, replace_whitespace=False) or [""]
