"""An HTTP server of tests: each request is answered by a script, which may break every rule."""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Script = Callable[["Reply"], None]
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nconnection: close\r\n\r\n"


@dataclass
class Asked:
    """One request that came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found


@dataclass
class Reply:
    """The connection of one request."""

    asked: Asked
    sock: socket.socket

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def status(self, status: int, body: str = "{}", **headers: str) -> None:
        lines = [f"HTTP/1.1 {status} X", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
        data = body.encode()
        head = "\r\n".join([*lines, f"content-length: {len(data)}", "connection: close", "", ""])
        self.send(head.encode() + data)

    def event(self, value: Any) -> None:
        self.send(b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n")

    def text(self, text: str, finish: str | None = None, index: int = 0) -> None:
        self.event({"choices": [{"index": index, "delta": {"content": text}, "finish_reason": finish}]})

    def end(self, prompt: int = 3, completion: int = 2, cached: int = 1) -> None:
        usage = {"prompt_tokens": prompt, "completion_tokens": completion}
        self.event({"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": cached}}})
        self.event(b"[DONE]")

    def wait_closed(self, timeout_s: float = 10.0) -> bool:
        """Return True once the client has closed the connection."""
        self.sock.settimeout(timeout_s)
        with contextlib.suppress(OSError):
            return self.sock.recv(1) == b""
        return False


def says(*texts: str) -> Script:
    """Answer with these texts, one chunk each."""

    def script(reply: Reply) -> None:
        reply.send(STREAM)
        for text in texts:
            reply.text(text)
        reply.text("", "stop")
        reply.end()

    return script


@dataclass
class Scripted:
    """A running server. asked: every request so far; scripts: for the next ones, the last one for all that follow."""

    port: int
    scripts: list[Script]
    asked: list[Asked] = field(default_factory=list)
    tls: bool = False

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}/v1"


@contextlib.contextmanager
def scripted(*scripts: Script, tls: ssl.SSLContext | None = None) -> Iterator[Scripted]:
    """Serve with scripts, in threads of this process."""
    lock = threading.Lock()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                sock = self.request if tls is None else tls.wrap_socket(self.request, server_side=True)
                asked = read_request(sock)
                with lock:
                    made.asked.append(asked)
                    script = made.scripts.pop(0) if len(made.scripts) > 1 else made.scripts[0]
                script(Reply(asked, sock))
                sock.close()

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = True
        daemon_threads = True
        request_queue_size = 64

        def handle_error(self, request: Any, address: Any) -> None:
            pass

    with Server(("127.0.0.1", 0), Handler) as server:
        made = Scripted(server.server_address[1], list(scripts), tls=tls is not None)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield made
        finally:
            server.shutdown()
            thread.join()


def read_request(sock: socket.socket) -> Asked:
    data = b""
    while b"\r\n\r\n" not in data:
        data += _more(sock)
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    while len(body) < int(headers.get("content-length", 0)):
        body += _more(sock)
    method, path, _ = first.split(" ")
    return Asked(method, path, headers, body)


def _more(sock: socket.socket) -> bytes:
    data = sock.recv(1 << 16)
    if not data:
        raise OSError("closed")
    return data
