"""The way through a server: known before it is asked, refused when it serves something else."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from tests.engine.client.pipelines import of_one_step
from tests.engine.serving.grpc.served import served_in_thread
from weftline.engine.jobs.rows import RowBlock
from weftline.engine.jobs.runners.server_runner import server_runner_factory
from weftline.errors import InputError, PipelineError, Unavailable

ECHO = of_one_step("said", "echo")


@pytest.mark.slow
def test_a_job_goes_through_a_server(tmp_path: Path) -> None:
    file = tmp_path / "said.yaml"
    file.write_text(ECHO)
    with served_in_thread({"said": ECHO, "other": ECHO.replace("{x:", "{z:").replace("value: x", "value: z")}) as one:
        factory = server_runner_factory(file, one.address, block_rows=5)
        assert (factory.mode, factory.why, factory.block_rows) == ("server", "", 5)
        assert factory.repeatable == {"y": "rounding"}
        runner = factory(None)
        assert runner.block_rows == 5
        found = runner.submit(RowBlock(0, 0, ["a", "b"], {"x": ["1", "2"]}, pa.table({}))).result(60)
        runner.close()
        assert list(found.outputs["y"]) == ["1", "2"]
        with pytest.raises(InputError, match=r"model other at .* is not the pipeline"):
            server_runner_factory(file, one.address, model="other")(None)


def test_nothing_is_asked_before_it_is_opened(tmp_path: Path) -> None:
    file = tmp_path / "said.yaml"
    file.write_text(ECHO)
    factory = server_runner_factory(file, "127.0.0.1:1")
    with pytest.raises(Unavailable):
        factory(None)


def test_a_wrong_file_is_said_before_anything(tmp_path: Path) -> None:
    file = tmp_path / "said.yaml"
    file.write_text(ECHO.replace("node: echo", "node: ecko"))
    with pytest.raises(PipelineError, match="did you mean echo"):
        server_runner_factory(file, "127.0.0.1:1")
