"""Rows answered by a real server on loopback, one that is restarted, one that is full, and one that is another."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.engine.client.flaky import Refuse, flaky
from tests.engine.client.pipelines import echo, of_one_step
from tests.engine.fire import Gate, wait_until
from tests.engine.serving.grpc.served import Served, served_in_thread
from tests.weftline.served import free_port
from weftline.engine.jobs.rows import BlockResult, RowBlock, RowError, Unusable, row_seed
from weftline.engine.jobs.runners.server_runner import ServerRunner, server_runner_factory
from weftline.engine.serving.backend import Record
from weftline.engine.serving.config import GrpcConfig
from weftline.errors import (
    InputError,
    JobChanged,
    MissingPackage,
    PipelineError,
    SessionClosed,
    Unavailable,
    UnknownModel,
)
from weftline.nodes.ports import PortType
from weftline.pipelines.spec.loader import load_yaml

HERE = Path(__file__).parents[2]  # tests/engine
WIDE = echo("wide", words="text", numbers="float32[N]")
FAILS = of_one_step("fails", "fail, equals: bad")
SLOW = of_one_step("slow", "echo, delay_ms: 5")
SMALL = of_one_step("small", "echo, delay_ms: 2") + "limits: {requests_max: 4}\n"
TIGHT = echo("tight", a="text", b="text") + "limits: {request_bytes_max: 1000}\n"
COUNTS = echo("counts", usage="json")
MAYBE = """weftline: 1
name: maybe
inputs: {x: text, more: {type: text, optional: true}}
steps:
  only: {node: echo, inputs: {value: x}}
  extra: {node: echo, inputs: {value: more}}
outputs: {y: only.value, z: extra.value}
"""


def gated(gate: Gate) -> str:
    return of_one_step("gated", f"'{HERE}/fire_steps.py:Gated', folder: '{gate.folder}'")


def block(place: int = 0, count: int | None = None, **inputs: Sequence[Any]) -> RowBlock:
    length = len(next(iter(inputs.values()))) if count is None else count
    return RowBlock(0, place, [f"r{place + row}" for row in range(length)], inputs, pa.table({}))


def texts(count: int, first: int = 0) -> list[str]:
    return [f"t{first + row}" for row in range(count)]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    pipelines = {"wide": WIDE, "fails": FAILS, "slow": SLOW, "small": SMALL, "tight": TIGHT, "maybe": MAYBE}
    with served_in_thread(pipelines | {"counts": COUNTS}) as one:
        yield one


def most_at_once(records: Sequence[Record]) -> int:
    """Return how many requests were open at a time."""
    moves = [(one.started_ns, 1) for one in records]
    moves += [(one.started_ns + int(one.total_ms * 1e6), -1) for one in records]
    open, most = 0, 0
    for _, move in sorted(moves):
        open += move
        most = max(most, open)
    return most


def of_model(server: Served, model: str) -> list[Record]:
    return [one for one in server.records if one.model == model]


@pytest.mark.slow
def test_every_row_is_answered_once_in_its_place(server: Served) -> None:
    server.records.clear()
    runner = ServerRunner(server.address, "wide", seed=3)
    try:
        assert runner.inputs == {"words": PortType.parse("text"), "numbers": PortType.parse("float32[N]")}
        assert runner.outputs == runner.inputs and runner.required == {"words", "numbers"}
        assert runner.repeatable == {"words": "rounding", "numbers": "rounding"}
        blocks = [
            block(first, words=texts(50, first), numbers=[[float(first + row)] for row in range(50)])
            for first in (0, 50, 100)
        ]
        for first, answered in zip((0, 50, 100), [runner.submit(one) for one in blocks], strict=True):
            found = answered.result(60)
            assert not found.errors
            assert list(found.outputs["words"]) == texts(50, first)
            assert [one.tolist() for one in found.outputs["numbers"]] == [[float(first + row)] for row in range(50)]
            calls = found.tally.of("wide")
            assert (calls.rows, calls.failed, sum(found.tally.lengths["words"].values())) == (50, 0, 50)
        assert runner.figures()["in_flight"] > 8, "it grows while nothing is refused"
    finally:
        runner.close()
    asked = [one.ask for one in of_model(server, "wide")]
    assert Counter(one.inputs["words"] for one in asked) == Counter(texts(150))
    assert all(one.job and one.priority == -100 for one in asked)
    assert {one.inputs["words"]: one.seed for one in asked} == {f"t{place}": row_seed(3, place) for place in range(150)}


@pytest.mark.slow
def test_seeds_belong_to_places_wherever_a_row_stands(server: Served) -> None:
    server.records.clear()
    runner = ServerRunner(server.address, "fails")
    rows = block(x=["a", "b"])
    runner.submit(RowBlock(0, 0, rows.ids, rows.inputs, rows.table, row_numbers=[7, 40])).result(60)
    runner.close()
    assert {one.ask.seed for one in of_model(server, "fails")} == {row_seed(0, 7), row_seed(0, 40)}


def test_a_bad_row_is_an_error_and_its_neighbours_are_answered(server: Served) -> None:
    runner = ServerRunner(server.address, "fails")
    found = runner.submit(block(x=["a", "bad", Unusable("no such file"), None, 5, "b"])).result(60)
    runner.close()
    assert list(found.outputs["y"]) == ["a", None, None, None, None, "b"]
    errors = dict(found.errors)
    assert errors[1] == RowError("only", "StepError", "RuntimeError: failed on purpose")
    assert errors[2] == RowError("", "InputError", "input x: no such file")
    assert errors[3].error == "InputError" and "missing: x" in errors[3].reason
    assert errors[4].error == "InputError" and "input x: wants text" in errors[4].reason
    assert set(errors) == {1, 2, 3, 4} and found.tally.of("fails").failed == 3


def test_a_row_that_is_too_large_is_its_own_error(server: Served) -> None:
    runner = ServerRunner(server.address, "tight")
    found = runner.submit(block(a=["a", "x" * 2000, "x" * 700], b=["b", "b", "x" * 700])).result(60)
    runner.close()
    assert (list(found.outputs["a"]), list(found.errors)) == (["a", None, None], [1, 2])
    assert found.errors[1].error == "InputError" and "1000" in found.errors[1].reason
    assert found.errors[2].error == "LimitReached" and "request_bytes_max is 1000" in found.errors[2].reason


def test_what_a_row_leaves_out_is_left_out_and_only_wanted_outputs_come(server: Served) -> None:
    runner = ServerRunner(server.address, "maybe")
    found = runner.submit(block(x=["a", "b"], more=["c", None])).result(60)
    assert (list(found.outputs["y"]), list(found.outputs["z"])) == (["a", "b"], ["c", None])
    assert runner.required == {"x"}
    runner.close()
    runner = ServerRunner(server.address, "maybe", outputs=["z"])
    assert list(runner.outputs) == ["z"]
    assert dict(runner.submit(block(x=["a"], more=["c"])).result(60).outputs) == {"z": ["c"]}
    runner.close()


def test_tokens_of_usage_outputs_are_added_and_missing_counts_are_zero(server: Served) -> None:
    runner = ServerRunner(server.address, "counts")
    try:
        usage = [{"completion_tokens": 4}, {"completion_tokens": None}, {}, "none", {"completion_tokens": 3}]
        found = runner.submit(block(usage=usage)).result(60)
        assert not found.errors and list(found.outputs["usage"]) == usage
        assert runner.figures()["tokens"] == 7.0
    finally:
        runner.close()


def test_rows_in_flight_stay_within_the_limit(server: Served) -> None:
    server.records.clear()
    runner = ServerRunner(server.address, "slow", in_flight=3)
    wait_for([runner.submit(block(x=texts(20))) for _ in range(2)], 60)
    runner.close()
    assert 1 < most_at_once(of_model(server, "slow")) <= 3
    assert runner.figures() == {"in_flight": 3.0}


def test_a_row_that_was_refused_goes_before_those_behind_it() -> None:
    with flaky() as server:
        server.refusals = [Refuse("RESOURCE_EXHAUSTED", pushback_ms="10")]
        runner = ServerRunner(server.url, "m", in_flight=1)
        found = runner.submit(block(x=texts(400))).result(60)
        runner.close()
        order = [bytes(one.raw_input_contents[0][4:]).decode() for one in server.seen]
    assert list(found.outputs["x"]) == texts(400)
    assert order[0] == "t0" and 1 <= order[1:].index("t0") < 399
    assert [one for one in order if one != "t0"] == texts(399, 1)


def test_a_full_server_is_asked_again_until_every_row_has_passed(server: Served) -> None:
    server.records.clear()
    runner = ServerRunner(server.address, "small")
    found = runner.submit(block(x=texts(80))).result(60)
    runner.close()
    assert not found.errors and list(found.outputs["y"]) == texts(80)
    ends = Counter(one.status for one in of_model(server, "small"))
    assert ends["OK"] == 80 and 1 <= ends["RESOURCE_EXHAUSTED"] < 80, "it finds how many there is room for"
    assert runner.figures()["in_flight"] < 8


# servers that come and go


def serving(port: int, **pipelines: str) -> Any:
    return served_in_thread(pipelines, grpc=GrpcConfig(port=port))


@pytest.mark.slow
def test_a_server_that_is_restarted_in_the_middle_loses_no_row(tmp_path: Path) -> None:
    gate, port = Gate(tmp_path), free_port()
    gate.close()
    with serving(port, gated=gated(gate)) as server:
        runner = ServerRunner(f"127.0.0.1:{port}", "gated")
        answer: Future[BlockResult] = runner.submit(block(x=texts(30)))
        wait_until(lambda: server.open_requests("gated") > 0)
    gate.open()
    assert not answer.done()
    with serving(port, gated=gated(gate)):
        found = answer.result(60)
    runner.close()
    assert not found.errors and list(found.outputs["y"]) == texts(30)


@pytest.mark.slow
def test_a_server_that_stays_away_stops_the_job(tmp_path: Path) -> None:
    gate, port = Gate(tmp_path), free_port()
    gate.close()
    with serving(port, gated=gated(gate)) as server:
        runner = ServerRunner(f"127.0.0.1:{port}", "gated", patience_s=0.3)
        answer = runner.submit(block(x=texts(30)))
        wait_until(lambda: server.open_requests("gated") > 0)
    gate.open()
    with pytest.raises(Unavailable, match=r"no server for 0.3 s: .*\n.*resumes where it stopped"):
        answer.result(60)
    runner.close()


@pytest.mark.slow
def test_another_model_at_the_same_place_stops_the_job(tmp_path: Path) -> None:
    gate, port = Gate(tmp_path), free_port()
    gate.close()
    with serving(port, gated=gated(gate)) as server:
        runner = ServerRunner(f"127.0.0.1:{port}", "gated")
        answer = runner.submit(block(x=texts(30)))
        wait_until(lambda: server.open_requests("gated") > 0)
    gate.open()
    other = of_one_step("gated", "echo").replace("{y: only", "{other: only")
    with serving(port, gated=other), pytest.raises(JobChanged, match="other inputs or outputs"):
        answer.result(60)
    runner.close()


def test_closing_ends_what_is_open_and_leaves_no_thread(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    gate.close()
    with served_in_thread({"gated": gated(gate)}) as server:
        runner = ServerRunner(server.address, "gated")
        answer = runner.submit(block(x=texts(5)))
        wait_until(lambda: server.open_requests("gated") > 0)
        runner.close()
        runner.close()
        with pytest.raises(SessionClosed, match="stopped"):
            answer.result(10)
        with pytest.raises(SessionClosed, match="stopped"):
            runner.submit(block(x=["a"])).result(10)
        wait_until(lambda: server.open_requests("gated") == 0)
        assert "weftline-via" not in [one.name for one in threading.enumerate()]
        gate.open()


# what is no place for the job


def pipeline(text: str) -> Any:
    return load_yaml(text, "job.yaml", HERE)


def test_the_pipeline_of_the_file_is_taken(server: Served) -> None:
    for model, text in (("wide", WIDE), ("fails", FAILS), ("maybe", MAYBE)):
        ServerRunner(server.address, model, pipeline=pipeline(text)).close()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (WIDE.replace('numbers: "float32[N]"', 'numbers: "float32[4]"'),
         "inputs of the file:   words: text, numbers: float32[4]\n"
         "    inputs of the server: words: text, numbers: float32[N]"),
        (WIDE.replace("  numbers: s_numbers.value", "  more: s_numbers.value"),
         "outputs of the file:   words: text, more: float32[N]\n"
         "    outputs of the server: words: text, numbers: float32[N]"),
        (WIDE.replace('words: "text"', 'words: {type: text, optional: true}'), "inputs of the file:   words: text?"),
    ],
)  # fmt: skip
def test_another_pipeline_is_refused_with_both_lists(server: Served, text: str, said: str) -> None:
    with pytest.raises(InputError) as refused:
        ServerRunner(server.address, "wide", pipeline=pipeline(text))
    assert said in str(refused.value) and "fix: pass the served file" in str(refused.value)
    assert str(refused.value).startswith(f"model wide at {server.address} is not the pipeline job.yaml")


@pytest.mark.parametrize(
    ("model", "more", "kind", "said"),
    [
        ("missing", {}, UnknownModel, "missing"),
        ("wide", {"outputs": ["wrods"]}, InputError, "no output is called wrods; outputs: words, numbers"),
        ("wide", {"in_flight": 0}, InputError, "in_flight: found 0, expected 1 to 256"),
        ("wide", {"tls": "/nowhere.pem"}, InputError, "cannot read"),
    ],
)
def test_impossible_options_are_refused_at_once(
    server: Served, model: str, more: Mapping[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        ServerRunner(server.address, model, **more)


def test_a_missing_server_is_reported_at_once() -> None:
    with pytest.raises(Unavailable, match="cannot reach a server"):
        ServerRunner(f"127.0.0.1:{free_port()}", "wide")
    assert "weftline-via" not in [one.name for one in threading.enumerate()]


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "weftline.engine.client.async_client", None)
    with pytest.raises(MissingPackage, match=r"weftline\[client\]"):
        ServerRunner("localhost:1", "wide")


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


def test_an_invalid_file_is_reported_first(tmp_path: Path) -> None:
    file = tmp_path / "said.yaml"
    file.write_text(ECHO.replace("node: echo", "node: ecko"))
    with pytest.raises(PipelineError, match="did you mean echo"):
        server_runner_factory(file, "127.0.0.1:1")
