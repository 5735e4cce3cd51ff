"""Items that killed a worker before are known again; what cannot be read is left to its call."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.engine.hosted import run_of
from tests.engine.near_hosted import OTHER_NEAR, NearBench
from weftline.engine import messages as msg
from weftline.engine.worker.screening import QUARANTINED, Screening


@pytest.fixture
def bench() -> Iterator[NearBench]:
    one = NearBench()
    yield one
    one.close()


def test_what_is_listed_is_refused_wherever_it_lies_and_the_rest_is_told_of(bench: NearBench) -> None:
    said: list[msg.FromWorker] = []
    screening = Screening(bench.memory, said.append)
    first, second = bench.near_values([np.full(9_000, at, np.float32) for at in (1, 2)])
    assert screening.refused(run_of([[first], [second]], suspect=True)) == {}
    (told,) = said
    assert isinstance(told, msg.Suspected) and len(set(told.digests)) == 2
    screening.list(msg.Quarantine(0, (told.digests[1],)))
    on_host = bench.value(np.full(9_000, 2, np.float32), "float32[?]")
    assert screening.refused(run_of([[first], [second], [on_host]])) == {1: QUARANTINED, 2: QUARANTINED}
    assert len(said) == 1


def test_an_item_that_cannot_be_read_here_ends_nobody_and_its_call_says_why(bench: NearBench) -> None:
    said: list[msg.FromWorker] = []
    (value,) = bench.near_values([np.zeros(9_000, np.float32)])
    bench.memory.retire(OTHER_NEAR)
    screening = Screening(bench.memory, said.append)
    run = run_of([[value], [bench.value(np.zeros(3, np.float32), "float32[?]")]], suspect=True)
    refused = screening.refused(run)
    assert refused == {}
    (told,) = said
    assert isinstance(told, msg.Suspected) and told.digests[0] == b"" and len(told.digests[1]) == 32
    step = bench.on_gpu(lambda batch: {"told": [0] * len(batch)}, {"x": "float32[?]"}, {"told": "json"})
    failed, answered = bench.answers(step.run(run, refused))
    assert "cannot be read here" in failed.message and answered == 0
