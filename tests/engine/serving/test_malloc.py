"""Thresholds of glibc's allocator: set in servers, kept as the operator set them, and skipped without glibc."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from weftline.engine.serving import malloc
from weftline.engine.serving.malloc import PARAMETERS, keep_freed_memory

GLIBC = "CS_GNU_LIBC_VERSION" in os.confstr_names and "glibc" in (os.confstr("CS_GNU_LIBC_VERSION") or "")
VARIABLES = [variable for _, variable, _, _ in PARAMETERS]

COUNTS = """
import ctypes, json

class Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Mallinfo2
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]

def mapped():
    # Blocks of 8 MiB that come from the kernel one by one, of two.
    before = libc.mallinfo2().hblks
    blocks = [libc.malloc(8 << 20), libc.malloc(8 << 20)]
    count = libc.mallinfo2().hblks - before
    for block in blocks:
        libc.free(block)
    return count
"""


def run(code: str, **variables: str) -> list[object]:
    environ = {name: text for name, text in os.environ.items() if name not in (*VARIABLES, "GLIBC_TUNABLES")}
    command = [sys.executable, "-c", COUNTS + code]
    done = subprocess.run(command, env=environ | variables, capture_output=True, text=True, check=True, timeout=60)
    found: list[object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(not GLIBC, reason="needs glibc")
def test_large_blocks_come_from_the_pool_afterwards() -> None:
    code = """
from weftline.engine.serving.malloc import keep_freed_memory
names = keep_freed_memory()
print(json.dumps([names, mapped()]))
"""
    assert run("print(json.dumps([mapped()]))") == [2]
    assert run(code) == [VARIABLES, 0]
    tuned = run(code, GLIBC_TUNABLES="glibc.malloc.mmap_threshold=1048576", MALLOC_ARENA_MAX="4")
    assert tuned == [["MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"], 2]


@pytest.mark.skipif(not GLIBC, reason="needs glibc")
def test_what_it_keeps_is_bounded() -> None:
    code = """
from weftline.engine.serving.malloc import keep_freed_memory
keep_freed_memory()

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def fill(count):
    blocks = [libc.malloc(8 << 20) for _ in range(count)]
    for block in blocks:
        ctypes.memset(ctypes.c_void_p(block), 1, 8 << 20)
    most = resident()
    for block in blocks:
        libc.free(block)
    return most

before = resident()
few = fill(8)
kept_of_few = resident()
many = fill(64)
kept = resident() - before
print(json.dumps([few - before >= 64 << 20, kept_of_few >= few - (8 << 20), many - before >= 512 << 20,
    kept <= 256 << 20]))
"""
    assert run(code) == [True, True, True, True]


@pytest.mark.parametrize("version", ["musl", None])
def test_another_c_library_is_left_alone(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(malloc.os, "confstr", lambda name: version)
    assert keep_freed_memory({}) == []


@pytest.mark.skipif(not GLIBC, reason="needs glibc")
def test_serve_sets_them_before_it_serves(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from weftline.cli import serve as command
from weftline.engine.serving import server

async def served(config, **others):
    print(json.dumps([mapped()]))
    return 0

server.serve = served
Path("PATH").write_text("weftline: 1\\nname: p\\ninputs: {x: text}\\nsteps:\\n"
    "  s: {node: echo, inputs: {value: x}}\\noutputs: {y: s.value}\\n")
command.run_serve(command.ServeFlags(files=("PATH",)), sys.stdout, sys.stderr)
"""
    assert run(code.replace("PATH", str(tmp_path / "p.yaml"))) == [0]


@pytest.mark.skipif(not GLIBC, reason="needs glibc")
def test_an_ingress_process_sets_them_first() -> None:
    code = """
from weftline.engine.serving.frontend import process

def hardened(parent):
    print(json.dumps([mapped()]), flush=True)
    raise SystemExit(0)

process.harden = hardened
process.main(lambda *given: {}, ["0", "0", "0", "0"])
"""
    assert run(code) == [0]
