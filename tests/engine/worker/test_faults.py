"""Exceptions as failures: frames start with the user's code, and tracebacks are bounded."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weftline.engine.protocol.messages import Failure
from weftline.engine.worker.faults import FRAMES_MAX, TRACEBACK_CHARS_MAX, check_device, failure, out_of_memory
from weftline.errors import InputError, ModelError, StepError
from weftline.nodes.contract import ConfigError
from weftline.nodes.user_code import load
from weftline.nodes.values import fits
from weftline.shm.device.driver import LOST, NUMBERS, DeviceLost, DriverError

STEPS = """
def innermost():
    raise ValueError("this one is bad")

def fails(text):
    innermost()

def chained(text):
    try:
        innermost()
    except ValueError as error:
        raise RuntimeError("outer") from error

def recurses(depth):
    return recurses(depth - 1) if depth else innermost()

def long(text):
    raise ValueError("x" * 100_000)

class Unprintable(Exception):
    def __str__(self):
        raise KeyError("no words")

def broken(text):
    raise ValueError("no words") from Unprintable()

def surrogate(text):
    raise ValueError("bad \\udcff name")

def group(text):
    raise ExceptionGroup("both", [ValueError("one"), KeyError("two")])
"""


def failed(tmp_path: Path, name: str, argument: Any = "") -> Failure:
    """Return the failure of one call, made as a worker makes it: through frames of this package."""
    (tmp_path / "steps.py").write_text(STEPS)
    call = load(f"steps.py:{name}", tmp_path, "function")
    try:
        call(argument)
    except Exception as error:
        return failure(error)
    pytest.fail("the function did not raise")


def frames(found: Failure) -> list[str]:
    return [line.strip() for line in found.traceback.splitlines() if line.startswith("  File ")]


def test_a_traceback_names_file_line_type_and_message(tmp_path: Path) -> None:
    found = failed(tmp_path, "fails")
    assert (found.error, found.message) == ("StepError", "ValueError: this one is bad")
    assert [one.partition(tmp_path.name)[2] for one in frames(found)[-2:]] == [
        '/steps.py", line 6, in fails', '/steps.py", line 3, in innermost',
    ]  # fmt: skip
    assert found.traceback.endswith("\nValueError: this one is bad")


def test_an_error_of_this_package_alone_has_no_traceback() -> None:
    with pytest.raises(ConfigError) as caught:
        load("no.such:thing", Path(), "function")
    error = caught.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next  # without the frame of this test
    assert failure(error).traceback == ""


def test_an_invalid_option_is_named_within_a_limit() -> None:
    assert failure(InputError("found -1", param="temperature")).param == "temperature"
    assert len(failure(InputError("no", param="x" * 1000)).param) == 80
    assert failure(ValueError("no")).param == ""


def test_leading_frames_of_this_package_are_left_out() -> None:
    class Unreadable:
        def __len__(self) -> int:
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        fits((), Unreadable())  # type: ignore[arg-type]
    error = caught.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next
    assert [one.rpartition(" ")[2] for one in frames(failure(error))] == ["__len__"]


def test_causes_and_groups_are_reported(tmp_path: Path) -> None:
    text = failed(tmp_path, "chained").traceback
    assert text.index("ValueError: this one is bad") < text.index("direct cause") < text.index("RuntimeError: outer")
    text = failed(tmp_path, "group").traceback
    assert "ValueError: one" in text and "KeyError: 'two'" in text


def test_a_model_error_reports_its_cause(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("def f(x):\n    return x\n\nraise OSError('no such model')\n")
    with pytest.raises(ModelError) as caught:
        load("wrong.py:f", tmp_path, "function")
    found = failure(caught.value)
    assert found.error == "ModelError"
    assert frames(found)[0].endswith('wrong.py", line 4, in <module>')


def test_depth_and_size_are_limited(tmp_path: Path) -> None:
    depth = min(500, sys.getrecursionlimit() - 300)
    found = failed(tmp_path, "recurses", depth)
    assert len(frames(found)) <= FRAMES_MAX and frames(found)[-1].endswith("in innermost")
    found = failed(tmp_path, "long")
    assert len(found.traceback) <= TRACEBACK_CHARS_MAX and "(left out)" in found.traceback
    assert len(found.message) <= 600


def test_exceptions_that_cannot_be_printed_are_failures_all_the_same(tmp_path: Path) -> None:
    assert "broken" in failed(tmp_path, "broken").traceback
    assert "bad \\udcff name" in failed(tmp_path, "surrogate").traceback


def test_out_of_memory_keeps_its_traceback() -> None:
    try:
        raise MemoryError("no room")
    except MemoryError as error:
        assert "in test_out_of_memory" in out_of_memory(error).traceback
    assert failure(StepError("made here")).traceback == ""


class AcceleratorError(RuntimeError):
    """As torch's: the number of CUDA's error beside the words."""

    def __init__(self, words: str, number: int | None = None) -> None:
        super().__init__(words)
        if number is not None:
            self.error_code = number


class OutOfMemoryError(RuntimeError):
    """As torch's."""


def torch_that(monkeypatch: pytest.MonkeyPatch, raises: Exception | None) -> list[int]:
    """Put in torch's place one whose streams, when they are waited for, raise that; return the devices waited for."""
    waited: list[int] = []

    def synchronize() -> None:
        if raises is not None:
            raise raises

    def current_stream(index: int) -> Any:
        waited.append(index)
        return SimpleNamespace(synchronize=synchronize)

    cuda = SimpleNamespace(is_initialized=lambda: True, current_stream=current_stream)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    return waited


@pytest.mark.parametrize("number", sorted(number for number, code in NUMBERS.items() if code in LOST))
def test_every_error_after_which_a_context_is_gone_loses_the_device(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_that(monkeypatch, AcceleratorError("CUDA error: some words", number))
    with pytest.raises(DeviceLost) as lost:
        check_device(None, "cuda:0")
    assert lost.value.code == NUMBERS[number] and LOST[NUMBERS[number]] in str(lost.value)


def test_an_older_torch_returns_no_numbers_and_a_failed_wait_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_that(monkeypatch, AcceleratorError("CUDA error: device-side assert triggered\nCompile with ..."))
    with pytest.raises(DeviceLost, match=r"AcceleratorError \(CUDA error: device-side assert triggered\)"):
        check_device(None, "cuda:0")


@pytest.mark.parametrize(
    "raises",
    [
        None,
        AcceleratorError("CUDA error: out of memory", 2),
        OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        AcceleratorError("CUDA error: operation not permitted when stream is capturing", 900),
        AcceleratorError("CUDA error: invalid argument", 1),
    ],
)
def test_a_want_of_memory_and_a_wrong_call_lose_no_device(
    raises: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = torch_that(monkeypatch, raises)
    check_device(None, "cuda:1")
    assert waited == [1]


def test_without_a_gpu_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = torch_that(monkeypatch, AcceleratorError("CUDA error: unknown error", 999))
    for device in ("", "cpu", "fake:0"):
        check_device(None, device)
    assert waited == []


@pytest.mark.parametrize("error", [DeviceLost("synchronize", "UNKNOWN"), DriverError("synchronize", "OUT_OF_MEMORY")])
def test_the_driver_is_asked_first(error: DriverError) -> None:
    def check() -> None:
        raise error

    device: Any = SimpleNamespace(check=check)
    if not isinstance(error, DeviceLost):
        check_device(device, "fake:0")
        return
    with pytest.raises(DeviceLost):
        check_device(device, "fake:0")
