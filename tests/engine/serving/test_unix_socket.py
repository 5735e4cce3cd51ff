"""The path of a Unix socket: one server at a time, for whom it is meant, and nothing is removed that is another's."""

from __future__ import annotations

import grp
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from weftline.engine.serving.unix_socket import SocketClaim, identity, placed, remove_own
from weftline.errors import WeftlineError

HOLDER = """
import sys, time
from pathlib import Path
from weftline.engine.serving.unix_socket import SocketClaim, placed
import socket
path = Path(sys.argv[1])
claim = SocketClaim(path)
with placed(path, None) as private:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(private))
    sock.listen()
print("up", flush=True)
time.sleep(120)
"""


def listen(path: Path, group: str | None = None) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    with placed(path, group) as private:
        sock.bind(str(private))
        sock.listen()
    return sock


def test_a_second_claim_is_refused_by_name_until_the_first_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "w.sock"
    with SocketClaim(path):
        with pytest.raises(WeftlineError, match=f"the socket {path}: another process listens there"):
            SocketClaim(path)
        assert path.with_name("w.sock.lock").exists()
    assert list(tmp_path.iterdir()) == []
    SocketClaim(path).close()


def test_who_listens_without_a_claim_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "w.sock"
    with listen(path):
        with pytest.raises(WeftlineError, match="another process listens there"):
            SocketClaim(path)
        assert path.is_socket()
    with SocketClaim(path):  # no process listens any more: it is stale
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_server_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "w.sock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"up\n"
        with pytest.raises(WeftlineError, match="another process listens there"):
            SocketClaim(path)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert path.is_socket()
    with SocketClaim(path), listen(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(WeftlineError, match="something that is no socket is there"):
        SocketClaim(path)
    assert path.read_text() == "mine" and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(WeftlineError, match="cannot be opened: No such file"):
        SocketClaim(tmp_path / "none" / "w.sock")


def test_only_its_user_may_connect_or_a_group_beside(tmp_path: Path) -> None:
    with listen(tmp_path / "own"), listen(tmp_path / "shared", grp.getgrgid(os.getgid()).gr_name):
        modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("own", "shared")]
        assert modes == [0o600, 0o660]
        assert (tmp_path / "shared").stat().st_gid == os.getgid()
    with pytest.raises(WeftlineError, match="there is no group 'no-such-group'"):
        listen(tmp_path / "x", "no-such-group")
    assert {one.name for one in tmp_path.iterdir()} == {"own", "shared"}


def test_only_ones_own_socket_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "w.sock"
    with listen(path):
        own = identity(path)
        with listen(path):  # another server takes the path over
            remove_own(path, own)
            assert path.is_socket()
            remove_own(path, identity(path))
            assert not path.exists()
    remove_own(path, own)
