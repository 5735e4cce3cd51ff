"""Large messages of concurrent calls share one budget; small ones are not affected."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from tests.engine.serving.grpc.requests import tensor
from tests.engine.serving.grpc.served import served_in_thread
from tests.engine.serving.grpc.test_infer import SLOW
from weftline.engine.serving.config import ServeLimits


@pytest.mark.slow
def test_messages_beyond_the_budget_are_refused_and_small_ones_pass() -> None:
    limits = ServeLimits(message_bytes_max=1 << 20, inflight_bytes_max=2 << 20)
    with served_in_thread({"slow": SLOW}, limits=limits) as server:

        def ask(size: int) -> Any:
            with triton.InferenceServerClient(server.address) as client:
                try:
                    return client.infer("slow", [tensor("x", np.zeros(size, np.uint8), "UINT8")]) is not None
                except InferenceServerException as error:
                    return str(error.message())

        with ThreadPoolExecutor(6) as callers:
            large = [callers.submit(ask, 900_000) for _ in range(5)]
            small = callers.submit(ask, 10)
            results = [one.result(60) for one in large]
        assert small.result() is True
        refused = [one for one in results if one is not True]
        assert results.count(True) >= 2 and refused
        assert all("limits.inflight_bytes_max is 2097152" in one for one in refused)
        assert ask(900_000) is True
