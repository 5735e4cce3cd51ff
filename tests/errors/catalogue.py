"""Catalogue of typical mistakes: each has its input and the whole message that a user sees.

The Markdown files of this folder hold it. A `##` heading is one mistake. Blocks with a file name behind their language
are files; those above the first heading exist for every mistake of the page. A `console` block has commands and what
they print. `python -m tests.errors.catalogue` rewrites the printed part; the diff then shows what users will see.

Commands run in this process: `weftline ...`; `python FILE`, which prints an error of Weftline like a traceback's last
line; and `post PATH BODY`, a JSON request to a server whose models are functions.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx

from tests.engine.serving.http.backends import Functions, chatting, info
from tests.engine.serving.http.hosted import hosted
from weftline.cli.main import main
from weftline.engine.llm.params import SamplingParams
from weftline.engine.serving.backend import Ask
from weftline.engine.serving.config import ServeLimits
from weftline.errors import WeftlineError

FOLDER = Path(__file__).parent
FILE = re.compile(r"^```\w+ (?P<name>\S+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"^```console\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Mistake:
    """One entry. files: texts by name. commands: in order. printed: the console block as it is written."""

    page: str
    title: str
    files: dict[str, str]
    commands: tuple[str, ...]
    printed: str

    def __str__(self) -> str:
        return f"{self.page.removesuffix('.md')}: {self.title}"


def pages() -> list[Path]:
    """Return the pages in order."""
    return sorted(FOLDER.glob("*.md"))


def read_page(path: Path) -> list[Mistake]:
    """Return the mistakes of a page."""
    head, *entries = re.split(r"^## ", path.read_text("utf-8"), flags=re.MULTILINE)
    shared = _files(head)
    found = []
    for entry in entries:
        title = entry.partition("\n")[0]
        consoles = CONSOLE.findall(entry)
        assert len(consoles) == 1, f"{path.name}: {title}: expected one console block"
        commands = tuple(line[2:] for line in consoles[0].splitlines() if line.startswith("$ "))
        found.append(Mistake(path.name, title, shared | _files(entry), commands, consoles[0]))
    return found


def _files(text: str) -> dict[str, str]:
    return {one["name"]: one["text"] for one in FILE.finditer(text)}


class Runner:
    """Runs mistakes, each in a folder of its own. url: address of the server with models that are functions."""

    def __init__(self, url: str) -> None:
        self._url = url

    def run(self, mistake: Mistake) -> str:
        """Return the console block of a mistake: each command, what it prints, and how it ends."""
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            for name, text in mistake.files.items():
                Path(name).write_text(text, "utf-8")
                Path(name).chmod(0o600)  # as token files must be
            return "".join(
                self._run(command).replace(os.path.realpath(folder), "/here") for command in mistake.commands
            )

    def _run(self, command: str) -> str:
        program, *words = shlex.split(command)
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = {"weftline": self._weftline, "python": self._python, "post": self._post}[program](*words)
        printed = out.getvalue()
        newline = "\n" if printed and not printed.endswith("\n") else ""
        return f"$ {command}\n{printed}{newline}[{code}]\n"

    def _weftline(self, *words: str) -> str:
        return f"exit {main(words)}"

    def _python(self, name: str) -> str:
        try:
            exec(  # noqa: S102 - code of the catalogue
                compile(Path(name).read_text("utf-8"), name, "exec"), {"__name__": "__main__", "__file__": name}
            )
        except WeftlineError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return "exit 1"
        return "exit 0"

    def _post(self, path: str, body: str) -> str:
        headers = {"content-type": "application/json", "x-request-id": "id"}  # some errors have it
        answer = httpx.post(self._url + path, content=body.encode(), headers=headers)
        print(answer.text)
        return f"status {answer.status_code}"


@contextlib.contextmanager
def open_runner() -> Iterator[Runner]:
    """Open a server for `post`, and remove what the environment would change in messages."""
    kept = {name: os.environ.pop(name, None) for name in ("COLUMNS", "MODEL_FOLDER", "TERMINAL_WIDTH")}
    os.environ["COLUMNS"] = "120"
    try:
        with hosted(Functions(MODELS), limits=ServeLimits(batch_max=8)) as server, patch("subprocess.Popen", _refuse):
            yield Runner(server.url)
    finally:
        del os.environ["COLUMNS"]
        os.environ.update({name: value for name, value in kept.items() if value is not None})


def _refuse(*command: Any, **options: Any) -> None:
    raise AssertionError("no mistake: this command starts a process")


def _answer(ask: Ask) -> dict[str, Any]:
    SamplingParams.read(ask.inputs.get("sampling", {}))  # as the llm step's worker reads them
    return {"text": "hello", "usage": {}, "answers": [{"text": "hello", "finish_reason": "stop"}]}


MODELS = {
    "chat": chatting(_answer),
    "plain": (info("plain", {"question": "text"}, {"reply": "text"}), lambda ask: {"reply": ask.inputs["question"]}),
    "embed": (info("embed", {"text": "text"}, {"embedding": "float32[3]"}), lambda ask: {"embedding": None}),
    "rank": (info("rank", {"query": "text", "passages": "list[text]"}, {"scores": "float32[N]"}), lambda ask: {}),
    "voice": (info("voice", {"text": "text"}, {"audio": "audio"}), lambda ask: {}),
    "numbers": (info("numbers", {"x": "float32[3]"}, {"y": "float32[3]"}), lambda ask: {"y": None}),
}


def rewrite() -> None:
    """Write every console block anew."""
    with open_runner() as runner:
        for page in pages():
            printed = iter([runner.run(one) for one in read_page(page)])
            text = CONSOLE.sub(lambda _: f"```console\n{next(printed)}```", page.read_text("utf-8"))  # noqa: B023
            page.write_text(text, "utf-8")


if __name__ == "__main__":
    rewrite()
