"""`weftline run --debug STEP`: breakpoint() in a step's code, at a terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

STEPS = """
def before(text: str) -> str:
    print("printed by before")
    return text + "!"

def look(text: str) -> str:
    seen = text.upper()
    breakpoint()
    return seen
"""
BODY = """
inputs: {text: text}
steps:
  before: {node: function, function: "steps.py:before", inputs: {text: text}}
  look: {node: function, function: "steps.py:look", inputs: {text: before.output}LIMITS}
outputs: {seen: look.output}
limits: {silence_max_ms: 1500}
"""
LIMITED = BODY.replace("LIMITS", ", timeout_ms: 200, run_max_ms: 300")
PATIENCE_S = 120.0


class Terminal:
    """A command at a terminal of its own."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._ours, theirs = pty.openpty()
        self.said = ""
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONBREAKPOINT"}  # which ray sets
        environment = {**kept, "PYTHONPATH": str(Path(__file__).parents[3]), "TERM": "dumb"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "weftline", *words],
            stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, start_new_session=True, env=environment,
        )  # fmt: skip
        os.close(theirs)

    def wait_for(self, text: str, after: int = 0) -> None:
        until = time.monotonic() + PATIENCE_S
        while text not in self.said[after:]:
            assert time.monotonic() < until and self._read(), f"{text!r} did not come; there was {self.said}"

    def type(self, line: str) -> int:
        """Type a line and return how much had been said before it."""
        at = len(self.said)
        os.write(self._ours, line.encode() + b"\n")
        return at

    def wait_end(self) -> int:
        while self._read():
            pass
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def _read(self) -> bool:
        """Take in what is said next; False at the end."""
        if not select.select([self._ours], [], [], PATIENCE_S)[0]:
            return False
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # the other side is closed
            return False
        self.said += data.decode()
        return bool(data)


def test_breakpoint_has_the_terminal_and_all_the_time_it_wants(write, tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    words = ("run", write(LIMITED), "-i", "text=hello", "--deadline-ms", "500", "--debug", "look")
    terminal = Terminal(tmp_path, *words)
    try:
        terminal.wait_for("Pdb)")
        time.sleep(2.0)  # longer than any limit of the step, the request and the pipeline
        terminal.wait_for("'HELLO!'", terminal.type("p seen"))
        terminal.wait_for("-> return seen", terminal.type("where"))
        terminal.type("seen = 'changed'")
        terminal.wait_for("seen: changed", terminal.type("continue"))
        assert terminal.wait_end() == 0
        assert "before: printed by before" in terminal.said, "the other steps are in workers, as ever"
    finally:
        terminal.close()


@pytest.mark.slow
def test_quitting_the_debugger_fails_the_request_and_leaves_nothing(write, tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    terminal = Terminal(tmp_path, "run", write(LIMITED), "-i", "text=hello", "--debug", "look")
    try:
        terminal.wait_for("Pdb)")
        terminal.wait_for("step look: BdbQuit", terminal.type("quit"))
        assert terminal.wait_end() == 5
    finally:
        terminal.close()


def test_what_cannot_be_debugged_is_refused(weft, write, tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    file = write(LIMITED)
    ended = weft("run", file, "-i", "text=a", "--debug", "lok")
    assert ended.code == 3 and "did you mean look" in ended.err
    ended = weft("run", file, "-i", "text=@-", "--debug", "look")
    assert ended.code == 3 and "the debugger uses standard input" in ended.err


@pytest.mark.slow
def test_a_breakpoint_in_a_worker_says_how_to_debug_it(weft, write, tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    ended = weft("run", write(BODY.replace("LIMITS", "")), "-i", "text=a")
    assert ended.code == 5 and "weftline run --debug STEP" in ended.err
