"""Calls of an external engine against a server that keeps no rule: what arrives, what is sent, and when it ends."""

from __future__ import annotations

import logging
import select
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine.llm.external.scripted import STREAM, Reply, Script, read_request, says, scripted
from tests.engine.serving.auth.certificates import Authority
from weftline.engine.llm.external import calls as calls_module
from weftline.engine.llm.external import client as client_module
from weftline.engine.llm.external.node import ExternalLlm
from weftline.engine.llm.external.options import ExternalLlmConfig
from weftline.errors import (
    DeadlineExceeded,
    InputError,
    ModelError,
    StepError,
    Unavailable,
    WeftlineError,
)
from weftline.node import OpenContext, Piece, Urgency

HI = {"prompt": "hi"}
LONG = {"prompt": "hi", "sampling": {"tokens_max": 1 << 20}}
SECRET = "internal-host-42"
"""A text of the server that no client may read."""


@contextmanager
def opened(url: str, folder: Path = Path(), **options: Any) -> Iterator[ExternalLlm]:
    node = ExternalLlm(ExternalLlmConfig("m", url, **options))
    node.open(OpenContext(folder))
    try:
        yield node
    finally:
        node.close()


def pieces_of(node: ExternalLlm, count: int = 1, timeout_s: float = 10.0) -> dict[int, list[Piece]]:
    """Run rounds, as the worker does, until so many items have ended."""
    found: dict[int, list[Piece]] = {}
    ended, until = 0, time.monotonic() + timeout_s
    while ended < count:
        left_s = until - time.monotonic()
        assert left_s > 0, f"{ended} of {count} items ended"
        if not node.busy:
            select.select([node.wake_descriptor], [], [], left_s)
        for piece in node.round():
            found.setdefault(piece.item, []).append(piece)
            ended += piece.last
    return found


def answer(node: ExternalLlm, urgency: Urgency | None = None, **inputs: Any) -> Any:
    """Return the outputs of one item, or its error."""
    node.submit(1, {**HI, **inputs}, urgency or Urgency())
    last = pieces_of(node)[1][-1]
    return last.error or last.outputs


def wait_until(holds: Any) -> None:
    until = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.005)


def status(code: int, **headers: str) -> Script:
    return lambda reply: reply.status(code, f'{{"error": {{"message": "{SECRET}"}}}}', **headers)


def test_an_answer_is_streamed_and_its_tokens_are_counted() -> None:
    with scripted(says("a", " b")) as server, opened(server.url) as node:
        node.submit(7, HI)
        *pieces, last = pieces_of(node)[7]
        assert [piece.outputs for piece in pieces] == [{"text": "a"}, {"text": " b"}]
        assert last.outputs["text"] == "a b"
        assert last.outputs["usage"] == {
            "prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1, "finish_reason": "stop"
        }  # fmt: skip
        wait_until(lambda: node.figures()["running"] == 0)
        figures = node.figures()
        assert (figures["prompt_tokens_total"], figures["completion_tokens_total"]) == (3, 2)
        assert (figures["calls_total"], figures["finished_stop_total"]) == (1, 1)
    [asked] = server.asked
    assert (asked.method, asked.path, asked.headers["accept-encoding"]) == ("POST", "/v1/chat/completions", "identity")
    assert "authorization" not in asked.headers


def test_pieces_arrive_while_the_answer_goes_on() -> None:
    seen = threading.Event()

    def script(reply: Reply) -> None:
        reply.send(STREAM)
        reply.text("first")
        assert seen.wait(10)
        reply.text(" second", "stop")
        reply.end()

    with scripted(script) as server, opened(server.url) as node:
        node.submit(1, HI)
        select.select([node.wake_descriptor], [], [], 10)
        assert [piece.outputs for piece in node.round()] == [{"text": "first"}]
        seen.set()
        assert pieces_of(node)[1][-1].outputs["text"] == "first second"


def test_the_key_is_sent_and_never_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("A_KEY", "sk-secret")
    with scripted(lambda reply: reply.status(401, "wrong key sk-secret")) as server:
        with opened(server.url, key="A_KEY") as node:
            assert isinstance(answer(node), StepError)
        assert server.asked[0].headers["authorization"] == "Bearer sk-secret"
    assert "wrong key (key)" in caplog.text and "sk-secret" not in caplog.text


def test_many_requests_run_at_once_and_no_more_than_allowed() -> None:
    begin = threading.Event()

    def script(reply: Reply) -> None:
        assert begin.wait(10)
        says(reply.asked.json["messages"][0]["content"])(reply)

    with scripted(script) as server, opened(server.url, sequences_max=6) as node:
        for item in range(12):
            node.submit(item, {"prompt": f"number {item}"})
        wait_until(lambda: len(server.asked) == 6)
        time.sleep(0.05)
        assert (node.figures()["running"], node.figures()["waiting"], len(server.asked)) == (6, 6, 6)
        begin.set()
        answered = pieces_of(node, 12)
    assert {item: pieces[-1].outputs["text"] for item, pieces in answered.items()} == {
        item: f"number {item}" for item in range(12)
    }


def test_the_most_urgent_request_gets_the_next_slot() -> None:
    begin = threading.Event()

    def script(reply: Reply) -> None:
        assert begin.wait(10)
        says("x")(reply)

    with scripted(script) as server, opened(server.url, sequences_max=1) as node:
        node.submit(0, {"prompt": "first"})
        wait_until(lambda: len(server.asked) == 1)
        node.submit(1, {"prompt": "usual"})
        node.submit(2, {"prompt": "urgent"}, Urgency(priority=50))
        wait_until(lambda: node.figures()["waiting"] == 2)
        begin.set()
        pieces_of(node, 3)
    assert [one.json["messages"][0]["content"] for one in server.asked] == ["first", "urgent", "usual"]


def test_a_cancelled_request_closes_its_connection_and_returns_nothing() -> None:
    closed = threading.Event()

    def script(reply: Reply) -> None:
        reply.send(STREAM)
        reply.text("a")
        if reply.wait_closed():
            closed.set()

    with scripted(script) as server, opened(server.url) as node:
        node.submit(1, HI)
        select.select([node.wake_descriptor], [], [], 10)
        assert len(node.round()) == 1
        node.cancel(1)
        assert closed.wait(5)
        wait_until(lambda: node.figures()["running"] == 0)
        assert list(node.round()) == [] and not node.busy
        assert node.figures()["finished_abort_total"] == 1


def test_a_waiting_request_that_is_cancelled_is_never_sent() -> None:
    release = threading.Event()

    def script(reply: Reply) -> None:
        assert release.wait(10)
        says("x")(reply)

    with scripted(script) as server, opened(server.url, sequences_max=1) as node:
        for item in (1, 2, 3):
            node.submit(item, {"prompt": f"{item}"})
        wait_until(lambda: node.figures()["waiting"] == 2)
        node.cancel(2)
        wait_until(lambda: node.figures()["waiting"] == 1)
        release.set()
        assert set(pieces_of(node, 2)) == {1, 3}
    assert [one.json["messages"][0]["content"] for one in server.asked] == ["1", "3"]


def test_a_deadline_ends_a_request_and_closes_its_connection() -> None:
    closed = threading.Event()

    def script(reply: Reply) -> None:
        reply.send(STREAM)
        if reply.wait_closed():
            closed.set()

    with scripted(script) as server, opened(server.url) as node:
        began = time.monotonic()
        assert isinstance(answer(node, Urgency(left_ms=200)), DeadlineExceeded)
        assert 0.15 < time.monotonic() - began < 5
        assert closed.wait(5)


def test_an_expired_request_is_never_sent() -> None:
    with scripted(says("x")) as server, opened(server.url) as node:
        assert isinstance(answer(node, Urgency(left_ms=0)), DeadlineExceeded)
        assert isinstance(answer(node, Urgency(left_ms=-5)), DeadlineExceeded)
    assert server.asked == []


def test_a_paused_request_is_read_no_further_and_others_are() -> None:
    sent, total = 0, 100

    def script(reply: Reply) -> None:
        nonlocal sent
        if reply.asked.json["max_completion_tokens"] == 128:
            says("other")(reply)
            return
        reply.send(STREAM)
        for _ in range(total):
            reply.text("x" * (1 << 18))
            sent += 1
        reply.text("", "stop")
        reply.end()

    with scripted(script) as server, opened(server.url) as node:
        node.submit(1, LONG)
        node.pause(1)
        wait_until(lambda: sent > 0)
        node.submit(2, HI)
        assert pieces_of(node).keys() == {2}
        time.sleep(0.3)
        before = sent
        time.sleep(0.2)
        assert list(node.round()) == [] and sent == before < total, "the server waits for the reader"
        node.resume(1)
        assert len(pieces_of(node)[1][-1].outputs["text"]) == total << 18


def test_a_slow_worker_limits_what_is_kept() -> None:
    sent, total = 0, 100

    def script(reply: Reply) -> None:
        nonlocal sent
        reply.send(STREAM)
        for _ in range(total):
            reply.text("x" * (1 << 18))
            sent += 1
        reply.text("", "stop")
        reply.end()

    with scripted(script) as server, opened(server.url) as node:
        node.submit(1, LONG)
        wait_until(lambda: server.asked and sent > 0)
        time.sleep(0.4)
        before = sent
        time.sleep(0.2)
        assert sent == before < total, "no round takes the pieces"
        assert len(pieces_of(node)[1][-1].outputs["text"]) == total << 18


@pytest.mark.parametrize("code", client_module.RETRIED)
def test_a_busy_server_is_asked_again(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "BACKOFF_S", 0.01)
    with scripted(status(code), status(code), says("x")) as server, opened(server.url) as node:
        assert answer(node)["text"] == "x"
        assert node.figures()["retries_total"] == 2
    assert len({asked.body for asked in server.asked}) == 1 and len(server.asked) == 3


def test_a_server_says_when_to_ask_again() -> None:
    with scripted(status(429, retry_after="1"), says("x")) as server, opened(server.url) as node:
        began = time.monotonic()
        assert answer(node)["text"] == "x"
        assert 1.0 <= time.monotonic() - began < 5
    assert len(server.asked) == 2


def test_a_wait_beyond_the_deadline_fails_at_once() -> None:
    with scripted(status(429, retry_after="30")) as server, opened(server.url) as node:
        began = time.monotonic()
        failed = answer(node, Urgency(left_ms=10_000))
        assert time.monotonic() - began < 5
    assert isinstance(failed, Unavailable) and "HTTP status 429" in str(failed)
    assert len(server.asked) == 1


def test_retries_are_limited_for_a_request_and_in_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "BACKOFF_S", 0.001)
    with scripted(status(503)) as server, opened(server.url) as node:
        assert isinstance(answer(node), Unavailable)
        assert len(server.asked) == calls_module.ATTEMPTS_MAX
        for item in range(100):
            node.submit(item, HI)
        assert all(isinstance(found[-1].error, Unavailable) for found in pieces_of(node, 100).values())
    assert len(server.asked) <= 101 + 11, "10 % of the requests, and the tokens of the start"


def test_nothing_is_repeated_after_the_answer_began() -> None:
    def script(reply: Reply) -> None:
        reply.send(STREAM)
        reply.text("a")

    with scripted(script) as server, opened(server.url) as node:
        failed = answer(node)
    assert isinstance(failed, Unavailable) and "within the answer" in str(failed)
    assert len(server.asked) == 1


def test_a_server_that_is_not_there_is_asked_again_and_then_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "BACKOFF_S", 0.01)
    with scripted(says("x")) as server:
        url = server.url
    with opened(url) as node:
        assert isinstance(answer(node), Unavailable)
        assert node.figures()["calls_total"] == calls_module.ATTEMPTS_MAX


def _silent(reply: Reply) -> None:
    reply.wait_closed()


def test_a_silent_server_fails_the_request_after_a_while() -> None:
    with scripted(_silent) as server, opened(server.url, stall_max_s=0.2) as node:
        failed = answer(node)
    assert isinstance(failed, Unavailable) and "sent nothing for 0.2 s" in str(failed)
    assert len(server.asked) == 1


def _stall_within(reply: Reply) -> None:
    reply.send(STREAM)
    reply.text("a")
    reply.wait_closed()


def _lines(data: bytes) -> Script:
    def script(reply: Reply) -> None:
        reply.send(STREAM + data)

    return script


def _endless_line(reply: Reply) -> None:
    reply.send(STREAM)
    while True:
        reply.send(b"x" * (1 << 16))


def _endless_answer(reply: Reply) -> None:
    reply.send(STREAM)
    while True:
        reply.text("x" * (1 << 14))


def _compressed(reply: Reply) -> None:
    reply.send(STREAM.replace(b"connection", b"content-encoding: gzip\r\nconnection") + b"\x1f\x8b")


@pytest.mark.parametrize(
    ("script", "kind", "logged"),
    [
        (_stall_within, Unavailable, "ReadTimeout"),
        (_lines(b"data: {bad\n\n"), StepError, "no chunk of a chat completion"),
        (_lines(b'data: {"error": {"message": "%s"}}\n\n' % SECRET.encode()), StepError, SECRET),
        (_lines(b"data: [DONE]\n\n"), Unavailable, "ended within the answer"),
        (_endless_line, StepError, "the response is too long"),
        (_endless_answer, StepError, "the response is too long"),
        (_compressed, StepError, "compressed"),
        (lambda reply: reply.status(200, "{}", content_type="application/json"), StepError, "content type"),
        (lambda reply: reply.send(b"SSH-2.0-x\r\n"), Unavailable, "RemoteProtocolError"),
        (lambda reply: reply.send(b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * (1 << 20)), Unavailable, "ProtocolError"),
        (status(400), InputError, SECRET),
        (status(401), StepError, SECRET),
        (status(404), StepError, SECRET),
        (status(500), StepError, SECRET),
        (status(302, location="http://127.0.0.1:1/"), StepError, "302"),
        (status(307, location="http://127.0.0.1:1/"), StepError, "307"),
    ],
)
def test_a_broken_answer_fails_its_request_alone(
    script: Script, kind: type[WeftlineError], logged: str, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(calls_module, "BACKOFF_S", 0.001)
    caplog.set_level(logging.WARNING)
    with scripted(script) as server, opened(server.url, stall_max_s=0.3) as node:
        failed = answer(node)
        assert type(failed) is kind, failed
        assert SECRET not in str(failed) and str(server.port) not in str(failed), "the client reads this"
        assert logged in caplog.text, "the operator reads this"
        server.scripts[:] = [says("x")]
        assert answer(node)["text"] == "x"


def test_text_of_a_server_cannot_forge_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    forged = "a\n2026 error forged\x1b[31m" + "x" * 9999
    with scripted(lambda reply: reply.status(500, forged)) as server, opened(server.url) as node:
        answer(node)
    [record] = [one for one in caplog.records if "HTTP status 500" in one.message]
    assert "\n" not in record.message and "\x1b" not in record.message and len(record.message) < 700


def test_a_server_that_fails_every_request_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with scripted(status(500)) as server, opened(server.url) as node:
        for item in range(40):
            node.submit(item, HI)
        pieces_of(node, 40)
    assert 10 <= len([one for one in caplog.records if "HTTP status 500" in one.message]) < 20


def test_a_connection_is_used_again_for_the_next_request() -> None:
    ends = []

    def script(reply: Reply) -> None:
        ends.append(reply.sock.getpeername())
        head = STREAM.replace(b"connection: close", b"transfer-encoding: chunked")
        data = b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
        reply.send(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))
        if reply.asked.json["messages"][0]["content"] == "one":
            assert read_request(reply.sock).json["messages"][0]["content"] == "two"
            ends.append(reply.sock.getpeername())
            reply.send(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))

    with scripted(script) as server, opened(server.url) as node:
        assert answer(node, prompt="one")["text"] == "x"
        wait_until(lambda: node.figures()["running"] == 0)
        assert answer(node, prompt="two")["text"] == "x"
    assert len(ends) == 2 and len(set(ends)) == 1


def test_a_response_without_its_end_holds_no_slot() -> None:
    released = threading.Event()

    def script(reply: Reply) -> None:
        says("a")(reply)
        released.wait(10)  # the connection stays open after the last event

    with scripted(script) as server, opened(server.url, sequences_max=1) as node:
        began = time.monotonic()
        for item in range(2):
            node.submit(item, HI)
        answered = pieces_of(node, 2)
        took_s = time.monotonic() - began
        released.set()
        assert [answered[item][-1].outputs["text"] for item in range(2)] == ["a", "a"]
        wait_until(lambda: node.figures()["running"] == 0)
    assert took_s < calls_module.TAIL_S / 2


def test_no_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    with scripted(says("x")) as server, opened(server.url) as node:
        assert answer(node)["text"] == "x"


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    folder = tmp_path_factory.mktemp("authorities")
    return Authority(folder, "ours"), Authority(folder, "theirs")


def _tls(authority: Authority) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.sign("server"))
    return context


def test_tls_is_verified_by_the_private_authority(
    authorities: tuple[Authority, Authority], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = authorities
    with scripted(says("x"), tls=_tls(ours)) as server:
        with opened(server.url, ca=str(ours.file)) as node:
            assert answer(node)["text"] == "x"
        for options in ({"ca": str(theirs.file)}, {}):
            with opened(server.url, **options) as node:
                failed = answer(node)
                assert isinstance(failed, StepError) and "is not trusted" in str(failed)
                assert node.figures()["calls_total"] == 1
        assert "CERTIFICATE_VERIFY_FAILED" in caplog.text
        with opened(server.url.replace("127.0.0.1", "127.0.0.2"), ca=str(ours.file)) as node:
            assert isinstance(answer(node), Unavailable | StepError), "the certificate has another name"
    assert len(server.asked) == 1


def _models(*names: str) -> Script:
    listed = ", ".join(f'{{"id": "{name}", "object": "model"}}' for name in names)
    return lambda reply: reply.status(200, f'{{"object": "list", "data": [{listed}]}}')


def test_a_step_opens_without_its_server_unless_it_probes() -> None:
    with scripted(_models("m", "n")) as server:
        url = server.url
        with opened(url, probe=True):
            assert [one.path for one in server.asked] == ["/v1/models"]
    with opened(url):
        pass
    with pytest.raises(ModelError, match="probe: the external engine cannot be reached"):
        opened(url, probe=True).__enter__()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (_models("n", "o"), "does not have it; its models: 'n', 'o'"),
        (status(401), "probe: .* refused the step's key"),
        (lambda reply: reply.status(200, "[]"), "probe: .* invalid answer"),
        (_silent, "probe: .* sent nothing for 0.2 s"),
    ],
)
def test_a_probe_names_what_is_wrong(script: Script, reason: str) -> None:
    before = threading.active_count()
    with scripted(script) as server, pytest.raises(ModelError, match=reason):
        opened(server.url, probe=True, stall_max_s=0.2).__enter__()
    wait_until(lambda: threading.active_count() <= before)


def test_closing_ends_running_requests_and_leaves_no_descriptor() -> None:
    closed = threading.Event()

    def script(reply: Reply) -> None:
        reply.send(STREAM)
        if reply.wait_closed():
            closed.set()

    before = len(list(Path("/proc/self/fd").iterdir()))
    with scripted(script) as server, opened(server.url) as node:
        node.submit(1, HI)
        wait_until(lambda: len(server.asked) == 1)
        node.close()
        assert closed.wait(5)
        assert node.wake_descriptor == -1 and not node.busy
    wait_until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "-7"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "Wed, 25 Nov 2026 10:00:30 GMT"}, None),
        ({"retry-after": "Wed, 25 Nov 2026 10:00:30 GMT", "date": "Wed, 25 Nov 2026 10:00:00 GMT"}, 30.0),
        ({"retry-after": "Wed, 25 Nov 2026 09:00:30 GMT", "date": "Wed, 25 Nov 2026 10:00:00 GMT"}, 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date_by_the_servers_clock(headers: dict[str, str], seconds: float | None) -> None:
    assert client_module.retry_after_s(headers) == seconds
