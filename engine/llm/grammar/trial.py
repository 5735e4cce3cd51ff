"""Trial process that compiles untrusted grammars in isolation.

    python -m weftline.engine.llm.grammar.trial <pid of its parent> <memory in bytes>

It reads JSON lines {"grammar": text} and answers each with a line {"error": text}, empty when the grammar is fine; its
first line, {"error": ""}, says that it is ready. It knows bytes only, no model's tokens, and so starts in a moment. It
gives up the right to more privileges, has a limit on its memory, and ends with its parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38


def confine(parent: int, memory_bytes: int) -> None:
    """Limit this process, and tie its life to that of the thread that started it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    if os.getppid() != parent:  # it ended before the first of these calls
        os._exit(1)


def main() -> None:
    """Answer lines until there are no more."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    from weftline.engine.llm.grammar.matcher import LIMITS

    confine(int(sys.argv[1]), int(sys.argv[2]))
    tokenizer, limits = LLTokenizer("byte"), LLParserLimits(**LIMITS)
    print('{"error": ""}', flush=True)
    for line in sys.stdin.buffer:
        tried = LLMatcher(tokenizer, json.loads(line)["grammar"], log_level=0, limits=limits)
        if not tried.is_error():
            tried.compute_bitmask()
        print(json.dumps({"error": tried.get_error()}), flush=True)


if __name__ == "__main__":
    main()
