"""Who answers a job: the same job where its pipeline runs here and in copies elsewhere; servers by their options."""

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from tests.weftline.batch_files import shouter
from weftline.batch_answering import REPLICA, open_replica, opening_of
from weftline.batch_options import BatchRequest, OnRay, Via
from weftline.cli_remote import Remote
from weftline.engine.jobs.cluster import replicas
from weftline.engine.jobs.rows import Block
from weftline.engine.jobs.spec import DataSpec, JobSpec, OutSpec
from weftline.errors import InputError


@pytest.fixture
def request_here(tmp_path: Path) -> BatchRequest:
    spec = JobSpec(Path(shouter(tmp_path)), DataSpec(("rows.jsonl",)), OutSpec("out", outputs=("loud",)), seed=3)
    return BatchRequest(replace(spec, block_rows=2))


def test_copies_on_a_cluster_do_the_same_job(request_here: BatchRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    here = opening_of(request_here)
    there = opening_of(replace(request_here, where=OnRay(2, 0.5, "auto")))
    assert replace(there, open=here.open) == here

    asked: dict[str, object] = {}
    monkeypatch.setattr(replicas, "ReplicaAnswerer", lambda *given, **options: asked.update(given=given, **options))
    there()
    opener, arguments = asked["given"]  # type: ignore[misc]
    assert opener == REPLICA == f"{open_replica.__module__}:{open_replica.__name__}"
    assert (asked["replicas"], asked["address"], asked["need"].gpus) == (2, "auto", 0.5)  # type: ignore[attr-defined]

    copy = open_replica(**arguments)
    try:
        texts = ["one", "two"]
        answer: Future = copy.ask(Block(0, 0, texts, {"text": texts}, pa.table({})))
        assert answer.result(timeout=60).outputs == {"loud": ["ONE", "TWO"]}
        assert copy.block_rows == here.block_rows == 2
    finally:
        copy.close()


def test_a_server_is_reached_as_other_commands_reach_it(request_here: BatchRequest, tmp_path: Path) -> None:
    opening = opening_of(replace(request_here, where=Via(Remote("localhost:1"))))
    assert (opening.repeatable, opening.block_rows) == ({"loud": "rounding"}, 2)
    with pytest.raises(InputError, match="cannot read"):
        opening_of(replace(request_here, where=Via(Remote("localhost:1", tmp_path / "no-token"))))


def test_an_output_that_is_not_there_is_said_before_anything_starts(request_here: BatchRequest) -> None:
    out = OutSpec("out", outputs=("lout",))
    with pytest.raises(InputError, match=r"--output lout: the pipeline has no such output; did you mean loud\?"):
        opening_of(replace(request_here, spec=replace(request_here.spec, out=out)))
