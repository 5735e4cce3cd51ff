import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from weftline.engine.jobs.rows import Unusable
from weftline.engine.jobs.sources.media import Loader
from weftline.engine.jobs.sources.row_files import Outside, check_public, check_url


@pytest.mark.timeout(20)
def test_a_pipe_is_refused_as_a_media_file_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.png")
    with Loader(folder=str(tmp_path)) as loader:
        assert loader.read_all(["a.png"]) == [Unusable("cannot read a.png: it is no regular file")]


def test_a_folder_is_refused_as_a_media_file(tmp_path: Path) -> None:
    (tmp_path / "a.png").mkdir()
    with Loader(folder=str(tmp_path)) as loader:
        assert loader.read_all(["a.png"]) == [Unusable("cannot read a.png: Is a directory")]


def test_reasons_hold_no_passwords() -> None:
    with Loader(roots=("memory://u:SECRET@none",)) as loader:
        found = loader.read_all(["memory://u:SECRET@none/a.png"])[0]
    assert found == Unusable("there is no file memory://none/a.png")


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Return a data set's folder, beside a file that its rows must not read."""
    (tmp_path / "secret").write_bytes(b"key")
    data = tmp_path / "data"
    (data / "images").mkdir(parents=True)
    (data / "images" / "a.png").write_bytes(b"picture")
    (data / "escape.png").symlink_to(tmp_path / "secret")
    (data / "away").symlink_to(tmp_path)
    (data / "inside.png").symlink_to(data / "images" / "a.png")
    return data


@pytest.mark.parametrize(
    "name",
    [
        *("../secret", "images/../../secret", "escape.png", "away/secret", "{up}/secret", "/etc/passwd"),
        *("/proc/self/environ", "~/.ssh/id_rsa", "file:///etc/passwd", "local:///etc/passwd", "http://127.0.0.1:9/x"),
        *("s3://bucket/a.png", "simplecache::file:///etc/passwd", "zip://a::file:///tmp/x.zip", "memory://x"),
        *("github://a:b@/c", "data:,x::y", "file:///etc/passwd::x"),
    ],
)
def test_a_row_reads_no_file_outside_the_data(name: str, outside: Path) -> None:
    with Loader(folder=str(outside)) as loader:
        [found] = loader.read_all([name.format(up=outside.parent)])
    assert isinstance(found, Unusable)
    assert "--media-" in found.reason or "chain of file systems" in found.reason, found.reason


@pytest.mark.parametrize("name", ["images/a.png", "./images/../images/a.png", "inside.png", "{data}/images/a.png"])
def test_a_row_reads_the_files_of_the_data(name: str, outside: Path) -> None:
    with Loader(folder=str(outside)) as loader:
        assert loader.read_all([name.format(data=outside)]) == [b"picture"]


def test_media_roots_allow_other_folders_and_no_neighbours(outside: Path) -> None:
    (outside.parent / "data2").mkdir()
    (outside.parent / "data2" / "a").write_bytes(b"2")
    with Loader(folder=str(outside), roots=(str(outside), str(outside.parent / "data2"))) as loader:
        found = loader.read_all(["../data2/a", "../secret", "../data2/../secret"])
    assert found[0] == b"2" and all(isinstance(one, Unusable) for one in found[1:])


def test_a_path_of_the_calling_program_is_trusted(outside: Path) -> None:
    with Loader(folder=str(outside)) as loader:
        assert loader.read_all([outside.parent / "secret"]) == [b"key"]


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("s3://bucket/data/a.png", True),
        ("s3://bucket/data/../other/a.png", False),
        ("s3://bucket/data/%2e%2e/other/a.png", False),
        ("s3://bucket/database/a.png", False),
        ("s3://other/data/a.png", False),
        ("gs://bucket/data/a.png", False),
        ("http://user@bucket/data/a", False),
    ],
)
def test_a_url_must_lie_below_the_url_of_the_data(url: str, allowed: bool) -> None:
    if allowed:
        check_url(url, ("s3://bucket/data",), web=False)
        return
    with pytest.raises(Outside):
        check_url(url, ("s3://bucket/data",), web=False)


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "fd00::1", "::ffff:10.0.0.1"])
def test_private_addresses_are_not_connected_to(address: str) -> None:
    with pytest.raises(OSError, match="no public address"):
        check_public(address)


class Redirecting(BaseHTTPRequestHandler):
    """Serves `/data/a`, and redirects `/data/away` to another name of this machine."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(f"{self.headers['Host']}{self.path}")
        if self.path == "/data/away":
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{self.server.server_address[1]}/secret")
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"served")

    do_HEAD = do_GET

    def log_message(self, *args: object) -> None: ...


@pytest.mark.timeout(30)
def test_redirects_to_private_addresses_are_not_followed() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Redirecting)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        with Loader(folder=f"{base}/data", urls=True) as loader:
            good, away, other = loader.read_all(["a", "away", f"{base}/secret"])
        assert good == b"served"
        assert isinstance(away, Unusable) and isinstance(other, Unusable)
        assert not any("/secret" in one for one in Redirecting.asked)
    finally:
        server.shutdown()
        server.server_close()
