"""Models named by URL: fetched through fsspec, pinned by their SHA-256, resumed, compared before each opening."""

from __future__ import annotations

import hashlib
import io
import json
import multiprocessing
import os
import pwd
import resource
import threading
import time
import uuid
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import rmtree
from threading import Thread
from typing import Any

import fsspec
import numpy as np
import pytest

import weftline
from tests.engine.llm import tiny
from tests.nodes import random_models
from weftline.cli.fetch import FetchOptions, fetch_file
from weftline.cli.fetch import fetch as fetch_command
from weftline.errors import ModelError
from weftline.nodes import model_download
from weftline.nodes.classify import Classify
from weftline.nodes.contract import Batch, ConfigError, OpenContext, StepContext
from weftline.nodes.embed import Embed
from weftline.nodes.model_download import fetch
from weftline.nodes.model_file import find_model
from weftline.nodes.model_store import LOCK, StoredModel, add_pin, cache_dir, read_lock, verify
from weftline.nodes.transformers_tasks.node import Transformers
from weftline.pipelines.check.options import to_config

INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
FILES: dict[str, bytes] = {
    "config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    "model-00001-of-00002.safetensors": bytes(range(256)) * 40,
    "model-00002-of-00002.safetensors": b"second" * 999,
    "1_Pooling/config.json": b'{"pooling": true}',
    "pytorch_model.bin": b"pickled",
    "README.md": b"# model",
    ".gitattributes": b"x",
}
KEPT = {name for name in FILES if name not in ("pytorch_model.bin", "README.md", ".gitattributes")}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weftline" / "models"


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Yield the URL of a model in a store."""
    at = f"memory://{uuid.uuid4().hex}/m" if request.param == "memory" else f"file://{tmp_path}/store/m"
    put(at, FILES)
    yield at
    if request.param == "memory":
        fsspec.filesystem("memory").rm(at.removeprefix("memory:/"), recursive=True)


def put(url: str, files: dict[str, bytes]) -> None:
    system, root = fsspec.core.url_to_fs(url)
    for name, data in files.items():
        path = f"{root}/{name}" if name else root
        system.makedirs(path.rpartition("/")[0], exist_ok=True)
        system.pipe_file(path, data)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


def ignore(line: str) -> None:
    pass


def test_the_cache_is_below_the_users() -> None:
    assert str(cache_dir()).startswith(os.environ["XDG_CACHE_HOME"])


def test_a_user_without_a_home_folder_must_name_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / LOCK).write_text(json.dumps({"models": {"s3://b/m": {"x.gguf": {"bytes": 1, "sha256": "0" * 64}}}}))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])  # no entry for the user
    with pytest.raises(ConfigError, match="this user has no home folder") as caught:
        find_model("s3://b/m", tmp_path)
    assert caught.value.fix == "set XDG_CACHE_HOME"
    with pytest.raises(ConfigError, match="this user has no home folder"):
        fetch("memory://m", None, {}, ignore)


def test_a_fetched_model_is_a_folder_of_this_machine(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="is not pinned") as caught:
        find_model(url, tmp_path)
    assert "weftline fetch" in caught.value.fix
    model = fetch(url, None, {}, ignore)
    add_pin(tmp_path, url, model)
    folder = find_model(url, tmp_path)
    assert folder is not None and contents(folder) == {name: FILES[name] for name in KEPT}
    assert {one.name: one.sha256 for one in model.files} == {n: hashlib.sha256(FILES[n]).hexdigest() for n in KEPT}
    assert read_lock(tmp_path)[url].folder == folder
    assert find_model(f"{url}/", tmp_path) == folder
    assert find_model(f"{url}/1_Pooling", tmp_path) == folder / "1_Pooling"
    assert find_model(f"{url}/../..", tmp_path) is None and find_model(f"{url}/other", tmp_path) is None
    verify({"model": url}, tmp_path, lambda phrase, fraction: None)


def test_a_pinned_model_is_not_read_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fetch(url, None, {}, ignore)
    monkeypatch.setattr(model_download, "_connect", lambda url, storage: pytest.fail("the store was read"))
    assert fetch(url, model, {}, ignore) == model


def test_changed_files_are_found_before_opening_and_replaced(tmp_path: Path, url: str) -> None:
    model = fetch(url, None, {}, ignore)
    add_pin(tmp_path, url, model)
    weights = model.folder / "model-00001-of-00002.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + b"!")
    with pytest.raises(ModelError, match=r"model-00001-of-00002\.safetensors in the cache is not the file .* pins"):
        verify({"draft_model": url}, tmp_path, lambda phrase, fraction: None)
    lines: list[str] = []
    fetch(url, model, {}, lines.append)
    assert weights.read_bytes() == data and len(lines) == 1
    weights.unlink()
    with pytest.raises(ConfigError, match="is not on this machine: 1 of its 6 files are missing"):
        find_model(url, tmp_path)


def test_a_store_with_other_files_than_pinned_is_refused(url: str) -> None:
    model = fetch(url, None, {}, ignore)
    name = "model-00002-of-00002.safetensors"
    (model.folder / name).unlink()
    put(url, {name: b"SECOND" * 999})
    with pytest.raises(ModelError, match=rf"{name} has the SHA-256 [0-9a-f]+, but [0-9a-f]+ is pinned"):
        fetch(url, model, {}, ignore)
    assert not (model.folder / name).exists() and not (model.folder / f"{name}.part").exists()
    changed = fetch(url, None, {}, ignore)
    assert changed.folder != model.folder and (changed.folder / name).read_bytes() == b"SECOND" * 999


def test_an_interrupted_download_goes_on(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_download, "CHUNK_BYTES", 1000)
    system, _ = fsspec.core.url_to_fs(url)
    name = "model-00001-of-00002.safetensors"
    opened: list[int] = []

    class Breaking:
        def __init__(self, file: Any, breaks: bool) -> None:
            self.file, self.breaks = file, breaks

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def seek(self, place: int) -> None:
            opened.append(place)
            self.file.seek(place)

        def read(self, count: int) -> bytes:
            if self.breaks and self.file.tell() >= 3000:
                raise OSError("connection lost")
            return bytes(self.file.read(count))

    real, breaks = type(system).open, [True]

    def open_(self: Any, path: str, *a: Any, **k: Any) -> Any:
        file = real(self, path, *a, **k)
        return Breaking(file, breaks[0]) if path.endswith(name) else file

    monkeypatch.setattr(type(system), "open", open_)
    with pytest.raises(ModelError, match="cannot be read: OSError: connection lost"):
        fetch(url, None, {}, ignore)
    breaks[0] = False
    model = fetch(url, None, {}, ignore)
    assert opened == [0, 3000] and (model.folder / name).read_bytes() == FILES[name]
    (model.folder / name).rename(model.folder / f"{name}.part")
    with (model.folder / f"{name}.part").open("r+b") as part:
        part.write(b"other")  # what was there is of another file: read from the start
    fetch(url, model, {}, ignore)
    assert opened[2:] == [0] and (model.folder / name).read_bytes() == FILES[name]


def test_a_missing_shard_is_named(url: str) -> None:
    system, root = fsspec.core.url_to_fs(url)
    system.rm_file(f"{root}/model-00002-of-00002.safetensors")
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is missing, which model\.safet.* names"):
        fetch(url, None, {}, ignore)


def test_a_model_above_the_limits_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(len(FILES[name]) for name in KEPT)
    monkeypatch.setattr(model_download, "MODEL_BYTES_MAX", size - 1)
    with pytest.raises(ModelError, match=f"{size} bytes, expected at most {size - 1}"):
        fetch(url, None, {}, ignore)
    monkeypatch.undo()
    monkeypatch.setattr(model_download, "LISTED_MAX", 3)
    with pytest.raises(ModelError, match="files there, expected 1 to 3"):
        fetch(url, None, {}, ignore)


def test_a_full_disk_is_reported_before_the_download(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(model_download.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10}))
    with pytest.raises(ModelError, match=r"bytes to download, 10 are free in .*\n    fix: free some"):
        fetch(url, None, {}, ignore)


def test_what_was_downloaded_needs_no_further_room(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fetch(url, None, {}, ignore)
    name = "model-00001-of-00002.safetensors"
    part = model.folder / f"{name}.part"
    (model.folder / name).rename(part)
    part.write_bytes(part.read_bytes()[:-8])
    monkeypatch.setattr(model_download.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 8}))
    fetch(url, model, {}, ignore)
    assert (model.folder / name).read_bytes() == FILES[name]


def test_parts_of_unknown_versions_are_not_pinned(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_download, "_VERSION_KEYS", ())
    first = fetch(url, None, {}, ignore)
    name = "model-00001-of-00002.safetensors"
    system, root = fsspec.core.url_to_fs(url)
    listed = model_download._list(system, root, url)
    what = json.dumps([url, *((one, found.size_bytes, "") for one, found in listed.items())])
    left = cache_dir() / f"new-{hashlib.sha256(what.encode()).hexdigest()}"
    left.mkdir()
    (left / f"{name}.part").write_bytes(b"old" * 30)
    (left / "config.json").write_bytes(b"x" * len(FILES["config.json"]))
    assert fetch(url, None, {}, ignore) == first


def test_a_model_that_changes_during_its_download_is_refused(url: str) -> None:
    name = "model-00002-of-00002.safetensors"

    def change(line: str) -> None:
        if line.startswith(name):
            put(url, {"config.json": b"{}" * 50})

    with pytest.raises(ModelError, match="changed in the store"):
        fetch(url, None, {}, change)


def test_a_file_that_is_cut_during_its_download_is_refused(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/m"
    put(url, FILES)

    def cut(line: str) -> None:
        if line.startswith("config.json"):
            (tmp_path / "m" / "config.json").write_bytes(b"")

    with pytest.raises(ModelError, match="ends after 0 of 2 bytes: it changed in the store"):
        fetch(url, None, {}, cut)


def test_pins_of_two_commands_are_both_kept(tmp_path: Path, url: str) -> None:
    model = fetch(url, None, {}, ignore)
    urls = [f"memory://pinned/{place}" for place in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda one: add_pin(tmp_path, one, model), urls))
    assert sorted(read_lock(tmp_path)) == urls


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("memory://nothing/here", "0 files there"),
        ("s3://key:secret@bucket/m", r"model s3://\.\.\.@bucket/m: expected a plain URL, without a password"),
        ("https://token@host/m.gguf", r"model https://\.\.\.@host/m.gguf: expected a plain URL"),
        ("http://user:secret@host/m.gguf", r"model http://\.\.\.@host/m.gguf: expected a plain URL"),
        ("https://host/m.gguf?signature=secret", "model https://host/m.gguf: expected a plain URL"),
        ("simplecache::memory://m", "expected a plain URL, without .* a chain of file systems"),
        ("nowhere://bucket/m", "Protocol not known: nowhere"),
        ("memory://nothing/m.gguf", "it cannot be listed: FileNotFoundError"),
    ],
)
def test_urls_that_cannot_be_fetched_say_why(url: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        fetch(url, None, {}, ignore)


@pytest.mark.parametrize(
    "url",
    ["http://host/m.gguf", "http://127.0.0.1.host/m", "http://10.0.0.1:9000/m", "ftp://host/m", "http:///m.gguf"],
)
def test_unencrypted_stores_of_other_machines_are_refused(url: str) -> None:
    with pytest.raises(ModelError, match=r"(http|ftp) is not encrypted.*\n    fix: use https, or copy") as caught:
        fetch(url, None, {}, ignore)
    assert url in str(caught.value)


@pytest.fixture
def web() -> Iterator[str]:
    """Yield the URL of a server on loopback: /m.gguf is a file, and paths of TARGETS redirect."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            there = TARGETS.get(self.path)
            self.send_response(302 if there else 200)
            self.send_header("location", there or "")
            self.send_header("content-length", "4")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(b"GGUF")

        do_HEAD = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://localhost:{server.server_port}"
        server.shutdown()


TARGETS = {
    "/near.gguf": "/m.gguf",
    "/far.gguf": "http://user:secret@192.0.2.1/m.gguf?secret",
    "/twice.gguf": "/far.gguf",
}


@pytest.mark.parametrize("path", ["m.gguf", "near.gguf"])
def test_http_on_this_machine_is_fetched(web: str, path: str) -> None:
    model = fetch(f"{web}/{path}", None, {}, ignore)
    assert model.path.read_bytes() == b"GGUF"


@pytest.mark.parametrize("path", ["far.gguf", "twice.gguf"])
def test_a_redirect_to_an_unencrypted_store_is_refused(web: str, path: str) -> None:
    with pytest.raises(ModelError, match=r"model http://192\.0\.2\.1/m\.gguf: http is not encrypted") as caught:
        fetch(f"{web}/{path}", None, {}, ignore)
    assert "secret" not in str(caught.value)


INDEX = json.dumps({"weight_map": {"a": "model.safetensors"}}).encode()
PAGE = b"".join(f'<a href="{name}">{name}</a>'.encode() for name in ("model.safetensors", "config.json"))


NAMES = (
    "../../up.json", "%2e%2e/up.json", "/etc/passwd.json", "C:%5Cx.json", "a%00b.json", ".hidden.json",
    "a%2Fb/../c.json", "http://127.0.0.1:1/away.json", "file:///etc/passwd.json", "a\\b.json", "&#46;&#46;/x.json",
    "\uff0e\uff0e/x.json",
)  # fmt: skip


def _bomb() -> bytes:
    """Return a page of 500 MiB, compressed."""
    packer = zlib.compressobj(1, wbits=31)
    parts = [packer.compress(one) for one in (PAGE, *[b" " * (1 << 20)] * 500)]
    return b"".join(parts) + packer.flush()


class HostileStore(BaseHTTPRequestHandler):
    """Serves folders of a model: one is honest, the others send more than they state, or never end."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        folder, _, name = self.path.lstrip("/").partition("/")
        if folder == "loop":
            self.send_response(302)
            self.send_header("location", f"/loop/{name}x")
            self.end_headers()
            return
        if folder == "headers":
            try:
                self.wfile.write(b"HTTP/1.1 200 OK\r\nx: ")
                while True:
                    self.wfile.write(b"y")
                    time.sleep(0.05)
            except OSError:
                return
        if folder == "gzip" and not name:
            body = _bomb()
            self.send_response(200)
            for header, value in (("type", "text/html"), ("encoding", "gzip"), ("length", str(len(body)))):
                self.send_header(f"content-{header}", value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
            return
        index = name.endswith("index.json")
        body = INDEX if index else b"weights" if name else PAGE
        if folder == "index" and not name:
            body = PAGE + b'<a href="model.safetensors.index.json">i</a>'
        if folder in ("names", "many") and not name:
            names = NAMES if folder == "names" else [f"f{place}.json" for place in range(100_000)]
            body = PAGE + "".join(f'<a href="{one}">x</a>' for one in names).encode()
        endless = (folder == "index" and index) or (folder == "page" and not name)
        self.send_response(200)
        self.send_header("content-type", "text/html" if not name else "application/octet-stream")
        if not endless and folder != "unsized":
            self.send_header("content-length", str(len(body)))
        elif folder == "index":
            self.send_header("content-length", "1000000000000")
        self.end_headers()
        if self.command == "HEAD":
            return
        try:
            self.wfile.write(body)
            while endless:
                self.wfile.write(b" " * (1 << 20))
        except OSError:
            pass

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def hostile() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), HostileStore) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://localhost:{server.server_port}"
        server.shutdown()


@pytest.mark.timeout(60)
def test_a_folder_of_the_web_is_fetched(hostile: str) -> None:
    model = fetch(f"{hostile}/good", None, {}, ignore)
    assert contents(model.folder) == {"model.safetensors": b"weights", "config.json": b"weights"}


@pytest.mark.timeout(60)
def test_names_that_lead_out_of_a_folder_of_the_web_are_left_out(hostile: str, cache: Path) -> None:
    try:
        model = fetch(f"{hostile}/names", None, {}, ignore)
    except ModelError:
        model = None  # refused as a whole
    assert model is None or contents(model.folder).keys() <= {"model.safetensors", "config.json", "up.json", "c.json"}
    outside = [one for one in cache.parent.rglob("*.json") if cache not in one.parents]
    assert not outside


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("index", "model.safetensors.index.json has more than"),
        ("page", "it cannot be listed: .*more than"),
        ("unsized", "states the size None"),
        ("loop", "it cannot be listed: .*edirect"),
        ("headers", "headers of a response take more than"),
        ("gzip", "0 files there|cannot be listed"),
        ("many", "files there, expected 1 to"),
    ],
)
def test_endless_answers_of_a_store_are_refused(
    hostile: str, folder: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_download, "HEADERS_MAX_S", 0.5)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelError, match=reason):
        fetch(f"{hostile}/{folder}", None, {}, ignore)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000


def test_an_index_of_another_size_than_stated_is_refused() -> None:
    class Lying:
        def open(self, path: str, mode: str, block_size: int) -> io.BytesIO:
            return io.BytesIO(b"x" * 1000)

    with pytest.raises(ValueError, match="more than the 10 bytes"):
        model_download._content(Lying(), model_download._Listed("i.json", 10, ""))
    with pytest.raises(ValueError, match="fewer than the 2000 bytes"):
        model_download._content(Lying(), model_download._Listed("i.json", 2000, ""))


def test_a_download_that_is_too_slow_ends() -> None:
    model_download._check_rate(1, 59.0)
    model_download._check_rate(100 << 20, 61.0)
    with pytest.raises(TimeoutError, match="expected at least 16384 a second"):
        model_download._check_rate(1000, 61.0)


def test_a_missing_package_of_a_protocol_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(url: str, **storage: Any) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", lacking)
    with pytest.raises(ModelError, match=r"Install s3fs to access S3\n    fix: pip install s3fs"):
        fetch("s3://bucket/m", None, {}, ignore)


class Hub(BaseHTTPRequestHandler):
    """The routes of Hugging Face's hub that its file system calls, for one model at one revision."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/api/models/owner/name/revision/abc":
            self._answer(json.dumps({"id": "owner/name", "sha": "abc"}).encode())
        elif path == "/api/models/owner/name/tree/abc":
            files = ({"path": name, "size": len(data), "oid": str(hash(data))} for name, data in FILES.items())
            self._answer(json.dumps([{"type": "file", **one} for one in files]).encode())
        elif path.startswith("/owner/name/resolve/abc/"):
            data = FILES[path.removeprefix("/owner/name/resolve/abc/")]
            wanted = self.headers.get("Range", f"bytes=0-{len(data)}").removeprefix("bytes=").split("-")
            self._answer(data[int(wanted[0]) : int(wanted[1]) + 1], 206 if "Range" in self.headers else 200)
        else:
            self._answer(b"", 404)

    def _answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: object) -> None:
        pass


def test_a_model_of_the_hub_is_pinned_with_its_revision(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        storage = {"endpoint": f"http://127.0.0.1:{server.server_port}"}
        model = fetch("hf://owner/name@abc", None, storage, ignore)
        rmtree(model.folder)
        assert fetch("hf://owner/name@abc", model, storage, ignore) == model
        with pytest.raises(ModelError, match="hf://owner/name@def: it cannot be listed"):
            fetch("hf://owner/name@def", None, storage, ignore)
        server.shutdown()
    add_pin(tmp_path, model.url, model)
    path = find_model("hf://owner/name@abc", tmp_path)
    assert path is not None and contents(path) == {name: FILES[name] for name in KEPT}


def test_weights_of_ctranslate2_are_fetched_beside_their_vocabulary_only() -> None:
    at = f"memory://{uuid.uuid4().hex}/m"
    put(at, {"model.bin": b"\6\0\0\0", "config.json": b"{}"})
    with pytest.raises(ModelError, match=r"no file ends in .*found model\.bin"):
        fetch(at, None, {}, ignore)
    put(at, {"vocabulary.json": b"[]", "other.bin": b"x"})
    assert [one.name for one in fetch(at, None, {}, ignore).files] == ["config.json", "model.bin", "vocabulary.json"]


def test_pickled_weights_are_never_fetched() -> None:
    at = f"memory://{uuid.uuid4().hex}/m"
    put(at, {"pytorch_model.bin": b"x", "config.json": b"{}"})
    with pytest.raises(ModelError, match=r"no file ends in \.gguf.*found pytorch_model\.bin; pickled weights are not"):
        fetch(at, None, {}, ignore)


def test_a_model_of_one_file_is_that_file(tmp_path: Path) -> None:
    at = f"memory://{uuid.uuid4().hex}/chat.gguf"
    put(at, {"": b"GGUF"})
    model = fetch(at, None, {}, ignore)
    add_pin(tmp_path, at, model)
    path = find_model(at, tmp_path)
    assert path is not None and path.name == "chat.gguf" and path.read_bytes() == b"GGUF"


def _fetch_in_process(url: str, start: Any, found: Any) -> None:
    start.wait()
    found.put(str(fetch(url, None, {}, ignore).folder))


def test_downloads_at_the_same_time_wait_for_each_other(tmp_path: Path) -> None:
    at = f"file://{tmp_path}/store/m"
    put(at, FILES)
    here = multiprocessing.get_context("fork")
    start, found = here.Event(), here.Queue()
    processes = [here.Process(target=_fetch_in_process, args=(at, start, found)) for _ in range(4)]
    for one in processes:
        one.start()
    start.set()
    folders = {found.get(timeout=30) for _ in processes}
    assert len(folders) == 1
    for one in processes:
        one.join(30)
    (folder,) = folders
    assert contents(Path(folder)) == {name: FILES[name] for name in KEPT}
    assert [one.name for one in cache_dir().iterdir()] == [Path(folder).name for folder in folders]


def test_a_lock_is_held_by_one_at_a_time_though_its_file_is_removed(cache: Path) -> None:
    cache.mkdir(parents=True)
    held: list[int] = []
    most = [0]

    def hold(number: int) -> None:
        for _ in range(50):
            with model_download._locked(cache / "m"):
                held.append(number)
                most.append(len(held))
                time.sleep(0)  # others try to take it
                held.remove(number)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(hold, range(8)))
    assert max(most) == 1 and len(most) == 401 and list(cache.iterdir()) == []


def test_interrupted_downloads_and_lock_files_are_removed_by_the_command(tmp_path: Path, url: str, cache: Path) -> None:
    """Kept are those written to within a day, those of a running process, and models."""
    model = fetch(url, None, {}, ignore)
    for name in ("new-old", "new-recent", "new-running"):
        (cache / name / "1_Pooling").mkdir(parents=True)
        (cache / name / "1_Pooling" / "config.json.part").write_bytes(b"half")
    long_ago_s = (cache / "new-old").stat().st_mtime - model_download.ABANDONED_S - 10
    for path in (cache / "new-old", cache / "new-running", cache / "new-recent", model.folder):
        for one in (path, *path.rglob("*")):
            if one.name != "config.json.part" or path.name != "new-recent":
                os.utime(one, (long_ago_s, long_ago_s))
    for name in ("new-gone.lock", f"{model.folder.name}.lock"):  # of killed processes
        (cache / name).touch()
    (tmp_path / "p.yaml").write_text(
        "weftline: 1\nname: p\ninputs: {words: text}\noutputs: {out: same.value}\n"
        "steps: {same: {node: echo, inputs: {value: words}}}\n"
    )
    with model_download._locked(cache / "new-running"):
        fetch_command(FetchOptions(files=(str(tmp_path / "p.yaml"),)))
        kept = {model.folder.name, "new-recent", "new-running", "new-running.lock"}
        assert {one.name for one in cache.iterdir()} == kept
    fetch_command(FetchOptions(files=(str(tmp_path / "p.yaml"),)))
    assert {one.name for one in cache.iterdir()} == {model.folder.name, "new-recent"}
    assert model.missing() == []


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"models": {"s3://b/m": {}}}',
        '{"models": {"s3://b/m": {"../x": {"bytes": 1, "sha256": "' + "0" * 64 + '"}}}}',
        '{"models": {"s3://b/m": {"/etc/x": {"bytes": 1, "sha256": "' + "0" * 64 + '"}}}}',
        '{"models": {"s3://b/m": {"x.json": {"bytes": -1, "sha256": "' + "0" * 64 + '"}}}}',
        '{"models": {"s3://b/m": {"x.json": {"bytes": 1, "sha256": "0"}}}}',
        '{"models": {"s3://b/m": {"x.json": {"bytes": 1}}}}',
    ],
)
def test_a_damaged_lock_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK).write_text(text)
    with pytest.raises(ConfigError, match=r"models\.lock\.json is damaged"):
        find_model("s3://b/m", tmp_path)


def test_the_digest_of_a_model_depends_on_names_sizes_and_hashes(tmp_path: Path, url: str) -> None:
    model = fetch(url, None, {}, ignore)
    first, *rest = model.files
    for other in (
        type(first)("x.json", first.size_bytes, first.sha256),
        type(first)(first.name, first.size_bytes + 1, first.sha256),
        type(first)(first.name, first.size_bytes, "0" * 64),
    ):
        assert StoredModel(url, (other, *rest)).folder != model.folder
    assert StoredModel("s3://other", tuple(reversed(model.files))).folder == model.folder


def test_the_command_pins_the_models_of_a_file(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.yaml").write_text(
        "weftline: 1\nname: p\ninputs: {words: text}\noutputs: {out: answer.text}\n"
        f"steps: {{answer: {{node: llm, model: '{url}/', inputs: {{prompt: words}}}}}}\n"
    )
    fetch_file(str(tmp_path / "p.yaml"), False, {})
    assert f"{url}: 6 files" in capsys.readouterr().out
    pinned = read_lock(tmp_path)[url]
    put(url, {"config.json": b'{"new": 1}'})
    fetch_file(str(tmp_path / "p.yaml"), False, {})
    assert read_lock(tmp_path)[url] == pinned
    fetch_file(str(tmp_path / "p.yaml"), True, {})
    assert read_lock(tmp_path)[url] != pinned


@pytest.mark.parametrize("kind", ["embed", "classify", "transformers"])
def test_nodes_open_a_fetched_model_as_they_open_a_folder(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "store" / "m"
    if kind == "transformers":
        random_models.save_vit(folder, **random_models.names("red", "blue"))
        node_class, options = Transformers, {"task": "image-classification"}
        items: dict[str, list[Any]] = {"image": [np.zeros((40, 50, 3), np.uint8)]}
    else:
        head = {"embed": "BertModel", "classify": "BertForSequenceClassification"}[kind]
        random_models.save_bert(head, folder)
        node_class, options, items = {"embed": Embed, "classify": Classify}[kind], {}, {"text": ["Anna lives in Paris"]}
    url = f"file://{folder}"
    add_pin(tmp_path, url, fetch(url, None, {}, ignore))
    answers, ports = [], []
    for model in (str(folder), url):
        config = to_config(node_class, {"model": model, **options})
        ports.append(node_class.ports(config, StepContext(tmp_path)))
        node = node_class(config)
        node.open(OpenContext(tmp_path))
        answers.append({name: np.asarray(values[0]) for name, values in node.run(Batch(items)).items()})
        rmtree(folder, ignore_errors=True)  # the second is the cache's
    assert ports[0] == ports[1] and answers[0].keys() == answers[1].keys()
    assert all(np.array_equal(answers[0][name], answers[1][name]) for name in answers[0])


@pytest.mark.slow
def test_a_pipeline_runs_a_fetched_model_and_refuses_a_changed_one(tmp_path: Path) -> None:
    tiny.save(tmp_path / "store" / "m")
    (tmp_path / "p.yaml").write_text(
        "weftline: 1\nname: p\ninputs: {words: text}\noutputs: {out: answer.usage}\n"
        "steps:\n"
        f"  answer: {{node: llm, model: 'file://{tmp_path}/store/m', kv_bytes: 1000000, inputs: {{prompt: words}}}}\n"
    )
    with pytest.raises(weftline.PipelineError, match="is not pinned"):
        weftline.load(tmp_path / "p.yaml").open()
    fetch_file(str(tmp_path / "p.yaml"), False, {})
    with weftline.load(tmp_path / "p.yaml").open() as session:
        assert session.run(words="the user asks")["out"]["prompt_tokens"] > 3
    (model,) = read_lock(tmp_path).values()
    with (model.folder / "model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"0000")
    with pytest.raises(ModelError, match=r"model\.safetensors in the cache is not the file"):
        weftline.load(tmp_path / "p.yaml").open()
