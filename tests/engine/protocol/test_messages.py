"""Messages between the runtime and its workers: what a decoder accepts."""

from __future__ import annotations

import msgspec
import pytest

from weftline.engine.protocol import messages as msg
from weftline.errors import BY_NAME


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_a_failure_of_each_error_that_may_cross_is_decoded(name: str) -> None:
    done = msg.BatchDone(1, (msg.Failure(name, "why"),), ())
    assert msg.decode_from_worker(msg.encode(done)) == done


@pytest.mark.parametrize("name", ["KeyError", "SessionClosed", "", "StepError\n", "xStepError"])
def test_a_failure_with_an_unknown_error_name_is_an_invalid_message(name: str) -> None:
    failure = msg.Failure(name, "why")
    for message in (
        msg.BatchDone(1, (failure,), ()),
        msg.OpenFailed("s", failure),
        msg.Awake(0, 1.0, failure),
        msg.OutputChunks(0, (msg.OutputChunk(1, {}, True, failure),), 1.0),
    ):
        with pytest.raises(msgspec.ValidationError):
            msg.decode_from_worker(msg.encode(message))
