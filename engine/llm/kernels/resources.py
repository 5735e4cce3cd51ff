"""Resource usage of a kernel, by ahead-of-time compilation without a GPU.

A launch made of `meta` tensors is compiled just as Triton would compile it on its first call on the GPU, under the
assumption that tensors begin at multiples of 16 bytes, as torch's do. The assembler, which comes with Triton, then says
how many registers a thread has, how much did not fit into them and is *spilled* to memory, and how much shared memory a
program takes. No driver is needed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.compiler import ASTSource  # type: ignore[import-untyped]

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
    """Resources of one program of a kernel.

    registers:    32-bit registers of a thread.
    spill_bytes:  stores of a thread to memory for lack of registers.
    shared_bytes: shared memory of the program.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int


def resources(launch: Launch, arch: int) -> Resources:
    """Compile `launch` for `arch`, such as 90; whatever Triton or the assembler raise when it cannot be compiled."""
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
    """Return Triton's name for the type of an argument; 1, if `special`, and None are compiled in, as Triton does."""
    if value is None or (special and isinstance(value, int) and value == 1):
        return "constexpr"
    if isinstance(value, Tensor):
        return _POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _assembled(ptx: str, arch: int) -> tuple[int, int]:
    """Return (registers, bytes spilled) from the assembler's report."""
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
