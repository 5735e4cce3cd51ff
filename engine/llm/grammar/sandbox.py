"""Trial process that translates and compiles untrusted grammars under a time and a memory limit.

    python -m weftline.engine.llm.grammar.sandbox <pid of its parent> <memory in bytes>

`TrialProcess` is the parent's side: start, request, timeout and kill. It sends one request at a time from one thread;
`close` may be called from another. The process ends when that thread ends.

The child reads JSON lines {"grammar": text} and answers each with a line {"error": text}, empty for a valid grammar;
its first line, {"error": ""}, means ready. A line {"gbnf": text} is answered with "lark" beside the error. It uses a
byte vocabulary instead of the model's tokens and so starts at once. It drops the right to new privileges, limits its
memory, and ends with its parent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import time

from weftline.engine.llm.params import sampling_error
from weftline.errors import InputError, LimitReached, SessionClosed, first_line
from weftline.nodes.confined import child_environment, confine

TRIAL_MAX_MS = 2_000.0
TRIAL_MEMORY_BYTES = 1 << 30
"""Address space of the process: an interpreter takes about 100 MB of it, the largest grammar within the limits 50."""
START_MAX_MS = 60_000.0
"""Longest the process may take to start; a tenth of a second where nothing else runs."""
ANSWER_BYTES_MAX = 1 << 20
_READ_BYTES = 65536
_WRITE_BYTES = 4096
"""Bytes that a pipe accepts at once when it is writable."""
_log = logging.getLogger("weftline.llm")


class TrialProcess:
    """Compiles grammars in a child process, started on first use and again after a kill."""

    def __init__(
        self,
        trial_max_ms: float = TRIAL_MAX_MS,
        memory_bytes: int = TRIAL_MEMORY_BYTES,
        command: tuple[str, ...] = ("-m", "weftline.engine.llm.grammar.sandbox"),
    ) -> None:
        """command: arguments of the interpreter; tests pass others."""
        self._trial_max_ms = trial_max_ms
        self._memory_bytes = memory_bytes
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def wait_trial(self, grammar: str) -> str:
        """Return the error of a grammar, empty for a valid one; waits at most for the limits above.

        InputError when it takes more time or memory than it may; LimitReached when no process can be started.
        """
        return self._wait_reply({"grammar": grammar})["error"]

    def wait_translation(self, gbnf: str) -> str:
        """Translate a grammar from GBNF to Lark; raises as `wait_trial` does, and InputError for a wrong one."""
        answer = self._wait_reply({"gbnf": gbnf})
        if answer["error"]:
            raise sampling_error("grammar", answer["error"])
        return answer["lark"]

    def _wait_reply(self, question: dict[str, str]) -> dict[str, str]:
        process = self._process or self._wait_start()
        try:
            return self._wait_answer(process, json.dumps(question).encode() + b"\n", self._trial_max_ms)
        except TimeoutError:
            self._kill_and_log(f"it took longer than {self._trial_max_ms:g} ms")
            most = f"{self._trial_max_ms:g} ms"
            raise InputError(f"sampling: the constraint: not prepared after {most}, the limit; simplify it") from None
        except (OSError, ValueError):
            self._kill_and_log("")
            if self._closed:
                raise SessionClosed("the engine was closed while the constraint was prepared") from None
            most = f"{self._memory_bytes >> 20} MiB"
            raise InputError(
                f"sampling: the constraint: it ended the process that prepares them, which may use {most}; simplify it"
            ) from None

    def _kill_and_log(self, why: str) -> None:
        """Kill the process and log why, or how it has ended, unless this was closed."""
        process = self._process
        if process is not None and not why:
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that is dying keeps its own return code
                process.wait(0.1)
        code = process.poll() if process is not None else None
        self.kill()
        if not self._closed:
            how = why or ("an invalid answer" if code is None else f"return code {code} (below 0: a signal)")
            _log.warning(
                "the process that tries grammars died: %s; the request fails; then: the next starts another", how
            )

    def kill(self) -> None:
        """Kill the process; the next trial starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def close(self) -> None:
        """Kill the process and refuse further trials; a waiting trial fails with SessionClosed."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()  # its pipes are closed by the thread that reads them

    def _wait_start(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise SessionClosed("the engine is closed")
        limits = (str(os.getpid()), str(self._memory_bytes))
        try:
            self._process = process = subprocess.Popen(
                [sys.executable, "-P", *self._command, *limits],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env=child_environment(),
            )
            self._wait_answer(process, b"", START_MAX_MS)
            return process
        except (OSError, ValueError):
            self.kill()
            raise LimitReached("no process can be started to prepare constraints; try again", 1.0) from None

    def _wait_answer(self, process: subprocess.Popen[bytes], question: bytes, most_ms: float) -> dict[str, str]:
        """Send a line and return the next one, with its `error`. TimeoutError; OSError or ValueError: no answer."""
        if process.stdin is None or process.stdout is None:
            raise OSError("a process without pipes")
        os.set_blocking(process.stdin.fileno(), False)  # one that does not read must not be waited for either
        ends_at = time.monotonic() + most_ms / 1e3
        unsent, answer = memoryview(question), b""
        while not answer.endswith(b"\n"):
            waited = select.poll()
            waited.register(process.stdout, select.POLLIN)
            if unsent:
                waited.register(process.stdin, select.POLLOUT)
            left_ms = (ends_at - time.monotonic()) * 1e3
            ready = dict(waited.poll(left_ms)) if left_ms > 0 else {}
            if not ready:
                raise TimeoutError
            if process.stdin.fileno() in ready:
                unsent = unsent[os.write(process.stdin.fileno(), unsent[:_WRITE_BYTES]) :]
            if process.stdout.fileno() in ready:
                read = os.read(process.stdout.fileno(), _READ_BYTES)
                answer += read
                if not read or len(answer) > ANSWER_BYTES_MAX:
                    raise OSError("the process ended, or its answer is too long")
        found = json.loads(answer)
        return {"error": str(found["error"]), "lark": str(found.get("lark", ""))}


def main() -> None:
    """Compile one grammar per input line until end of file."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    from weftline.engine.llm.grammar.matcher import LIMITS

    confine(int(sys.argv[1]), int(sys.argv[2]))
    tokenizer, limits = LLTokenizer("byte"), LLParserLimits(**LIMITS)
    print('{"error": ""}', flush=True)
    for line in sys.stdin.buffer:
        question = json.loads(line)
        if "gbnf" in question:
            print(json.dumps(_translated(question["gbnf"])), flush=True)
            continue
        tried = LLMatcher(tokenizer, question["grammar"], log_level=0, limits=limits)
        if not tried.is_error():
            tried.compute_bitmask()
        print(json.dumps({"error": tried.get_error()}), flush=True)


def _translated(gbnf: str) -> dict[str, str]:
    """Return a grammar in Lark's syntax, or the error in it. Its first rule is `root ::= ...`."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return {"error": "", "lark": str(gbnf_to_lark(gbnf))}
    except RecursionError:
        return {"error": "found a grammar that is nested too deeply"}
    except Exception as error:  # GbnfToLarkError, and for an unknown rule Exception itself
        return {"error": f"{first_line(error):.200}"}


if __name__ == "__main__":
    main()
