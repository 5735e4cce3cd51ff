"""Generator of docs/kernels.md: registers and shared memory of every compiled kernel.

    python -m weftline.engine.llm.kernels.report [docs/kernels.md]

Needs no GPU and no driver: launches of `meta` tensors are compiled ahead of time, under the assumption that tensors are
aligned to 16 bytes, as torch's are. The assembler of Triton reports registers, spilled bytes and shared memory. Takes
some minutes on one core the first time; Triton caches compiled kernels.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.compiler import ASTSource  # type: ignore[import-untyped]

from weftline.engine.llm.kernels.forms import ARCHS, KernelForm, forms
from weftline.engine.llm.kernels.launch import Launch

_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True, slots=True)
class Resources:
    """Resource usage of one program of a kernel.

    registers:    32-bit registers of a thread.
    spill_bytes:  stores of a thread to memory for lack of registers.
    shared_bytes: shared memory of the program.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int


def resources(launch: Launch, arch: int) -> Resources:
    """Compile `launch` for `arch`, such as 90; errors of Triton and the assembler propagate."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for at, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        special = not parameter.do_not_specialize
        kind = "constexpr" if parameter.is_constexpr else _kind(value, special)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[parameter.name] = value
        elif special and (isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)):
            attributes[(at,)] = _ALIGNED
    source = ASTSource(launch.kernel, signature, constants, attributes)
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, spill_bytes = _assembled(made.asm["ptx"], arch)
    return Resources(registers, spill_bytes, made.metadata.shared)


def _kind(value: Any, special: bool) -> str:
    """Return Triton's type name of an argument; None and, if `special`, 1 are compile-time constants."""
    if value is None or (special and isinstance(value, int) and value == 1):
        return "constexpr"
    if isinstance(value, Tensor):
        return _POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _assembled(ptx: str, arch: int) -> tuple[int, int]:
    """Assemble `ptx`; return (registers, spilled bytes) of a thread."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "kernel.ptx")
        written.write_text(ptx)
        target = f"--gpu-name=sm_{arch}{'a' if arch >= 90 else ''}"
        tools = triton.knobs.nvidia
        assembler = tools.ptxas_blackwell if arch >= 100 else tools.ptxas  # as Triton chooses
        command = [assembler.path, "-v", target, str(written), "-o", str(written.with_suffix(".cubin"))]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spilled = re.search(r"(\d+) bytes spill stores", said)
    if registers is None or spilled is None:
        raise RuntimeError(f"the assembler's report was not understood: {said[:200]!r}")
    return int(registers[1]), int(spilled[1])


_ROW = re.compile(r"^\| ([^|]+) \| sm_(\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", re.MULTILINE)
_HEAD = """# Triton kernels

The kernels of the language model for NVIDIA GPUs of compute capability 8.0 and newer: `engine/llm/kernels`. This page
is written by `python -m weftline.engine.llm.kernels.report`, which compiles every form that production uses for three
architectures without needing any of them, and reads the assembler's report.

**What was checked, and what was not.** The kernels' numbers are compared with a float64 reference in Triton's
interpreter, on a CPU. That each form compiles, and what it takes, is below. They were right on one H200
(docs/gpu-validation.md, with times). The sizes in `engine/llm/kernels/attention_config.py` were chosen from registers
and shared memory, those of Hopper and width 128 from times. This command compares all kernels with the reference on a
GPU and times attention there; it needs torch, triton and numpy only, and prints a table and one line of JSON:

```
python -m weftline.engine.llm.kernels.gpu_check
```

**float8 pages** (float8_e4m3fn) are read and written by instructions from compute capability 8.9 on, and bit by bit
before; the numbers are the same, but for a stored NaN, which is read as 480 bit by bit. Numbers beyond 448 become 448.

**Few forms.** Sizes of rounds (rows, sequences, splits) are arguments that Triton does not specialise on. A model with
one kind of attention layer has two forms of it, for decoding and for rounds with prompts, and serving compiles no
others.

**Short walks for few sequences.** Up to 16 pairs of a sequence and a key head, keys are split at 64 tokens, up to 64
pairs at 128, and at 256 beyond: one sequence of 1,024 tokens on 8 key heads has 128 programs. Parts of splits are
joined by a second kernel. The last program of a sequence could join them instead, and would save that launch; but it
would read the parts of all its heads alone (128 KiB at 64 splits of 4 heads), where the join spreads them over a
program for each head, and each split would first wait for a counter in memory. Which is faster has to be measured on a
GPU.

**Sampling** does not sort: top-k, top-p, min-p and typical sampling are thresholds. Where at most 4,096 tokens can be
kept, one program collects them in three passes over its row, and searches and draws among these; otherwise each
threshold takes up to 17 passes. Tokens are those of the reference on a CPU,
but for two cases: logarithms may differ in the last bit, and a share within a few 1e-7 of the goal may fall on the
other side. Of equal scores the lowest token wins.

**Weights in fp8** have their inputs scaled and rounded by one kernel before each product. Weights in int8 have no
kernel of ours and are expected to be slower than plain ones: see [weights](guides/llm-weights.md).

**A C compiler** (gcc or clang, or what `CC` names) and Python's headers must be installed: Triton builds the code that
starts kernels with them. Without them torch's operations are used, and one line of the log says so.

**float32** is multiplied as three products of shorter numbers (`tf32x3`), with an error near float32's own.

**Triton 3.6** spills 8 bytes a thread in 3 of 112 forms, all for sm_90: decoding at width 128 with keys of 16 bits
(bf16 and fp16), and prompts at width 256 over fp8. Four stages instead of five would avoid the first two, but leave one
step of keys under way instead of two, which costs more where a multiprocessor has one program, as at batch 1.

"""
_COLUMNS = """| form | for | warps | registers of a thread | bytes spilled | shared memory, bytes | stages |
|---|---|---|---|---|---|---|
"""


def page(found: Iterable[tuple[KernelForm, Resources]]) -> str:
    """Render docs/kernels.md."""
    lines = [
        f"| {form.name} | sm_{form.arch} | {form.launch.warps} | {taken.registers} | {taken.spill_bytes} "
        f"| {taken.shared_bytes} | {form.launch.stages} |\n"
        for form, taken in found
    ]
    made_with = f"Compiled with Triton {triton.__version__}; other versions give other figures.\n\n"
    return _HEAD + made_with + _COLUMNS + "".join(lines)


def recorded(text: str) -> tuple[str, dict[tuple[str, int], Resources]]:
    """Parse docs/kernels.md: (Triton's version, resources by form and architecture)."""
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
