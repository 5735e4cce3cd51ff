"""Quarantine check: inputs that killed a worker are refused; digests do not depend on the memory of a value."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.engine.device_hosted import OTHER_DEVICE, DeviceBench
from tests.engine.hosted import Bench, run_of
from weftline.engine.protocol import messages as msg
from weftline.engine.protocol.messages import ABSENT
from weftline.engine.worker.quarantine_check import QUARANTINED, QuarantineCheck, digest


@pytest.fixture
def bench() -> Iterator[DeviceBench]:
    one = DeviceBench()
    yield one
    one.close()


def test_a_quarantined_value_is_refused_in_every_memory(bench: DeviceBench) -> None:
    said: list[msg.FromWorker] = []
    check = QuarantineCheck(bench.memory, said.append)
    first, second = bench.device_values([np.full(9_000, at, np.float32) for at in (1, 2)])
    assert check.refused(run_of([[first], [second]], suspect=True)) == {}
    (reported,) = said
    assert isinstance(reported, msg.Suspected) and len(set(reported.digests)) == 2
    check.set_digests(msg.QuarantineItems(0, (reported.digests[1],)))
    on_host = bench.value(np.full(9_000, 2, np.float32), "float32[?]")
    assert check.refused(run_of([[first], [second], [on_host]])) == {1: QUARANTINED, 2: QUARANTINED}
    assert len(said) == 1


def test_an_unreadable_item_fails_its_call_and_ends_no_worker(bench: DeviceBench) -> None:
    said: list[msg.FromWorker] = []
    (value,) = bench.device_values([np.zeros(9_000, np.float32)])
    bench.memory.retire(OTHER_DEVICE)
    check = QuarantineCheck(bench.memory, said.append)
    run = run_of([[value], [bench.value(np.zeros(3, np.float32), "float32[?]")]], suspect=True)
    refused = check.refused(run)
    assert refused == {}
    (reported,) = said
    assert isinstance(reported, msg.Suspected) and reported.digests[0] == b"" and len(reported.digests[1]) == 32
    step = bench.on_gpu(lambda batch: {"seen": [0] * len(batch)}, {"x": "float32[?]"}, {"seen": "json"})
    failed, answered = bench.answers(step.run(run, refused))
    assert "cannot be read here" in failed.message and answered == 0


def test_equal_inputs_have_one_digest_wherever_they_lie_and_others_another() -> None:
    bench = Bench()
    a, b = np.arange(6, dtype=np.float32), np.arange(6, dtype=np.int32)
    reported = {
        digest([bench.value(value, type, placed)], bench.arenas): (type, str(value))
        for value, type in [
            (a, "tensor"), (b, "tensor"), (a.reshape(2, 3), "tensor"), (a.reshape(3, 2), "tensor"), (a[:5], "tensor"),
            ("ab", "text"), ("ac", "text"), (b"ab", "bytes"), ("ab", "json"),
            (["a", "b"], "list[text]"), (["ab"], "list[text]"), ([["a"], "b"], "list[json]"),
        ]
        for placed in (False, True)
    }  # fmt: skip
    assert len(reported) == 12 and all(len(one) == 32 for one in reported)
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
