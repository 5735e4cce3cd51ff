"""Slash commands of `weftline chat`: list and parser; pure."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from typing import Any

from weftline.errors import InputError

COMMANDS = {
    "/help": ("", "these lines"),
    "/reset": ("", "forget the conversation and begin a new one"),
    "/system": ("TEXT", "say TEXT to the model first; without a text: nothing"),
    "/set": ("KEY VALUE", "change a sampling option; KEY alone: back to the step's own"),
    "/save": ("FILE", "write the conversation to a file"),
    "/load": ("FILE", "go on with a conversation from a file"),
    "/stats": ("", "tokens, speed and cache of this chat"),
    "/quit": ("", "leave; so do Ctrl-D, and Ctrl-C at the prompt"),
}
"""What can be written after its name, and what it does."""

_NEEDS_MORE = ("/save", "/load")
_ALONE = ("/help", "/reset", "/stats", "/quit")


@dataclass(frozen=True, slots=True)
class Command:
    """A command by its name with the slash, and what was written after it."""

    name: str
    rest: str = ""


def read_line(line: str) -> Command | str:
    """Return the command that a line is, or the text that it says; InputError when it is a command with a mistake.

    A text that begins with a slash is written with two.
    """
    if not line.startswith("/"):
        return line
    if line.startswith("//"):
        return line[1:]
    name, _, rest = line.partition(" ")
    name, rest = name.strip(), rest.strip()
    if name not in COMMANDS:
        near = difflib.get_close_matches(name[:40], COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else "/help lists them"
        raise InputError(f"{name:.40}: no such command; {hint} (a text that begins with a slash is written with two)")
    if rest and name in _ALONE:
        raise InputError(f"{name}: takes nothing after it, found {rest:.40}")
    if not rest and name in _NEEDS_MORE:
        raise InputError(f"{name}: needs the name of a file")
    return Command(name, rest)


def changed(changes: dict[str, Any], rest: str) -> dict[str, Any]:
    """Return sampling changes after `KEY VALUE`, or after `KEY` alone, which takes a change back.

    The value is JSON, or else a text. Whether there is such a key is for the step's sampling options to say.
    """
    key, _, value = rest.replace("=", " ", 1).partition(" ") if _assigns(rest) else rest.partition(" ")
    if not value.strip():
        return {name: one for name, one in changes.items() if name != key}
    try:
        return {**changes, key: json.loads(value)}
    except (ValueError, RecursionError):
        return {**changes, key: value.strip()}


def _assigns(rest: str) -> bool:
    """Whether it is written KEY=VALUE."""
    return "=" in rest.partition(" ")[0]


def help_lines() -> list[str]:
    """Return a line for each command, and one about lines that go on."""
    written = [(f"{name} {more}".strip(), about) for name, (more, about) in COMMANDS.items()]
    widest = max(len(command) for command, _ in written)
    lines = [f"{command:<{widest}}  {about}" for command, about in written]
    return [*lines, "A line that ends with a backslash goes on. Ctrl-C stops an answer."]
