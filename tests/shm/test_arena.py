"""Arenas are sealed, nameless, and read-only for everybody but their writer."""

import mmap
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from weftline.shm.arena import HostArena
from weftline.shm.block import Block
from weftline.shm.spec import TensorSpec
from weftline.shm.view import numpy_view, offset_in, torch_view


def test_a_reader_sees_what_the_writer_wrote_and_cannot_write() -> None:
    with HostArena.create(8192) as arena, HostArena.attach(os.dup(arena.fd), 8192) as reader:
        place = Block(0, 64, 16, 1).place(0, 16)
        spec = TensorSpec("float32", (2, 2))
        numpy_view(arena, place, spec)[:] = [[1, 2], [3, 4]]
        seen = numpy_view(reader, place, spec)
        assert seen.tolist() == [[1, 2], [3, 4]]
        with pytest.raises(ValueError, match="read-only"):
            seen[0, 0] = 9


def test_no_process_can_shrink_it_or_map_it_for_writing() -> None:
    with HostArena.create(8192) as arena:
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, 4096)
        with pytest.raises(PermissionError):
            mmap.mmap(arena.fd, 8192, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def test_an_unsealed_or_short_descriptor_is_refused() -> None:
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    with pytest.raises(ValueError, match="not sealed"):
        HostArena.attach(unsealed, 4096)
    with HostArena.create(4096) as arena, pytest.raises(ValueError, match="shorter"):
        HostArena.attach(os.dup(arena.fd), 8192)


def test_a_torch_view_moves_no_bytes_and_knows_bfloat16() -> None:
    torch = pytest.importorskip("torch")
    with HostArena.create(4096) as arena:
        place = Block(0, 0, 8, 1).place(0, 8)
        array = numpy_view(arena, place, TensorSpec("bfloat16", (4,)))
        tensor = torch_view(array, "bfloat16")
        tensor[:] = torch.tensor([1.0, 2.0, 3.0, 4.0])
        assert tensor.dtype == torch.bfloat16
        assert array.tolist() == [0x3F80, 0x4000, 0x4040, 0x4080]
        assert offset_in(arena, array) == 0
        assert offset_in(arena, np.zeros(4)) is None


def test_the_descriptor_travels_to_another_process() -> None:
    child = (
        "import socket,sys;from weftline.shm.arena import HostArena;"
        "s=socket.socket(fileno=int(sys.argv[1]));_,fds,_,_=socket.recv_fds(s,1,1);"
        "a=HostArena.attach(fds[0],4096);print(bytes(a.buffer[:5]).decode())"
    )
    ours, theirs = socket.socketpair()
    with HostArena.create(4096) as arena:
        arena.buffer[:5] = b"hello"
        process = subprocess.Popen(
            [sys.executable, "-c", child, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdout=subprocess.PIPE
        )
        socket.send_fds(ours, [b"x"], [arena.fd])
        out, _ = process.communicate(timeout=20)
    ours.close()
    theirs.close()
    assert out.strip() == b"hello"


def test_what_is_still_looked_at_outlives_the_arena() -> None:
    arena = HostArena.create(4096)
    view = numpy_view(arena, Block(0, 0, 8, 1).place(0, 8), TensorSpec("uint8", (8,)))
    view[:] = 7
    arena.close()
    assert view.tolist() == [7] * 8  # in a process whose mapping was closed under it this line would be its last
    with pytest.raises(ValueError):
        arena.buffer[0]


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return -1


def test_a_forked_child_has_neither_mapping_nor_descriptor() -> None:
    with HostArena.create(1 << 16) as arena, HostArena.attach(os.dup(arena.fd), arena.size_bytes) as other:
        assert other.fd >= 0
        inode = os.fstat(arena.fd).st_ino
        assert Path("/proc/self/maps").read_text().count(f" {inode} ") == 2
        out, into = os.pipe()
        child = os.fork()
        if child == 0:
            HostArena.close_descriptors()
            mapped = Path("/proc/self/maps").read_text().count(f" {inode} ")
            held = sum(_inode(one) == inode for one in Path("/proc/self/fd").iterdir())
            os.write(into, f"{mapped} {held}".encode())
            os._exit(0)
        os.close(into)
        output = os.read(out, 100)
        os.close(out)
        os.waitpid(child, 0)
        assert output == b"0 0"
        arena.buffer[0:2] = b"ok"  # the parent's are as they were
        assert other.buffer[0:2] == b"ok"
