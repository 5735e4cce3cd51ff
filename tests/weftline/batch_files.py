"""What the tests of `weftline batch` run: a pipeline of plain functions, data sets for it, and its results as rows."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

FUNCTIONS = """
import pathlib
import time

HERE = pathlib.Path(__file__).parent


def shout(text: "text") -> "text":
    "Return the text in capitals; fails for 'bad' while there is a file `strict` beside this one, slow while `slow` is."
    if (HERE / "slow").exists():
        time.sleep(0.02)
    if text == "bad" and (HERE / "strict").exists():
        raise ValueError("it is bad")
    return text.upper()


def count(text: "text") -> "int64[]":
    "Return how many characters a text has."
    import numpy as np

    return np.int64(len(text))
"""
SHOUT = """weftline: 1
name: shouter
inputs: {text: text}
steps:
  shout: {node: function, function: "functions.py:shout", inputs: {text: text}, batch: {items_max: 4}}
  count: {node: function, function: "functions.py:count", inputs: {text: shout.output}}
outputs: {loud: shout.output, length: count.output}
"""
LOOKS = """
from typing import Annotated

import numpy as np


def flip(photo: Annotated[np.ndarray, "image"]) -> Annotated[np.ndarray, "image"]:
    "Return a picture upside down."
    return np.ascontiguousarray(photo[::-1])
"""
FLIP = """weftline: 1
name: flipper
inputs: {image: image}
steps:
  flip: {node: function, function: "looks.py:flip", inputs: {photo: image}}
outputs: {flipped: flip.output}
"""


def shouter(folder: Path) -> str:
    """Write the pipeline of texts and return its file."""
    (folder / "functions.py").write_text(FUNCTIONS)
    (folder / "shout.yaml").write_text(SHOUT)
    return str(folder / "shout.yaml")


def flipper(folder: Path) -> str:
    """Write the pipeline of pictures and return its file."""
    (folder / "looks.py").write_text(LOOKS)
    (folder / "flip.yaml").write_text(FLIP)
    return str(folder / "flip.yaml")


def lines(folder: Path, texts: list[str], name: str = "rows.jsonl") -> str:
    """Write texts as a JSONL file, with a number each, and return its name."""
    rows = [json.dumps({"text": text, "n": place}) for place, text in enumerate(texts)]
    (folder / name).write_text("\n".join(rows) + "\n")
    return str(folder / name)


def results(out: Path) -> list[dict[str, Any]]:
    """Return the rows of a folder of Parquet parts."""
    parts = sorted(out.glob("part-*.parquet"))
    return [row for part in parts for row in pq.read_table(part).to_pylist()]


def visible(out: Path) -> dict[str, bytes]:
    """Return the files that a reader of results would see, with their bytes."""
    found = [
        *out.glob("part-*"),
        *out.glob("_errors.jsonl"),
        *(path for path in out.glob("media/**/*") if path.is_file()),
    ]
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in sorted(found)}
