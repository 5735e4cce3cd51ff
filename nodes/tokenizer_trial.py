"""Try the text patterns of a model's tokenizer.json in a process with limits on time and memory.

    python -m weftline.nodes.tokenizer_trial <pid of its parent>

A tokenizer.json is part of a model, and a model is not trusted: its regular expressions may take exponential time, its
replacements may double a text again and again. The tokenizers library computes outside Python and cannot be stopped,
so both are tried before the model opens, on texts that such patterns are slow for, in a process that is killed at a
limit. The vocabulary is not loaded there: its work is in proportion to the text, and the lengths of its words and
pieces (TOKEN_CHARS_MAX, PIECE_CHARS_MAX) bound the rest.

The child reads one JSON object, tokenizer.json without its vocabulary, and prints an empty line or what is wrong.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from weftline.errors import ModelError, first_line
from weftline.nodes.confined import child_environment, confine
from weftline.nodes.model_limits import JSON_BYTES_MAX, parse_json, read_bytes

CPU_MAX_S = 3
"""Processor time of a trial; published tokenizers take below 1 s with the start of the process."""

WALL_MAX_S = 60.0
MEMORY_BYTES = 1 << 30
"""Address space of the process; an interpreter with the tokenizers library takes 300 MB of it."""

TEXT_CHARS = 4_000
"""Length of the texts that are tried: quadratic patterns take seconds for some of them, linear ones milliseconds."""

GROWTH_MAX = 64
"""Most characters that one character of a text may become."""

TOKEN_CHARS_MAX = 1_000
"""Most characters of a word that WordPiece splits, in quadratic time; published models have 100."""

PIECE_CHARS_MAX = 64
"""Most characters of a piece of a Unigram vocabulary, whose time grows with their square; published ones have 16."""

LITERALS_MAX = 48
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_PARTS = ("normalizer", "pre_tokenizer", "decoder")
_NOTHING = msgspec.Raw(b"null")
_TRIED = re.compile(r'"type": "(Split|Replace|Prepend)"')
"""Parts with patterns or texts of their own; the others are fixed algorithms."""


class _Model(msgspec.Struct):
    type: Any = None
    vocab: msgspec.Raw = _NOTHING
    max_input_chars_per_word: Any = 0


class _Tokenizer(msgspec.Struct):
    """Parts of a tokenizer.json that are looked at; the others, such as the vocabulary, become no objects."""

    normalizer: msgspec.Raw = _NOTHING
    pre_tokenizer: msgspec.Raw = _NOTHING
    decoder: msgspec.Raw = _NOTHING
    model: _Model | None = None


def try_tokenizer(folder: Path, shown: str) -> None:
    """Raise ModelError for a tokenizer.json in `folder` whose patterns take too long or too much memory."""
    try:
        wrong = _problem(read_bytes(folder / "tokenizer.json", JSON_BYTES_MAX))
    except FileNotFoundError:
        return
    except OSError as error:
        wrong = f"it cannot be read: {error.strerror}"
    except ValueError as error:
        raise ModelError(f"{shown}/tokenizer.json {error}") from None
    if wrong:
        fix = "fetch the tokenizer of a model that you trust"
        raise ModelError(f"{shown}/tokenizer.json: {wrong}\n    fix: {fix}")


def _problem(data: bytes) -> str:
    try:
        found = msgspec.json.decode(data, type=_Tokenizer)
    except (msgspec.MsgspecError, RecursionError):
        raise ValueError("is not valid JSON, or no tokenizer") from None
    word = found.model.max_input_chars_per_word if found.model is not None else 0
    if isinstance(word, int) and word > TOKEN_CHARS_MAX:
        return f"max_input_chars_per_word is {word}, and at most {TOKEN_CHARS_MAX} is accepted"
    if found.model is not None and found.model.type in ("Unigram", None) and (piece := _long_piece(found.model.vocab)):
        return f"its vocabulary has a piece of {piece} characters, and at most {PIECE_CHARS_MAX} are accepted"
    parts = json.dumps({name: parse_json(bytes(getattr(found, name))) for name in _PARTS})
    return _wait_trial(parts) if _TRIED.search(parts) else ""


def _long_piece(vocabulary: msgspec.Raw) -> int:
    """Return the length of a text above PIECE_CHARS_MAX in a vocabulary; 0 for none."""
    for found in _TEXT.finditer(bytes(vocabulary)):
        if len(found[0]) > PIECE_CHARS_MAX and (length := len(json.loads(found[0]))) > PIECE_CHARS_MAX:
            return length
    return 0


def _wait_trial(parts: str) -> str:
    """Return what is wrong with a tokenizer's parts, by a trial in another process; '' for nothing."""
    command = [sys.executable, "-P", "-m", "weftline.nodes.tokenizer_trial", str(os.getpid())]
    limits = f"{CPU_MAX_S} s and {MEMORY_BYTES >> 20} MiB"
    try:
        ended = subprocess.run(
            command, input=parts.encode(), capture_output=True, timeout=WALL_MAX_S, env=child_environment()
        )
    except subprocess.TimeoutExpired:
        return f"its patterns take more than {WALL_MAX_S:g} s for a text of {TEXT_CHARS} characters"
    except OSError as error:
        return f"no process can be started to try its patterns: {error.strerror}"
    if ended.returncode:
        return f"its patterns take more than {limits} for texts of {TEXT_CHARS} characters, or cannot be read"
    return ended.stdout.decode("utf-8", "replace").strip()


def texts_for(parts: str) -> Iterator[str]:
    """Yield texts that slow patterns are slow for: long runs of characters, those of the patterns too."""
    literals = dict.fromkeys([*" a1.\n\té\u4e00", *re.sub(r'"type": "\w+"|\\u[0-9a-f]{4}|[\\"{}\[\]:,]', "", parts)])
    tail = "\u00a7" + "".join(list(literals)[:LITERALS_MAX])  # a pattern is not tried where its last letter is absent
    for one in list(literals)[:LITERALS_MAX]:
        yield one * TEXT_CHARS + tail
    for pair in ("a ", "ab", "a1", " \n", "a\n", "aA", "'s", ".,"):
        yield pair * (TEXT_CHARS // 2) + tail


def main() -> None:
    """Try the parts of one tokenizer."""
    confine(int(sys.argv[1]), MEMORY_BYTES)
    os.environ["RAYON_NUM_THREADS"] = "1"
    from tokenizers import Tokenizer

    resource.setrlimit(resource.RLIMIT_CPU, (CPU_MAX_S, CPU_MAX_S))
    parts = sys.stdin.read()
    whole = {**json.loads(parts), "version": "1.0", "model": {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}}
    try:
        tokenizer = Tokenizer.from_str(json.dumps(whole))
        for text in texts_for(parts):
            normal = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
            pieces = tokenizer.pre_tokenizer.pre_tokenize_str(normal) if tokenizer.pre_tokenizer else []
            after = tokenizer.decoder.decode([text]) if tokenizer.decoder else ""
            if max(len(normal), sum(len(one) for one, _ in pieces), len(after)) > GROWTH_MAX * len(text):
                print(f"its patterns make more than {GROWTH_MAX} characters of one")
                return
    except BaseException as error:  # the library raises plain Exception, and panics
        print(f"its patterns cannot be applied: {first_line(error):.200}")


if __name__ == "__main__":
    main()
