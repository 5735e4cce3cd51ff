"""What a request gives back: its own copies, and errors that know how far it came."""

import numpy as np
import pytest

from weftline.engine.protocol.messages import ABSENT, Value
from weftline.engine.result import OutputStream, error_of, owned, placed_bytes
from weftline.engine.scheduler import events as ev
from weftline.engine.scheduler.request import StepTiming
from weftline.errors import DeadlineExceeded, InputError, LimitReached, RequestCancelled, SessionClosed, StepError
from weftline.shm.block import Place

TIMINGS = (StepTiming("a", 0.1, 2.0, 1),)


def test_an_error_has_the_timings_of_the_steps_that_ran() -> None:
    assert error_of(ev.Fail(1, "StepError", "bad", "b", TIMINGS)).timings == TIMINGS
    assert error_of(ev.Fail(1, "DeadlineExceeded", "late", "", TIMINGS)).timings == TIMINGS
    assert InputError("x").timings == ()


def test_each_end_has_its_class_and_its_words() -> None:
    failed = error_of(ev.Fail(1, "StepError", "bad", "b"))
    assert isinstance(failed, StepError) and failed.step == "b" and str(failed) == "step b: bad"
    assert str(error_of(ev.Fail(1, "LimitReached", "full", "b"))) == "step b: full"
    assert isinstance(error_of(ev.Fail(-1, "SessionClosed", "closed")), SessionClosed)
    assert isinstance(error_of(ev.Fail(-1, "RequestCancelled", "replaced")), RequestCancelled)


def test_an_invalid_input_names_its_option() -> None:
    failed = error_of(ev.Fail(1, "InputError", "temperature: found -1", "b", param="temperature"))
    assert isinstance(failed, InputError)
    assert (str(failed), failed.param) == ("step b: temperature: found -1", "temperature")


def test_a_refusal_is_of_the_class_it_names() -> None:
    full = error_of(ev.Refuse(1, "full", 0.25))
    assert isinstance(full, LimitReached) and full.retry_after_s == 0.25
    late = error_of(ev.Refuse(1, "cannot make it", 0.0, "DeadlineExceeded"))
    assert isinstance(late, DeadlineExceeded) and str(late) == "cannot make it"


def test_an_unknown_error_name_becomes_a_step_error_that_names_it() -> None:
    failed = error_of(ev.Fail(1, "KeyError", "bad", "b"))
    assert isinstance(failed, StepError) and failed.step == "b" and str(failed) == "step b: KeyError: bad"
    refused = error_of(ev.Refuse(1, "why", 0.5, "KeyError"))
    assert isinstance(refused, LimitReached) and str(refused) == "KeyError: why" and refused.retry_after_s == 0.5


def test_views_are_copied_in_lists_too() -> None:
    view = np.arange(4)
    view.flags.writeable = False
    one, many, text = owned(view), owned([view, [view], "x"]), owned("x")
    one[0] = many[0][0] = many[1][0][0] = 9
    assert view[0] == 0 and text == "x" and many[2] == "x" and owned(None) is None


def test_bytes_in_shared_memory_are_counted_through_lists() -> None:
    placed = Value("tensor", "uint8", (8,), None, Place(1, 0, 8, 1, 0))
    inline = Value("text", data=b"abc")
    assert placed_bytes(Value("list", items=(placed, inline, placed))) == 16
    assert placed_bytes(inline) == placed_bytes(ABSENT) == 0


def test_a_dropped_stream_says_that_no_lock_may_be_waited_for() -> None:
    left: list[bool] = []
    stream = OutputStream(lambda: ev.Finish(1, {}, ()), left.append)
    del stream
    stream = OutputStream(lambda: ev.Finish(1, {}, ()), left.append)
    with pytest.raises(StopIteration):
        next(stream)
    del stream
    assert left == [True, False]
