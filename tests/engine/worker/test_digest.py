"""What an item is made of: the same inputs are known again wherever they lie, and nothing else is taken for them."""

from __future__ import annotations

import numpy as np

from tests.engine.hosted import Bench
from weftline.engine.messages import ABSENT
from weftline.engine.worker.digest import digest


def test_equal_inputs_have_one_digest_wherever_they_lie_and_others_another() -> None:
    bench = Bench()
    a, b = np.arange(6, dtype=np.float32), np.arange(6, dtype=np.int32)
    told = {
        digest([bench.value(value, type, placed)], bench.arenas): (type, str(value))
        for value, type in [
            (a, "tensor"), (b, "tensor"), (a.reshape(2, 3), "tensor"), (a.reshape(3, 2), "tensor"), (a[:5], "tensor"),
            ("ab", "text"), ("ac", "text"), (b"ab", "bytes"), ("ab", "json"),
            (["a", "b"], "list[text]"), (["ab"], "list[text]"), ([["a"], "b"], "list[json]"),
        ]
        for placed in (False, True)
    }  # fmt: skip
    assert len(told) == 12 and all(len(one) == 32 for one in told)
    one, two = bench.value("a", "text"), bench.value("b", "text")
    assert len({digest(row, bench.arenas) for row in ([one, two], [two, one], [one], [one, ABSENT], [])}) == 5
    for header in (
        "text  () ",
        "text  () ;",
        "text  ()  1;",
    ):  # bytes that look like the beginning of a further input are not one
        forged = bench.value(f"a{header}b", "text")
        assert digest([forged], bench.arenas) != digest([one, two], bench.arenas)
    bench.close()
