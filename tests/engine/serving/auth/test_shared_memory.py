import mmap
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import weftline
from weftline.engine.serving.auth.shared_memory import FOLDER, RegionStatus, SharedMemory
from weftline.engine.serving.config import ServeLimits
from weftline.errors import InputError, LimitReached

LIMITS = ServeLimits(regions_max=4, region_bytes_max=1 << 20)
SIZE = 4096


class Object:
    """A piece of POSIX shared memory as clients make it, with bytes that count up."""

    def __init__(self, size: int = SIZE) -> None:
        self.key = f"/weftline_test_{secrets.token_hex(6)}"
        self.path = Path(FOLDER + self.key)
        self.path.touch(mode=0o600)
        self.path.write_bytes(bytes(at % 251 for at in range(size)))


@pytest.fixture
def made() -> Iterator[Object]:
    held = Object()
    yield held
    held.path.unlink(missing_ok=True)


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    held = SharedMemory(LIMITS, enabled=True)
    yield held
    held.unregister_all()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def refused(memory: SharedMemory, key: object, name: object = "r", offset: object = 0, size: object = 1) -> str:
    before = descriptors()
    with pytest.raises(InputError) as caught:
        memory.register(name, key, offset, size)  # type: ignore[arg-type]
    assert memory.status() == ()
    assert descriptors() <= before
    said = str(caught.value)
    assert FOLDER not in said and "\0" not in said and len(said) < 500
    return said


def test_a_region_is_read_and_written_where_it_was_registered(memory: SharedMemory, made: Object) -> None:
    memory.register("in", made.key, 100, 1000)
    buffer = bytearray(50)
    memory.read_into("in", 10, memoryview(buffer))
    assert buffer == bytes(at % 251 for at in range(110, 160))
    memory.write("in", 990, b"0123456789")
    assert made.path.read_bytes()[1090:1100] == b"0123456789"
    assert made.path.read_bytes()[1100] == 1100 % 251
    assert memory.status() == (RegionStatus("in", made.key, 100, 1000),)
    assert memory.status("in") == memory.status()


def test_a_key_may_come_without_its_slash(memory: SharedMemory, made: Object) -> None:
    memory.register("in", made.key[1:], 0, SIZE)
    assert memory.status("in")[0].key == made.key[1:]


def test_buffers_of_any_shape_are_filled(memory: SharedMemory, made: Object) -> None:
    memory.register("in", made.key, 0, SIZE)
    buffer = memoryview(bytearray(64)).cast("I", (4, 4))
    memory.read_into("in", 0, buffer)
    assert buffer.tobytes() == bytes(range(64))
    memory.write("in", 64, buffer)
    assert made.path.read_bytes()[64:128] == bytes(range(64))


def test_what_was_read_does_not_change_with_the_region(memory: SharedMemory, made: Object) -> None:
    memory.register("in", made.key, 0, SIZE)
    buffer = bytearray(8)
    memory.read_into("in", 0, memoryview(buffer))
    made.path.write_bytes(b"\xff" * SIZE)
    assert buffer == bytes(range(8))


def test_it_is_off_unless_it_was_asked_for(made: Object) -> None:
    memory = SharedMemory(LIMITS, enabled=False)
    for use in (
        lambda: memory.register("in", made.key, 0, 1),
        lambda: memory.unregister("in"),
        lambda: memory.check("in", 0, 1),
        lambda: memory.read_into("in", 0, memoryview(bytearray(1))),
        lambda: memory.write("in", 0, b"x"),
        lambda: memory.status("in"),
    ):
        with pytest.raises(InputError, match="shared memory is off"):
            use()
    assert memory.status() == ()


@pytest.mark.parametrize(
    "key",
    [
        "", "/", "//", ".", "..", "/.", "/..", "/../etc/passwd", "../etc/passwd", "/etc/passwd", "//etc", "/a/b", "a/b",
        "/a/", "/a\0", "\0", "/" + "a" * 256, "/" + "a" * 4096, "/proc/self/mem", "/dev/shm/x", "/fd\n",
        "/\u2024\u2024", "/\uff45", "/a b", "~", "/sem.x",
        "sem.lock", "/*", "/memfd:arena", b"/bytes", None, 7,
    ],
)  # fmt: skip
def test_invalid_shared_memory_names_are_refused_before_any_open(
    memory: SharedMemory, key: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weftline.engine.serving.auth.shared_memory._open", lambda *_: pytest.fail("it was opened"))
    assert "its key is no name of shared memory" in refused(memory, key)


@pytest.mark.parametrize(
    "name", ["", "a" * 129, "a/b", "../x", "a\0", "a\nb", "\u0430bc", "a b", None, 7, "x" * 1_000_000]
)
def test_a_name_that_is_none_is_refused(memory: SharedMemory, made: Object, name: object) -> None:
    refused(memory, made.key, name)


@pytest.mark.parametrize(
    ("offset", "size"),
    [
        (0, 0), (0, -1), (-1, 1), (0, SIZE + 1), (1, SIZE), (SIZE, 1), (2**63 - 1, 1), (1, 2**63 - 1),
        (2**63 - 1, 2**63 - 1), (2**64, 1), (0, 2**64), (2**64 - 1, 2), (0, LIMITS.region_bytes_max + 1), (0.0, 1),
        (True, 1), ("0", 1), (0, None), (10**400, 1),
    ],
)  # fmt: skip
def test_a_range_outside_the_object_is_refused(
    memory: SharedMemory, made: Object, offset: object, size: object
) -> None:
    refused(memory, made.key, "in", offset, size)


def test_a_region_has_a_largest_size(memory: SharedMemory, made: Object) -> None:
    os.truncate(made.path, 2 * LIMITS.region_bytes_max)
    assert "expected 1 to 1048576" in refused(memory, made.key, "in", 0, LIMITS.region_bytes_max + 1)
    memory.register("in", made.key, LIMITS.region_bytes_max, LIMITS.region_bytes_max)


def test_no_refusal_says_whether_the_object_exists(memory: SharedMemory, made: Object) -> None:
    missing = refused(memory, "/weftline_test_none", "in", 0, SIZE)
    assert refused(memory, made.key, "in", 0, SIZE + 1) == missing


def test_links_pipes_folders_sockets_and_shared_names_are_refused(memory: SharedMemory, made: Object) -> None:
    link, pipe, folder, bound, second = (
        Path(f"{made.path}_{kind}") for kind in ("link", "pipe", "dir", "sock", "hard")
    )
    link.symlink_to(made.path)
    os.mkfifo(pipe, 0o600)
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(bound))
        try:
            for path in (link, pipe, folder, bound):
                refused(memory, f"/{path.name}")
            second.hardlink_to(made.path)
            refused(memory, made.key)
        finally:
            for path in (link, pipe, bound, second):
                path.unlink(missing_ok=True)
            folder.rmdir()
    memory.register("in", made.key, 0, SIZE)


def test_memory_of_another_user_is_refused_even_where_the_server_is_root(memory: SharedMemory, made: Object) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    made.path.chmod(0o666)
    os.chown(made.path, 12345, 12345)
    refused(memory, made.key)


def test_a_name_is_registered_once(memory: SharedMemory, made: Object) -> None:
    memory.register("in", made.key, 0, 8)
    before = descriptors()
    with pytest.raises(InputError, match="registered already"):
        memory.register("in", made.key, 0, 16)
    assert memory.status("in")[0].size_bytes == 8
    assert descriptors() == before
    memory.register("again", made.key, 0, 16)  # the same object under another name is fine


def test_there_is_a_most_of_regions(memory: SharedMemory, made: Object) -> None:
    for at in range(LIMITS.regions_max):
        memory.register(f"r{at}", made.key, 0, 8)
    before = descriptors()
    with pytest.raises(LimitReached):
        memory.register("more", made.key, 0, 8)
    assert descriptors() == before
    memory.unregister("r0")
    memory.register("more", made.key, 0, 8)


def test_unregistering_gives_descriptors_back_and_can_be_done_twice(memory: SharedMemory, made: Object) -> None:
    before = descriptors()
    for at in range(3):
        memory.register(f"r{at}", made.key, 0, 8)
    memory.unregister("r0")
    memory.unregister("r0")
    memory.unregister("never there")
    assert [one.name for one in memory.status()] == ["r1", "r2"]
    memory.unregister_all()
    memory.unregister_all()
    assert (memory.status(), descriptors()) == ((), before)


@pytest.mark.parametrize(
    ("offset", "size"), [(-1, 1), (0, 101), (100, 1), (1, 100), (2**63 - 1, 1), (0, -1), (2**64, 0), (-(2**63), 2**63)]
)
def test_a_range_outside_the_region_is_refused(memory: SharedMemory, made: Object, offset: int, size: int) -> None:
    memory.register("in", made.key, 50, 100)
    with pytest.raises(InputError, match="expected a range of its 100 bytes"):
        memory.check("in", offset, size)
    if 0 <= size < 1000:
        with pytest.raises(InputError):
            memory.read_into("in", offset, memoryview(bytearray(size)))
        with pytest.raises(InputError):
            memory.write("in", offset, bytes(size))


@given(st.integers(-(2**65), 2**65), st.integers(-(2**65), 2**65))
def test_a_range_is_inside_or_refused_whatever_the_numbers(offset: int, size: int) -> None:
    held = Object(64)
    memory = SharedMemory(LIMITS, enabled=True)
    try:
        memory.register("in", held.key, 0, 64)
        try:
            memory.check("in", offset, size)
        except InputError:
            assert offset < 0 or size < 0 or offset + size > 64
        else:
            assert 0 <= offset <= offset + size <= 64
    finally:
        memory.unregister_all()
        held.path.unlink()


def test_an_unregistered_region_is_refused(memory: SharedMemory) -> None:
    for name in ("none", "", "../x", "a\r\nb\x1b[2J", "x" * 10_000):
        with pytest.raises(InputError) as caught:
            memory.check(name, 0, 1)
        assert "\x1b" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_client_that_shrinks_its_memory_is_only_refused(memory: SharedMemory, made: Object) -> None:
    memory.register("in", made.key, 0, SIZE)
    os.truncate(made.path, 10)
    with pytest.raises(InputError, match="made smaller"):
        memory.read_into("in", 0, memoryview(bytearray(SIZE)))
    with pytest.raises(InputError, match="made smaller"):
        memory.write("in", 0, bytes(SIZE))
    assert made.path.stat().st_size == 10  # not made larger again by us
    os.truncate(made.path, 0)
    with pytest.raises(InputError):
        memory.read_into("in", 0, memoryview(bytearray(1)))


def test_a_mapping_of_the_same_memory_would_have_been_killed(made: Object) -> None:
    opened = f"import mmap, os; fd = os.open({str(made.path)!r}, os.O_RDWR)"
    script = f"{opened}; mapped = mmap.mmap(fd, {SIZE}); os.truncate(fd, 0); print(mapped[0])"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, timeout=30)
    assert ended.returncode == -7  # SIGBUS: why regions are never mapped


def test_shrinking_a_region_in_use_ends_in_refusals_only(memory: SharedMemory, made: Object) -> None:
    memory.register("in", made.key, 0, SIZE)
    over = threading.Event()

    def shake() -> None:
        while not over.is_set():
            os.truncate(made.path, 0)
            os.truncate(made.path, SIZE)

    shaker = threading.Thread(target=shake)
    shaker.start()
    outcomes = set()
    buffer = memoryview(bytearray(SIZE))
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        for use in (memory.read_into, memory.write):
            try:
                use("in", 0, buffer)
            except InputError:
                outcomes.add("refused")
            else:
                outcomes.add("done")
    over.set()
    shaker.join()
    assert "done" in outcomes


def test_unregistering_while_a_request_reads_lets_it_finish(
    memory: SharedMemory, made: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.register("in", made.key, 0, SIZE)
    before = descriptors()
    read = os.preadv

    def slow(fd: int, buffers: list[memoryview], offset: int) -> int:
        memory.unregister("in")
        strangers.append(os.open(os.devnull, os.O_RDONLY))  # would take the descriptor's number, were it closed
        return read(fd, buffers, offset)

    strangers: list[int] = []
    monkeypatch.setattr(os, "preadv", slow)
    buffer = bytearray(8)
    memory.read_into("in", 0, memoryview(buffer))
    assert buffer == bytes(range(8))
    assert memory.status() == ()
    for fd in strangers:
        os.close(fd)
    assert descriptors() == before - 1


def test_threads_that_register_read_and_unregister_leave_nothing(made: Object) -> None:
    memory = SharedMemory(ServeLimits(regions_max=1000), enabled=True)
    before = descriptors()
    wrong: list[BaseException] = []

    def work(mine: int) -> None:
        buffer = bytearray(256)
        for at in range(100):
            try:
                memory.register(f"shared{at % 3}", made.key, 0, SIZE)
            except InputError:
                pass
            try:
                memory.read_into(f"shared{(at + mine) % 3}", 0, memoryview(buffer))
                if buffer != bytes(at % 251 for at in range(256)):
                    wrong.append(AssertionError("other bytes"))
            except InputError:
                pass
            except BaseException as error:
                wrong.append(error)
            memory.unregister(f"shared{(at + 1) % 3}")

    threads = [threading.Thread(target=work, args=(mine,)) for mine in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    memory.unregister_all()
    assert wrong == []
    assert descriptors() == before


def test_a_full_file_system_is_reported_without_its_name(
    memory: SharedMemory, made: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.register("in", made.key, 0, SIZE)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device", FOLDER)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(InputError) as caught:
        memory.write("in", 0, b"x")
    assert FOLDER not in str(caught.value)


@pytest.mark.slow
def test_memory_of_our_own_processes_has_no_name_to_register(memory: SharedMemory, tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    head = "weftline: 1\nname: p\ninputs: {x: text}\noutputs: {y: say.value}\n"
    file.write_text(f"{head}steps:\n  say: {{node: echo, inputs: {{value: x}}}}\n")
    with weftline.load(file).open() as session:
        session.run(x="hello")
        targets = [
            _target(fd) for pid in (os.getpid(), *session.pids().values()) for fd in Path(f"/proc/{pid}/fd").iterdir()
        ]
        arenas = [link for link in targets if link.startswith("/memfd:")]
        assert arenas
        assert [link for link in targets if link.startswith(FOLDER)] == []
        for key in {*arenas, *(link.removeprefix("/memfd:").partition(" ")[0] for link in arenas)}:
            with pytest.raises(InputError):
                memory.register("arena", key, 0, 1)


def _target(fd: Path) -> str:
    try:
        return str(fd.readlink())
    except OSError:
        return ""


def test_the_module_maps_nothing() -> None:
    import weftline.engine.serving.auth.shared_memory as module

    assert mmap.__name__ not in vars(module)
    assert "mmap(" not in Path(module.__file__ or "").read_text()
