"""Compiles every form of the kernels and writes what each takes of a GPU to docs/kernels.md.

    python -m weftline.engine.llm.kernels.report [docs/kernels.md]

Needs no GPU; some minutes on one core the first time, since Triton keeps what it has compiled.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

import triton  # type: ignore[import-untyped]

from weftline.engine.llm.kernels.forms import ARCHS, Form, forms
from weftline.engine.llm.kernels.resources import Resources, resources

_ROW = re.compile(r"^\| ([^|]+) \| sm_(\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", re.MULTILINE)
_HEAD = """# Triton kernels

The kernels of the language model for NVIDIA GPUs of compute capability 8.0 and newer: `engine/llm/kernels`. This page
is written by `python -m weftline.engine.llm.kernels.report`, which compiles every form that production uses for two
architectures without needing either, and reads the assembler's report.

**What was checked, and what was not.** The kernels' numbers are compared with a float64 reference in Triton's
interpreter, on a CPU. That each form compiles, and what it takes, is below. They have not run on a GPU: nothing is said
here about their speed, and the sizes in `engine/llm/kernels/attention_config.py` were chosen from registers and shared
memory alone. This command compares all kernels with the reference on a GPU and times attention there; it needs torch,
triton and numpy only, and prints a table and one line of JSON:

```
python -m weftline.engine.llm.kernels.gpu_check
```

**float8 pages** (float8_e4m3fn) are read and written by instructions from compute capability 8.9 on, and bit by bit
before; the numbers are the same, but for a stored NaN, which is read as 480 bit by bit. Numbers beyond 448 become 448.

**float32** is multiplied as three products of shorter numbers (`tf32x3`), with an error near float32's own.

"""
_COLUMNS = """| form | for | warps | registers of a thread | bytes spilled | shared memory, bytes | stages |
|---|---|---|---|---|---|---|
"""


def page(found: Iterable[tuple[Form, Resources]]) -> str:
    """Return docs/kernels.md."""
    lines = [
        f"| {form.name} | sm_{form.arch} | {form.launch.warps} | {taken.registers} | {taken.spill_bytes} "
        f"| {taken.shared_bytes} | {form.launch.stages} |\n"
        for form, taken in found
    ]
    made_with = f"Compiled with Triton {triton.__version__}; other versions give other figures.\n\n"
    return _HEAD + made_with + _COLUMNS + "".join(lines)


def recorded(text: str) -> tuple[str, dict[tuple[str, int], Resources]]:
    """Return (Triton's version, what each form and architecture took) from the text of docs/kernels.md."""
    version = re.search(r"^Compiled with Triton ([\w.+]+);", text, re.MULTILINE)
    rows = {
        (name, int(arch)): Resources(int(registers), int(spilled), int(shared))
        for name, arch, _, registers, spilled, shared, _ in _ROW.findall(text)
    }
    return version[1] if version else "", rows


def main(path: str) -> None:
    """Compile all forms and write the page."""
    found = []
    for arch in ARCHS:
        for form in forms(arch):
            found.append((form, resources(form.launch, arch)))
            print(f"sm_{arch} {form.name}: {found[-1][1]}", flush=True)
    Path(path).write_text(page(found), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "docs/kernels.md")
