import io
import json
import logging
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftline.engine.runtime.output import show
from weftline.engine.serving.auth.tokens import new_token
from weftline.engine.serving.backend import Ask, Record
from weftline.engine.serving.config import Logs
from weftline.engine.serving.logs import (
    FAILURES_BURST,
    TRACEBACKS_BURST,
    TRACEBACKS_PER_S,
    JsonLines,
    RequestLog,
    TextLines,
    start_logs,
)

HOSTILE = "id\r\nERROR fake: all is lost\x1b[2J\x1b]0;pwn\x07\u2028\u202e\x9b31m\0"


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    logger = logging.getLogger("weftline")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before


def started(logs: Logs) -> io.StringIO:
    stream = io.StringIO()
    start_logs(logs, stream)
    return stream


def record(status: str = "OK", **more: object) -> Record:
    known = {"id": "42", "caller": "web", "protocol": "grpc"} | {
        k: v for k, v in more.items() if k in ("id", "caller", "protocol")
    }
    ask = Ask("ocr", {"photo": b"the value"}, **known)  # type: ignore[arg-type]
    model, error = str(more.get("model", "ocr")), str(more.get("error", ""))
    return Record(model, 3, status, 0, 12.34567, ask, error=error)


def test_a_line_of_json_has_the_fields_of_its_request() -> None:
    stream = started(Logs("json", requests=True))
    RequestLog(Logs(requests=True))(record())
    line = json.loads(stream.getvalue())
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info", "logger": "weftline.requests", "message": "request", "request": "42", "model": "ocr",
        "version": 3, "caller": "web", "protocol": "grpc", "status": "OK", "ms": 12.346,
    }  # fmt: skip


def test_a_line_of_text_has_them_too() -> None:
    stream = started(Logs("text"))
    RequestLog(Logs())(record("INTERNAL", error="step see: no"))
    line = stream.getvalue()
    fields = "request=42 model=ocr version=3 caller=web protocol=grpc status=INTERNAL ms=12.346"
    assert line.endswith(f"Z error   weftline.requests: step see: no {fields}\n")


def test_requests_that_fail_are_always_logged_and_others_only_on_demand() -> None:
    stream = started(Logs("json"))
    log = RequestLog(Logs())
    for status in ("OK", "INVALID_ARGUMENT", "UNAVAILABLE", "INTERNAL", "OK"):
        log(record(status))
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(one["status"], one["level"]) for one in lines] == [
        ("INVALID_ARGUMENT", "info"),
        ("UNAVAILABLE", "warning"),
        ("INTERNAL", "error"),
    ]


def test_lines_below_the_level_are_dropped() -> None:
    stream = started(Logs("json", "error", True))
    log = RequestLog(Logs(requests=True))
    log(record())
    log(record("INTERNAL"))
    assert [json.loads(line)["status"] for line in stream.getvalue().splitlines()] == ["INTERNAL"]


@pytest.mark.parametrize("form", ["json", "text"])
def test_no_field_can_begin_a_line_or_reach_a_terminal(form: str) -> None:
    stream = started(Logs(form))  # type: ignore[arg-type]
    RequestLog(Logs())(record("INTERNAL", id=HOSTILE, model=HOSTILE, caller=HOSTILE, protocol=HOSTILE, error=HOSTILE))
    logging.getLogger("weftline." + HOSTILE if form == "json" else "weftline.x").error("said %s", HOSTILE)
    written = stream.getvalue()
    assert written.count("\n") == 2 == len(written.splitlines())
    assert not any(ord(char) < 32 or 0x7F <= ord(char) < 0xA0 for char in written.replace("\n", ""))
    assert "\u202e" not in written and "\u2028" not in written


def test_a_value_with_spaces_cannot_pass_for_another_field() -> None:
    stream = started(Logs("text"))
    RequestLog(Logs())(record("INTERNAL", id="7 status=OK caller=root"))
    assert ' request="7 status=OK caller=root" ' in stream.getvalue()


@given(st.text(max_size=200), st.sampled_from([JsonLines(), TextLines()]))
def test_any_message_and_any_exception_stay_in_their_lines(text: str, form: logging.Formatter) -> None:
    try:
        raise ValueError(text)
    except ValueError as error:
        made = logging.LogRecord("weftline.x", 40, __file__, 1, "%s", (text,), (ValueError, error, error.__traceback__))
    made.fields = (text, text)
    first, *rest = form.format(made).split("\n")
    assert not any(ord(char) < 32 or 0x7F <= ord(char) < 0xA0 for char in "".join([first, *rest]))
    assert all(line.startswith("  | ") for line in rest)
    if isinstance(form, JsonLines):
        assert "ValueError" in json.loads(first)["traceback"] and rest == []


def test_tokens_are_kept_out_wherever_they_stand() -> None:
    token = new_token()
    for form in ("json", "text"):
        stream = started(Logs(form))
        RequestLog(Logs())(record("INTERNAL", id=token, error=f"bad header Bearer {token}"))
        try:
            raise KeyError(token)
        except KeyError:
            logging.getLogger("weftline.ingress").exception("failed with %s", token)
        assert "KeyError" in stream.getvalue()
        assert token not in stream.getvalue()


def test_values_of_requests_are_never_logged() -> None:
    stream = started(Logs("json", "debug", True))
    RequestLog(Logs(requests=True))(record())
    assert "the value" not in stream.getvalue()


def test_starting_again_replaces_where_lines_go() -> None:
    first, second = started(Logs()), started(Logs())
    logging.getLogger("weftline.x").warning("once")
    assert (first.getvalue(), second.getvalue().count("once")) == ("", 1)


def test_what_a_step_prints_is_logged_and_hidden_by_level(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("weftline"), "propagate", True)
    caplog.set_level(logging.INFO, "weftline.worker")
    show("see", "a line")
    assert [one.getMessage() for one in caplog.records] == ["see: a line"]
    caplog.set_level(logging.WARNING, "weftline.worker")
    show("see", "hidden")
    assert len(caplog.records) == 1 and capsys.readouterr().err == ""


def test_tracebacks_of_failed_requests_are_logged_at_a_limited_rate() -> None:
    for form in ("json", "text"):
        stream = started(Logs(form))
        times_s = iter([*[0.0] * 100, 2 / TRACEBACKS_PER_S])
        log = RequestLog(Logs(), times_s.__next__)
        failing = msgspec.structs.replace(
            record("INTERNAL", error="step a: KeyError: 'x'"), traceback="Traceback\n  in user_code\x1b[2J\nKeyError"
        )
        for _ in range(100):
            log(failing)
        text = stream.getvalue()
        assert text.count("in user_code") == TRACEBACKS_BURST and "\x1b" not in text
        assert text.count("step a: KeyError") == 100, "the line itself is always there"
        log(failing)
        assert "(90 tracebacks of other failures" in stream.getvalue()


def test_failures_of_one_caller_do_not_fill_the_log() -> None:
    stream, now = started(Logs("json")), [0.0]
    log = RequestLog(Logs(), lambda: now[0])
    for _ in range(10_000):
        log(record("DEADLINE_EXCEEDED"))
    log(record("DEADLINE_EXCEEDED", caller="other"))
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(lines) == FAILURES_BURST + 1 and lines[-1]["caller"] == "other"
    now[0] = 1.0
    log(record("DEADLINE_EXCEEDED"))
    reported = [json.loads(line)["message"] for line in stream.getvalue().splitlines()][len(lines) :]
    assert reported == [f"{10_000 - int(FAILURES_BURST)} failed requests of web are left out here", "request"]
