"""Download of models from object stores through fsspec, into the cache of `model_store`.

    pinned = fetch("s3://bucket/models/chat", None, {}, print)     # lists the folder, and pins what it holds
    fetch("s3://bucket/models/chat", pinned, {}, print)            # fetches what is missing or was changed

A file is downloaded as NAME.part, which a later call goes on with, and gets its name once its size and its SHA-256 are
right. A file lock on the folder makes calls that run at the same time wait for each other, in other processes too. The
first download of a model is in a folder new-DIGEST, which `remove_abandoned` removes when nothing goes on with it.

What a first pin trusts is the connection: http and ftp without encryption are refused beyond loopback, after redirects
too.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import posixpath
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from weftline.errors import MissingPackage, ModelError, first_line
from weftline.nodes.loopback import is_loopback
from weftline.nodes.model_store import (
    FILES_MAX,
    MODEL_BYTES_MAX,
    SINGLE,
    StoredFile,
    StoredModel,
    cache_dir,
    changed_files,
    is_name,
    needed_files,
    sha256_of,
)
from weftline.nodes.strict_json import FILES, parse

CHUNK_BYTES = 8 << 20
DOWNLOADS_MAX = 4
"""Most files that are downloaded at a time."""
INDEX_BYTES_MAX = 64 << 20
LISTED_MAX = 16 * FILES_MAX
DEPTH_MAX = 3
LISTING_BYTES_MAX, LISTING_MAX_S = 64 << 20, 300.0
"""Most bytes of the pages of a folder of the web, and the longest time to list it."""
CONNECT_MAX_S, SILENCE_MAX_S = 30.0, 60.0
HEADERS_MAX_S = 60.0
"""Longest time until the headers of a response are complete."""
RATE_MIN_BYTES_S, RATE_AFTER_S = 16 << 10, 60.0
"""Slowest download in bytes a second on average, from RATE_AFTER_S on."""
ABANDONED_S = 24 * 3600.0
"""Time without a written byte after which a first download that was interrupted is removed."""
NEW, LOCK_SUFFIX = "new-", ".lock"
UNENCRYPTED = ("http", "ftp")
_VERSION_KEYS = ("ETag", "etag", "md5Hash", "LastModified", "mtime", "created", "blob_id")
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Listed:
    """A file of a store. version: changes with its content; '' where the store has none."""

    path: str
    size_bytes: int
    version: str


def fetch(url: str, pinned: StoredModel | None, storage: Mapping[str, Any], report: Report) -> StoredModel:
    """Download a model into the cache and return its pin; ModelError where it cannot be fetched.

    pinned:  what its files must be; None: what the store has now.
    storage: options of the store for fsspec.
    report:  receives a line about each download.
    """
    cache_dir().mkdir(parents=True, exist_ok=True)
    if pinned is not None:
        with _locked(pinned.folder):
            for one in changed_files(pinned):
                (pinned.folder / one.name).unlink(missing_ok=True)
            if missing := pinned.missing():
                system, root = _connect(url, storage)
                paths = {one.name: _Listed(_below(root, one.name, url), one.size_bytes, "") for one in missing}
                _reserve(paths, pinned.folder, url)
                hashes = {one.name: one.sha256 for one in missing}
                _download(system, paths, hashes, pinned.folder, url, report)
        return pinned
    system, root = _connect(url, storage)
    listed = _list(system, root, url)
    what = json.dumps([url, *((name, one.size_bytes, one.version) for name, one in listed.items())])
    folder = cache_dir() / f"{NEW}{hashlib.sha256(what.encode()).hexdigest()}"
    with _locked(folder):
        _reserve(listed, folder, url)
        hashes = _download(system, listed, {}, folder, url, report)
        if _list(system, root, url) != listed:
            raise ModelError(f"model {url}: it changed in the store while it was downloaded\n    fix: fetch it again")
        files = tuple(StoredFile(name, one.size_bytes, hashes[name]) for name, one in listed.items())
        found = StoredModel(url, files)
        with _locked(found.folder):
            _publish(folder, found)
    return found


def _publish(folder: Path, model: StoredModel) -> None:
    """Move a downloaded folder to its place; one that is there already keeps what is right of it."""
    if not model.folder.exists():
        folder.rename(model.folder)
        return
    for one in changed_files(model):
        target = model.folder / one.name
        target.parent.mkdir(parents=True, exist_ok=True)
        (folder / one.name).replace(target)
    shutil.rmtree(folder)


def remove_abandoned() -> None:
    """Remove first downloads that no process goes on with, and lock files that no process holds."""
    for path in cache_dir().glob("*"):
        folder = path.with_name(path.name.removesuffix(LOCK_SUFFIX))
        if folder == path and not path.name.startswith(NEW):
            continue  # a model
        try:
            with _locked(folder, wait=False) as lock:
                if folder.name.startswith(NEW) and folder.is_dir() and _idle_s(folder, lock) > ABANDONED_S:
                    shutil.rmtree(folder)
        except OSError:
            pass  # another process has it, or another user


def _idle_s(folder: Path, lock: Path) -> float:
    """Return the time from the last write in a folder to the opening of its lock, by the file system's clock."""
    return lock.stat().st_mtime - max(one.stat().st_mtime for one in (folder, *folder.rglob("*")))


@contextmanager
def _locked(folder: Path, wait: bool = True) -> Iterator[Path]:
    """Hold the lock of a folder of the cache, and yield the lock file.

    The file is removed before the lock is released: a process that waited for it opens another one.
    wait: wait for another process that has the lock; False: BlockingIOError.
    """
    path = folder.with_name(f"{folder.name}{LOCK_SUFFIX}")
    while True:
        with path.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_file_at(file.fileno(), path):
                continue
            try:
                yield path
            finally:
                path.unlink(missing_ok=True)
            return


def _is_file_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _connect(url: str, storage: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the file system of a URL, and the path there."""
    protocol, _, rest = url.partition("://")
    user = rest.partition("/")[0].rpartition("@")[0]  # of abfs:// it is the container
    if "::" in url or "?" in url or "#" in url or ":" in user or (user and protocol.startswith("http")):
        shown = url.replace(f"{user}@", "...@") if user else url.partition("?")[0]
        raise ModelError(f"model {shown}: expected a plain URL, without a password, a query or a chain of file systems")
    _check_encrypted(url)
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise MissingPackage("fsspec", "batch") from None
    try:
        client = {"get_client": _http_client} if protocol in ("http", "https") else {}
        system, root = url_to_fs(url, **storage, **client)
    except ImportError as error:  # it names the package of the protocol
        package = {
            "s3": "s3fs",
            "s3a": "s3fs",
            "gs": "gcsfs",
            "gcs": "gcsfs",
            "az": "adlfs",
            "abfs": "adlfs",
            "hf": "huggingface_hub",
            "http": "aiohttp",
            "https": "aiohttp",
        }
        name = package.get(url.partition("://")[0], "the package of its protocol")
        raise ModelError(f"model {url}: {first_line(error):.200}\n    fix: pip install {name}") from None
    except Exception as error:
        raise ModelError(f"model {url}: {first_line(error):.200}") from None
    return system, root.rstrip("/")


def _check_encrypted(url: str) -> None:
    """Raise ModelError for a URL whose content could be changed on its way to this machine."""
    parts = urlsplit(url)
    if parts.scheme in UNENCRYPTED and not is_loopback(parts.hostname or ""):
        shown = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
        raise ModelError(
            f"model {shown:.200}: {parts.scheme} is not encrypted, and a first pin would trust what arrives\n"
            "    fix: use https, or copy the model to a folder of this machine and name the folder"
        )


@dataclass(slots=True)
class _Listing:
    """Limits of listing one folder of the web: bytes of its pages and the time.monotonic() of its end; None: idle."""

    bytes_left: int = LISTING_BYTES_MAX
    ends_at: float | None = None

    def begin(self) -> None:
        self.bytes_left, self.ends_at = LISTING_BYTES_MAX, time.monotonic() + LISTING_MAX_S

    def end(self) -> None:
        self.ends_at = None

    def check(self) -> None:
        if self.ends_at is not None and time.monotonic() > self.ends_at:
            raise ModelError(f"its folder takes more than {LISTING_MAX_S:g} s to list; expected a folder of one model")

    def count(self, size_bytes: int) -> None:
        """Count bytes of a page while a folder is listed."""
        if self.ends_at is None:
            return
        self.check()
        self.bytes_left -= size_bytes
        if self.bytes_left < 0:
            raise ModelError(f"its folder's pages have more than {LISTING_BYTES_MAX} bytes")


_LISTING = _Listing()


async def _http_client(**options: Any) -> Any:
    """Return an aiohttp session that checks each URL before it connects, those of redirects too, and bounds bodies."""
    import aiohttp

    class Connector(aiohttp.TCPConnector):
        async def connect(self, req: Any, traces: Any, timeout: Any) -> Any:
            _check_encrypted(str(req.url))
            _LISTING.check()
            return await super().connect(req, traces, timeout)

    class Response(aiohttp.ClientResponse):
        async def start(self, connection: Any) -> Any:
            try:
                async with asyncio.timeout(HEADERS_MAX_S):
                    return await super().start(connection)
            except TimeoutError:
                raise ModelError(f"the headers of a response take more than {HEADERS_MAX_S:g} s") from None

        async def read(self) -> bytes:
            if self._body is None:
                parts, size_bytes = [], 0
                async for part in self.content.iter_chunked(1 << 16):
                    size_bytes += len(part)
                    _LISTING.count(len(part))
                    if size_bytes > INDEX_BYTES_MAX:
                        self.close()
                        raise ModelError(f"a response of more than {INDEX_BYTES_MAX} bytes")
                    parts.append(part)
                self._body = b"".join(parts)
            return self._body

    options["timeout"] = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_MAX_S, sock_read=SILENCE_MAX_S)
    options["headers"] = {**options.get("headers", {}), "Accept-Encoding": "identity"}
    return aiohttp.ClientSession(
        connector=Connector(), response_class=Response, auto_decompress=False, **options
    )  # a compressed response would become any size


def _below(root: str, name: str, url: str) -> str:
    return root if url.endswith(SINGLE) else f"{root}/{name}"


def _list(system: Any, root: str, url: str) -> dict[str, _Listed]:
    """Return the files of a model in a store, by name; ModelError where it is none, or too large."""
    _LISTING.begin()
    try:
        system.invalidate_cache()
        if url.endswith(SINGLE):
            found = {posixpath.basename(root): system.info(root)}
        else:
            every = system.find(root, maxdepth=DEPTH_MAX, detail=True)
            found = {posixpath.relpath(path, root): info for path, info in every.items()}
    except Exception as error:  # stores raise exceptions of their own
        raise ModelError(f"model {url}: it cannot be listed: {_reason(error)}") from None
    finally:
        _LISTING.end()
    if not found or len(found) > LISTED_MAX:
        raise ModelError(f"model {url}: {len(found)} files there, expected 1 to {LISTED_MAX}")
    names = list(found) if url.endswith(SINGLE) else needed_files(list(found), url)
    if not all(map(is_name, names)):
        raise ModelError(f"model {url}: its name has characters that are not accepted")
    listed = {name: _listed(system, _below(root, name, url), found[name], url) for name in names}
    if (size := sum(one.size_bytes for one in listed.values())) > MODEL_BYTES_MAX:
        raise ModelError(f"model {url}: {size} bytes, expected at most {MODEL_BYTES_MAX}")
    _check_shards(system, listed, url)
    return listed


def _listed(system: Any, path: str, info: Mapping[str, Any], url: str) -> _Listed:
    """Return a file of a store; ModelError where its size is not known. The links of a web page have no size."""
    try:
        known = info if info.get("size") is not None else system.info(path)
        size = known.get("size")
    except Exception as error:
        raise ModelError(f"model {url}: {path} cannot be read: {_reason(error)}") from None
    if type(size) is not int or not 0 <= size <= MODEL_BYTES_MAX:
        raise ModelError(
            f"model {url}: the store states the size {size!r:.40} for {path}, expected 0 to {MODEL_BYTES_MAX} bytes\n"
            "    fix: use a store that states sizes (Content-Length over http), or copy the model to this machine"
        )
    version = next((str(known[key]) for key in _VERSION_KEYS if known.get(key) is not None), "")
    return _Listed(path, size, version)


def _check_shards(system: Any, listed: Mapping[str, _Listed], url: str) -> None:
    """Raise ModelError when an index names a file that is not there."""
    for name, one in listed.items():
        if not name.endswith(".safetensors.index.json"):
            continue
        if one.size_bytes > INDEX_BYTES_MAX:
            raise ModelError(f"model {url}: {name} has more than {INDEX_BYTES_MAX} bytes")
        try:
            shards = set(parse(_content(system, one), FILES)["weight_map"].values())
        except Exception as error:
            raise ModelError(f"model {url}: {name} cannot be read: {_reason(error)}") from None
        folder = posixpath.dirname(name)
        missing = sorted(shard for shard in shards if posixpath.join(folder, str(shard)) not in listed)
        if missing:
            raise ModelError(f"model {url}: {missing[0]} is missing, which {name} names ({len(missing)} in all)")


def _content(system: Any, file: _Listed) -> bytes:
    """Return the content of a small file; ValueError when it has more or fewer bytes than the store states."""
    parts, left = [], file.size_bytes + 1
    with system.open(file.path, "rb", block_size=CHUNK_BYTES) as remote:
        while left > 0 and (part := remote.read(min(CHUNK_BYTES, left))):
            parts.append(bytes(part))
            left -= len(part)
    if left != 1:
        raise ValueError(f"it has {'more' if left < 1 else 'fewer'} than the {file.size_bytes} bytes that are stated")
    return b"".join(parts)


def _reserve(listed: Mapping[str, _Listed], folder: Path, url: str) -> None:
    """Raise ModelError when the disk has too little room for what is not in `folder` yet."""
    size_bytes = sum(max(0, one.size_bytes - _present_bytes(folder / name)) for name, one in listed.items())
    free = shutil.disk_usage(cache_dir()).free
    if size_bytes > free:
        raise ModelError(
            f"model {url}: {size_bytes} bytes to download, {free} are free in {cache_dir()}\n"
            f"    fix: free some (interrupted downloads: folders {NEW}* there), or set XDG_CACHE_HOME to another disk"
        )


def _present_bytes(target: Path) -> int:
    """Return the bytes of a file, or of its part that was downloaded."""
    found = (one for one in (target, _part(target)) if one.is_file())
    return max((one.stat().st_size for one in found), default=0)


def _part(target: Path) -> Path:
    return target.with_name(f"{target.name}.part")


def _download(
    system: Any, listed: Mapping[str, _Listed], hashes: Mapping[str, str], folder: Path, url: str, report: Report
) -> dict[str, str]:
    """Download files into `folder` and return their SHA-256 by name; those in `hashes` must have that one."""

    def one(name: str) -> str:
        file, target = listed[name], folder / name
        part = _part(target)
        if name not in hashes and not file.version:  # what is there may be of another version
            target.unlink(missing_ok=True)
            part.unlink(missing_ok=True)
        if target.is_file() and target.stat().st_size == file.size_bytes:
            return sha256_of(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        report(f"{name}: {file.size_bytes} bytes")
        resumed = part.exists()
        found = _fill(system, file, part, url)
        if resumed and found != hashes.get(name, found):  # what was there may have been of another file
            part.unlink()
            found = _fill(system, file, part, url)
        if found != hashes.get(name, found):
            part.unlink()
            raise ModelError(
                f"model {url}: {name} has the SHA-256 {found}, but {hashes[name]} is pinned\n"
                "    fix: restore the file in the store, or pin what is there now: `weftline fetch --update`"
            )
        part.replace(target)
        return found

    with ThreadPoolExecutor(max_workers=DOWNLOADS_MAX) as threads:
        return dict(zip(listed, threads.map(one, listed), strict=True))


def _fill(system: Any, file: _Listed, part: Path, url: str) -> str:
    """Download what is missing at the end of `part`, and return the SHA-256 of the whole."""
    have = part.stat().st_size if part.exists() else 0
    if have > file.size_bytes:
        part.unlink()
        have = 0
    whole = hashlib.sha256()
    with part.open("a+b") as local:
        local.seek(0)
        while chunk := local.read(CHUNK_BYTES):
            whole.update(chunk)
        try:
            if have < file.size_bytes:
                with system.open(file.path, "rb", block_size=CHUNK_BYTES) as remote:
                    remote.seek(have)
                    started, from_bytes = time.monotonic(), have
                    while have < file.size_bytes and (chunk := remote.read(min(CHUNK_BYTES, file.size_bytes - have))):
                        whole.update(chunk)
                        local.write(chunk)
                        have += len(chunk)
                        _check_rate(have - from_bytes, time.monotonic() - started)
        except Exception as error:  # what has arrived stays for the next time
            raise ModelError(f"model {url}: {file.path} cannot be read: {_reason(error)}") from None
        local.flush()
        os.fsync(local.fileno())
    if have != file.size_bytes:
        raise ModelError(
            f"model {url}: {file.path} ends after {have} of {file.size_bytes} bytes: it changed in the store while it "
            "was downloaded, or its end did not arrive\n    fix: fetch it again"
        )
    return whole.hexdigest()


def _check_rate(size_bytes: int, taken_s: float) -> None:
    """Raise TimeoutError when a download is too slow to end."""
    if taken_s > RATE_AFTER_S and size_bytes < RATE_MIN_BYTES_S * taken_s:
        raise TimeoutError(f"{size_bytes} bytes in {taken_s:.0f} s, expected at least {RATE_MIN_BYTES_S} a second")


def _reason(error: BaseException) -> str:
    if isinstance(found := error.__cause__ or error, ModelError):  # of a redirect
        return str(found)
    return f"{type(error).__name__}: {first_line(error):.200}"
