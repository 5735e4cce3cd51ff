"""Files that rows name: which may be read, and opening them. The rows of a data set are not trusted.

A row of a stranger's data set could name `../../etc/passwd` or `http://169.254.169.254/`, and its content would come
back in the results. A name must therefore lead, with all links followed, to a regular file below one of the *roots*:
the folders that the user named with --data, and those of --media-root. Of a URL the scheme, host and path must be below
a root. Other URLs need --media-urls: http and https only, to public addresses only, after redirects too. A chain of
file systems (`zip://...::s3://...`) is never read.
"""

from __future__ import annotations

import errno
import os
import posixpath
import socket
import stat
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Any
from urllib.parse import unquote, urlsplit

import fsspec

WEB = ("http", "https")
WEB_MAX_S, CONNECT_MAX_S = 60.0, 10.0
"""Longest download of one file from the web, and of its connection."""

READ_BYTES = 1 << 20


class Outside(Exception):
    """A row names a file that it may not name; the message has the option that allows it."""


def is_url(name: str) -> bool:
    """Return whether a name is a URL or a chain of them."""
    return "://" in name or "::" in name


def joined(folder: str, name: str) -> str:
    """Return the path or URL of a file named in a row."""
    if name.startswith("file:///") and "::" not in name:
        return unquote(name.removeprefix("file://"))
    if is_url(name) or name.startswith("/") or not folder:
        return name
    if name.startswith("~/"):
        return posixpath.expanduser(name)
    return posixpath.join(folder, name)


def is_below(url: str, root: str) -> bool:
    """Return whether a URL has the scheme and host of a root, and a path below its path."""
    one, other = urlsplit(url), urlsplit(root)
    path, base = (_plain_path(part.path) for part in (one, other))
    same = (one.scheme, one.netloc) == (other.scheme, other.netloc)
    return same and path is not None and base is not None and path.startswith(base.rstrip("/") + "/")


def _plain_path(path: str) -> str | None:
    """Return the path of a URL in normal form; None for one that leads upwards, encoded or not."""
    plain = unquote(unquote(path)).replace("\\", "/")
    return None if ".." in plain.split("/") else posixpath.normpath("/" + plain.lstrip("/"))


def check_url(url: str, roots: Sequence[str], web: bool) -> None:
    """Raise Outside for a URL that rows may not name. web: other URLs of the web are allowed."""
    if "::" in url:
        raise Outside("it is a chain of file systems, which rows cannot name")
    if any(is_below(url, root) for root in roots if "://" in root):
        return
    if urlsplit(url).scheme not in WEB or not web:
        fix = "--media-urls allows public http and https URLs" if not web else "rows can name http and https URLs only"
        raise Outside(f"it is a URL that is not below the data; {fix}, --media-root URL one folder of a store")


def read_local(path: str, roots: Sequence[str], bytes_max: int) -> bytes:
    """Return up to `bytes_max` bytes of a regular file below a root; Outside for another, OSError."""
    folders = [os.path.realpath(root) for root in roots if "://" not in root]
    _check_inside(os.path.realpath(path), folders)
    with os.fdopen(_open_regular(path), "rb") as stream:
        _check_inside(os.path.realpath(f"/proc/self/fd/{stream.fileno()}"), folders)  # a link may have been exchanged
        return stream.read(bytes_max)


def _check_inside(real: str, folders: Sequence[str]) -> None:
    if not any(real.startswith(folder.rstrip("/") + "/") for folder in folders):
        raise Outside("it leads outside the folder of the data; --media-root FOLDER allows another folder")


def _open_regular(path: str) -> int:
    """Open a file; OSError for a pipe or a device, which may never end."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise OSError(errno.EINVAL, "it is no regular file")


def read_url(url: str, roots: Sequence[str], storage: Mapping[str, str], bytes_max: int) -> bytes:
    """Return up to `bytes_max` bytes of a URL that `check_url` allowed.

    storage: fsspec options of the roots' file system; other URLs get none.
    """
    own = any(is_below(url, root) for root in roots if "://" in root)
    options: dict[str, Any] = dict(storage) if own else {}
    web = urlsplit(url).scheme in WEB
    if web:
        host = urlsplit(url).hostname or ""
        options |= {"get_client": _client_of(host if own else ""), "skip_instance_cache": True}
    fs, path = fsspec.core.url_to_fs(url, **options)
    with fs.open(path, "rb", **({"block_size": 0} if web else {})) as stream:
        parts, left = [], bytes_max
        while left > 0 and (part := stream.read(min(left, READ_BYTES))):
            parts.append(bytes(part))
            left -= len(part)
    return b"".join(parts)


def _client_of(trusted_host: str) -> Any:
    """Return a factory of aiohttp sessions that connect to `trusted_host` and public addresses, after redirects too."""

    async def client(**options: Any) -> Any:
        import aiohttp
        from aiohttp.abc import AbstractResolver, ResolveResult

        class Resolver(AbstractResolver):
            """Refuses names of private addresses. The address that was checked is the one that is connected to."""

            def __init__(self) -> None:
                self._inner = aiohttp.ThreadedResolver()

            async def resolve(
                self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
            ) -> list[ResolveResult]:
                found = await self._inner.resolve(host, port, family)
                if host != trusted_host:
                    for one in found:
                        check_public(one["host"])
                return found

            async def close(self) -> None:
                await self._inner.close()

        class Connector(aiohttp.TCPConnector):
            async def connect(self, req: Any, traces: Any, timeout: Any) -> Any:
                host = req.url.host or ""
                if req.url.scheme not in WEB:
                    raise OSError(errno.EACCES, f"a redirect to {req.url.scheme}")
                if host != trusted_host and _is_address(host):
                    check_public(host)
                return await super().connect(req, traces, timeout)

        options["timeout"] = aiohttp.ClientTimeout(total=WEB_MAX_S, sock_connect=CONNECT_MAX_S)
        return aiohttp.ClientSession(connector=Connector(resolver=Resolver()), **options)

    return client


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def check_public(address: str) -> None:
    """Raise OSError for an address that is not one of the public internet."""
    found = ip_address(address.partition("%")[0])
    mapped = getattr(found, "ipv4_mapped", None) or getattr(found, "sixtofour", None)
    if not (mapped or found).is_global or (mapped or found).is_multicast:
        raise OSError(errno.EACCES, f"{address} is no public address")
