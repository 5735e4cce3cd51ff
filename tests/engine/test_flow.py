"""Admission is bounded in requests and bytes, and a refusal names the limit."""

import pytest

from weftline.engine.flow import Admission
from weftline.errors import LimitReached
from weftline.pipelines.policy import Limits


def test_the_limit_on_open_requests_holds_and_is_given_back() -> None:
    gate = Admission(Limits(requests_max=2))
    gate.admit(10)
    gate.admit(10)
    with pytest.raises(LimitReached, match="requests_max is 2") as refused:
        gate.admit(10)
    assert refused.value.retry_after_s > 0
    gate.leave()
    gate.admit(10)
    assert gate.requests == 2


def test_one_request_too_large_is_refused() -> None:
    gate = Admission(Limits(request_bytes_max=100))
    with pytest.raises(LimitReached, match="request_bytes_max is 100"):
        gate.admit(101)
    assert gate.requests == 0
