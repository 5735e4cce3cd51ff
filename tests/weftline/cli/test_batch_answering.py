"""Who answers a job: the same job where its pipeline runs here and in copies elsewhere; servers by their options."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.weftline.batch_files import shouter
from weftline.cli.batch import opening_of
from weftline.cli.batch_commands import BatchRequest, RayTarget, ServerTarget
from weftline.cli.remote import Remote
from weftline.engine.jobs.ray import runner as factory
from weftline.engine.jobs.spec import DataSpec, JobSpec, OutSpec
from weftline.errors import InputError


@pytest.fixture
def request_here(tmp_path: Path) -> BatchRequest:
    spec = JobSpec(Path(shouter(tmp_path)), DataSpec(("rows.jsonl",)), OutSpec("out", outputs=("loud",)), seed=3)
    return BatchRequest(replace(spec, block_rows=2))


def test_copies_on_a_cluster_are_asked_for_the_same_job(
    request_here: BatchRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(factory, "ray_runner_factory", lambda pipeline, **options: asked.update(options, file=pipeline))
    opening_of(replace(request_here, where=RayTarget(2, 0.5, "auto")))
    spec = request_here.spec
    assert (asked["file"], asked["outputs"], asked["seed"]) == (spec.pipeline, ("loud",), 3)
    assert (asked["block_rows"], asked["replicas"], asked["address"], asked["need"].gpus) == (2, 2, "auto", 0.5)


def test_a_server_is_reached_as_other_commands_reach_it(request_here: BatchRequest, tmp_path: Path) -> None:
    server = opening_of(replace(request_here, where=ServerTarget(Remote("localhost:1"))))
    assert (server.repeatable, server.block_rows) == ({"loud": "rounding"}, 2)
    with pytest.raises(InputError, match="cannot read"):
        opening_of(replace(request_here, where=ServerTarget(Remote("localhost:1", tmp_path / "no-token"))))


def test_an_output_that_is_not_there_is_said_before_anything_starts(request_here: BatchRequest) -> None:
    out = OutSpec("out", outputs=("lout",))
    with pytest.raises(InputError, match=r"--output lout: the pipeline has no such output; did you mean loud\?"):
        opening_of(replace(request_here, spec=replace(request_here.spec, out=out)))
