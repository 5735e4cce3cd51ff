import ast
import asyncio
import gc
import io
import logging
import re
import traceback
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftline import errors
from weftline.engine.serving.auth.plain import scrubbed
from weftline.engine.serving.auth.tokens import new_token
from weftline.engine.serving.replies import HTTP_STATUS, MESSAGE_CHARS_MAX, clear_frames, to_status
from weftline.errors import (
    AccessDenied,
    InputError,
    LimitReached,
    ModelError,
    PipelineError,
    Problem,
    StepError,
    StepUnavailable,
    UnknownModel,
    WeftlineError,
    WorkerDied,
)

ENGINE = Path(errors.__file__).resolve().parent.parent / "engine"
TOKEN = new_token()
FORBIDDEN = re.compile(
    r"0x[0-9a-f]{6,}|traceback|\bFile \"|(?:^|[\s'\"=(:,])(?:~|\.{1,2})?/+\w|\w/\w+\.py\b|psm_\w|[\x00-\x1f\x7f-\x9f]|"
    + re.escape(TOKEN),
    re.IGNORECASE,
)
ALL = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, WeftlineError)]


def made(cls: type[WeftlineError], text: str) -> WeftlineError:
    if cls is PipelineError:
        return PipelineError([Problem("steps.see", text, file="/srv/pipelines/ocr.yaml", line=3)])
    return errors.MissingPackage(text, "onnx") if cls is errors.MissingPackage else cls(text)


@pytest.mark.parametrize("cls", ALL)
def test_every_error_of_the_tree_has_a_status_that_both_protocols_know(cls: type[WeftlineError]) -> None:
    reply = to_status(made(cls, "step see: found 3 items, expected 4"))
    assert reply.status == cls.status
    assert 400 <= reply.http_status < 600
    assert "found 3 items, expected 4" in reply.message


def test_the_statuses_are_grpcs() -> None:
    import grpc

    assert set(HTTP_STATUS) == {code.name for code in grpc.StatusCode}


def test_unknown_callers_and_forbidden_calls_have_their_own_status() -> None:
    assert to_status(AccessDenied("no", known=False)).http_status == 401
    assert to_status(AccessDenied("no")).http_status == 403
    assert to_status(UnknownModel("there is no model x")).http_status == 404


def test_a_limit_says_when_to_come_back() -> None:
    reply = to_status(LimitReached("40 requests wait; limits.queue_max is 40", 0.25))
    assert (reply.status, reply.http_status, reply.retry_after_s) == ("RESOURCE_EXHAUSTED", 429, 0.25)
    assert to_status(LimitReached("x", 1e9)).retry_after_s <= 60
    assert to_status(LimitReached("x", float("nan"))).retry_after_s == 0.0
    assert to_status(LimitReached("x", -1)).retry_after_s == 0.0


def test_a_step_that_was_given_up_is_unavailable_rather_than_busy() -> None:
    reply = to_status(StepUnavailable("step see is unavailable: its worker keeps failing to start"))
    assert (reply.status, reply.http_status, reply.retry_after_s) == ("UNAVAILABLE", 503, 0.0)
    assert to_status(LimitReached("step see: its worker keeps failing to start")).status == "RESOURCE_EXHAUSTED"


def test_a_status_that_no_protocol_knows_becomes_internal() -> None:
    class Odd(WeftlineError):
        status = "TEAPOT"

    assert to_status(Odd("x")).status == "INTERNAL"


def test_an_unexpected_error_is_one_fixed_sentence_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise KeyError(f"/srv/keys/{TOKEN}")
    except KeyError as error:
        reply = to_status(error)
    assert (reply.status, reply.message) == ("INTERNAL", "internal error; the server's log has it")
    assert caplog.records[0].name == "weftline.ingress"
    assert caplog.records[0].exc_info is not None
    assert "KeyError" in caplog.text


def test_no_memory_and_a_cancelled_task_have_their_own_status() -> None:
    assert to_status(MemoryError()).status == "RESOURCE_EXHAUSTED"
    assert to_status(asyncio.CancelledError()).status == "CANCELLED"


def real_exceptions() -> list[BaseException]:
    """Return exceptions as Python and frameworks word them, with paths and addresses of this process."""
    found: list[BaseException] = []
    for attempt in (
        lambda: open("/etc/weftline/secret.pem"),  # noqa: SIM115, PTH123
        lambda: open("/dev/shm/psm_0a1b/x"),  # noqa: SIM115, PTH123
        lambda: __import__("PIL.Image").Image.open(io.BytesIO(b"no picture")),
        lambda: io.BytesIO().missing,  # type: ignore[attr-defined]
        lambda: __import__("onnxruntime").InferenceSession("/srv/models/none.onnx"),
        lambda: __import__("ctypes").CDLL("/opt/lib/libnone.so"),
        lambda: compile("1 +", "/srv/pipelines/steps.py", "exec"),
        lambda: (_ for _ in ()).throw(RuntimeError(f"node {object()} failed, see {__file__}")),
    ):
        try:
            attempt()
        except Exception as error:
            found += [error, RuntimeError("".join(traceback.format_exception(error)))]
    assert len(found) >= 14
    return found


def test_nothing_of_real_exceptions_that_a_step_quotes_leaves() -> None:
    for error in real_exceptions():
        for cls in (StepError, ModelError, WorkerDied, InputError):
            message = to_status(cls(f"step see: {type(error).__name__}: {error}")).message
            assert not FORBIDDEN.search(message), message
            assert message.startswith("step see: ")


PIECES = st.sampled_from(
    [
        "/srv/models/best.pt", "/etc/passwd", "~/x/y", "../../up", "pipelines/steps.py", "/dev/shm/psm_12ab",
        "'/home/my user/x y.txt'", "0x7f3a5c1d2e80", "0xDEADBEEF00", "0X7f3a5c1d2e80",
        "Traceback (most recent call last):",
        'File "/a/b.py", line 3, in f', f"Bearer {TOKEN}", TOKEN, f"token={TOKEN}", "\x1b[31m", "\r\n", "\x00", "\n",
        "/", "'", '"', "0x", "~", "..", " ", ":", "(", ")", ",", "=", "File", "trace", "back", "\u202e", "\ud800",
        "step see",
    ]
)  # fmt: skip


@given(st.lists(PIECES | st.text(max_size=6), max_size=14).map("".join), st.sampled_from(ALL))
def test_whatever_an_error_says_nothing_forbidden_leaves(text: str, cls: type[WeftlineError]) -> None:
    reply = to_status(made(cls, text))
    assert not FORBIDDEN.search(reply.message), reply.message
    assert len(reply.message) <= MESSAGE_CHARS_MAX
    reply.message.encode()


def test_a_long_message_is_cut() -> None:
    assert len(to_status(StepError("x " * 10_000)).message) == MESSAGE_CHARS_MAX


def test_the_log_of_a_known_error_stays_empty(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    to_status(InputError("no"))
    assert caplog.records == []


def test_scrubbing_leaves_messages_of_the_engine_unchanged() -> None:
    files = [*ENGINE.glob("*.py"), *ENGINE.glob("serving/**/*.py")]
    said = [text for file in files for text in raised_in(ast.parse(file.read_text()))]
    assert len(said) > 100
    changed = [text for text in said if scrubbed(text, 1000) != re.sub(r"\s*\n\s*", "; ", text.strip())]
    assert changed == []


def raised_in(tree: ast.AST) -> Iterator[str]:
    """Yield the texts of all `raise` statements, with an X for each value that is filled in."""
    for node in ast.walk(tree):
        for one in ast.walk(node.exc) if isinstance(node, ast.Raise) and node.exc is not None else ():
            if isinstance(one, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in one.values)


def test_an_answered_error_keeps_no_inputs_alive() -> None:
    class Inputs:
        pass

    async def ask(inputs: Inputs) -> None:
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        answered.set_exception(InputError("no picture"))
        await answered  # the error refers to this frame, which refers to the future, which refers to the error

    async def failing(kept: list[weakref.ref[Inputs]]) -> None:
        inputs = Inputs()
        kept.append(weakref.ref(inputs))
        await ask(inputs)

    async def answer(kept: list[weakref.ref[Inputs]]) -> None:
        try:
            await failing(kept)
        except InputError as error:
            clear_frames(error)

    kept: list[weakref.ref[Inputs]] = []
    gc.disable()
    try:
        asyncio.run(answer(kept))
        assert kept[0]() is None
    finally:
        gc.enable()
