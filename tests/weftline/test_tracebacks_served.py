"""S16 over the wire: a server's log has the traceback of a step's exception, and no client sees any of it."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tritonclient.utils import InferenceServerException

from tests.weftline.served import Served, ask, serving, wait_until

STEPS = """
def look_up(words):
    raise LookupError("no entry for it")

def fails(words: str) -> str:
    return look_up(words) if words != "fine" else words
"""
PIPELINE = """weftline: 1
name: shout
inputs: {words: text}
steps:
  a: {node: function, function: "private_steps.py:fails", inputs: {words: words}}
outputs: {said: a.output}
"""
INSIDE = ("private_steps", "look_up", "fails", "Traceback", "File", ", line ", "raise ", "RemoteTraceback")


def raw_http(served: Served, words: str) -> bytes:
    """Return every byte that the HTTP server answers one v2 inference request with."""
    at = urlsplit(served.http)
    body = json.dumps({"inputs": [{"name": "words", "datatype": "BYTES", "shape": [1], "data": [words]}]}).encode()
    head = "POST /v2/models/shout/infer HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Length: {len(body)}\r\n"
    with socket.create_connection((at.hostname, at.port), timeout=60) as one:
        one.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        return b"".join(iter(lambda: one.recv(65536), b""))


def test_the_log_has_the_traceback_and_the_wire_has_none_of_it(tmp_path: Path) -> None:
    (tmp_path / "private_steps.py").write_text(STEPS)
    (tmp_path / "shout.yaml").write_text(PIPELINE)
    forbidden = [*INSIDE, tmp_path.name]
    with serving(tmp_path, "shout.yaml", "--port", "0", "--http-port", "0") as served:
        served.wait_up()
        answer = raw_http(served, "bad").decode()
        assert "no entry for it" in answer and "500" in answer.splitlines()[0]
        assert not [one for one in forbidden if one in answer]
        with served.client() as client, pytest.raises(InferenceServerException) as caught:
            ask(client, "bad")
        error = caught.value
        seen = repr((error.status(), error.message(), error.debug_details(), error.__cause__, error.__context__))
        assert "no entry for it" in seen
        assert not [one for one in forbidden if one in seen]
        wait_until(lambda: served.err.count("in look_up") == 2, "two tracebacks in the log")
        assert served.err.count('private_steps.py", line 3, in look_up') == 2, "one for each request, not more"
        for _ in range(40):
            raw_http(served, "bad")
        assert served.err.count("in look_up") <= 30, "a request that always fails does not flood the log"


@pytest.mark.slow
def test_a_server_that_cannot_open_prints_the_traceback(tmp_path: Path) -> None:
    (tmp_path / "private_steps.py").write_text(STEPS + "\nlook_up('at import')\n")
    (tmp_path / "shout.yaml").write_text(PIPELINE)
    with serving(tmp_path, "shout.yaml", "--port", "0") as served:
        assert served.wait_end() == 4
        assert 'private_steps.py", line 3, in look_up' in served.err
        assert "error: step a: " in served.err
