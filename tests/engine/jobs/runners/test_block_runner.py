"""Whole blocks through the engine: every row is answered as Session.run answers it, whatever becomes of the others."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.engine.fire import Gate, descriptors, memory_maps, wait_until
from weftline.engine.jobs.progress import Tally
from weftline.engine.jobs.rows import BlockResult, RowBlock, RowError, Unusable, row_error, row_seed
from weftline.engine.jobs.runners import packing
from weftline.engine.jobs.runners import plans as blocked_module
from weftline.engine.jobs.runners.block_runner import (
    BlockRunner,
    ByteAllowance,
    ahead_of,
    bisection_ranges,
    count,
)
from weftline.engine.jobs.runners.plans import block_plan, block_rows_of
from weftline.engine.jobs.runners.rows_node import BlockOutcome
from weftline.engine.jobs.runners.session_runner import SessionRunner
from weftline.engine.scheduler import workers as crew
from weftline.engine.scheduler.restarts import RestartPolicy
from weftline.engine.session import load
from weftline.errors import InputError, PipelineError, SessionClosed, WeftlineError
from weftline.nodes.detections import Detections
from weftline.nodes.urgency import seed_of
from weftline.pipelines.placement.place import Machine
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.spec.builder import Builder, constant
from weftline.pipelines.spec.graph import Pipeline
from weftline.pipelines.spec.loader import load_file

STEPS = Path(__file__).parents[2]
EXAMPLES = Path(__file__).parents[4] / "examples"
HUNG_S = 60.0

Start = Callable[..., BlockRunner]


@pytest.fixture
def start(warm: None) -> Iterator[Start]:
    """Open runners; close them at the end."""
    before = descriptors(), memory_maps()
    opened: list[BlockRunner] = []

    def start(pipeline: Any, **more: Any) -> BlockRunner:
        opened.append(BlockRunner(pipeline, **more))
        return opened[-1]

    yield start
    for one in opened:
        one.close()
    assert (descriptors(), memory_maps()) == before


def pipeline(name: str = "blocks", **limits: Any) -> Builder:
    return Builder(name, base_dir=STEPS, limits=limits or None)


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"function": f"plain_steps.py:{name}", **more}


def block_of(inputs: Mapping[str, Sequence[Any]], place: int = 0) -> RowBlock:
    rows = len(next(iter(inputs.values()), ()))
    return RowBlock(0, place, [str(row) for row in range(rows)], inputs, None)


def answered(runner: BlockRunner, inputs: Mapping[str, Sequence[Any]], place: int = 0) -> BlockResult:
    return runner.submit(block_of(inputs, place)).result(HUNG_S)


def row_by_row(source: Any, inputs: Mapping[str, Sequence[Any]]) -> list[Mapping[str, Any] | RowError]:
    """Return what Session.run says to each row."""
    found: list[Mapping[str, Any] | RowError] = []
    with load(source).open() as session:
        for row in range(len(next(iter(inputs.values())))):
            given = {name: values[row] for name, values in inputs.items() if values[row] is not None}
            try:
                found.append(dict(session.run(**given)))
            except WeftlineError as error:
                found.append(row_error(error))
    return found


def plain(value: Any) -> Any:
    """Return a value so that equal ones are equal."""
    if isinstance(value, Detections):
        return value.to_json()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    return [plain(one) for one in value] if isinstance(value, list) else value


def by_row(answer: BlockResult) -> list[Mapping[str, Any] | RowError]:
    rows = len(next(iter(answer.outputs.values())))
    for row in answer.errors:
        assert all(values[row] is None for values in answer.outputs.values())
    return [
        answer.errors.get(row) or {name: values[row] for name, values in answer.outputs.items()} for row in range(rows)
    ]


def same(block: Sequence[Mapping[str, Any] | RowError], rows: Sequence[Mapping[str, Any] | RowError]) -> None:
    assert len(block) == len(rows)
    for place, (one, other) in enumerate(zip(block, rows, strict=True)):
        if isinstance(one, RowError) or isinstance(other, RowError):
            assert one == other, f"row {place}"
        else:
            assert {k: plain(v) for k, v in one.items()} == {k: plain(v) for k, v in other.items()}, f"row {place}"


# as Session.run


def drawn(seed: int) -> Pipeline:
    """Return a pipeline of random plain steps, every one of which is an output."""
    rng, p = Random(seed), pipeline(f"drawn-{seed}")
    wires = {"text": [p.input("q", "text"), p.input("o", "text", optional=True)], "numbers": [], "list": []}
    takes = {
        "mark": ["text"], "both": ["text", "text"], "maybe": ["text", "text"], "picky": ["text"], "together": ["text"],
        "parts": ["text"], "joined": ["list"], "signal": ["text"], "scaled": ["numbers"], "summary": ["numbers"],
    }  # fmt: skip
    gives = {"parts": "list", "signal": "numbers", "scaled": "numbers"}
    for place in range(9):
        node = rng.choice([name for name, kinds_in in takes.items() if all(wires[kind] for kind in kinds_in)])
        ports = ("x",) if takes[node] == ["numbers"] else ("a", "b")
        inputs = {port: rng.choice(wires[kind][-4:]) for port, kind in zip(ports, takes[node])}
        more = {"batch": {"items_max": rng.choice([1, 3, 16])}, "worker": rng.choice("vw")}
        step = p.step(f"s{place}", "function", **function(node), **inputs, **more, batched=node == "together")
        wires[gives.get(node, "text")].append(step.output)
        p.output(f"s{place}", step.output)
    p.output("q", wires["text"][0])
    p.output("o", wires["text"][1])
    return p.build()


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("seed", range(3))
def test_random_pipelines_answer_and_fail_as_row_by_row(seed: int, start: Start) -> None:
    built, rng = drawn(seed), Random(seed)
    texts = ["".join(rng.choice("abcdefg") for _ in range(rng.randint(0, 9))) for _ in range(50)]
    inputs: dict[str, list[Any]] = {"q": [None, 7, *texts], "o": [rng.choice([None, "x", "abc"]) for _ in range(52)]}
    rows = row_by_row(built, inputs)
    answer = answered(start(built), inputs)
    assert {row for row, one in enumerate(rows) if isinstance(one, RowError)} == set(answer.errors)
    for row, one in enumerate(by_row(answer)):
        other = rows[row]
        if isinstance(one, RowError) or isinstance(other, RowError):
            assert isinstance(one, RowError) and isinstance(other, RowError)
            assert one.error == other.error  # of several steps that fail on a row either may be the first
        else:
            assert {k: plain(v) for k, v in one.items()} == {k: plain(v) for k, v in other.items()}


@pytest.fixture(scope="module")
def chain() -> Iterator[tuple[BlockRunner, Callable[[list[Any]], list[Any]]]]:
    """Two steps that fail on some texts, one item by item and one as a whole; and what Session.run says."""
    p = pipeline()
    x = p.input("x", "text")
    first = p.step("first", "function", **function("picky", a=x, batch={"items_max": 4}))
    p.output(
        "y",
        p.step(
            "second", "function", **function("together", batched=True, a=first.output, batch={"items_max": 5})
        ).output,
    )
    p.output("first", first.output)
    built = p.build()
    runner = BlockRunner(built)
    with load(built).open() as session:

        def rows(texts: list[Any]) -> list[Any]:
            found: list[Any] = []
            for text in texts:
                try:
                    found.append(dict(session.run(x=text)))
                except WeftlineError as error:
                    found.append(row_error(error))
            return found

        yield runner, rows
    runner.close()


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 13), max_size=30))
def test_whichever_rows_fail_the_others_are_answered(lengths: list[int], chain: Any) -> None:
    runner, rows = chain
    texts = ["abcdefghijklmnop"[:length] for length in lengths]
    same(by_row(answered(runner, {"x": texts})), rows(texts))


@pytest.mark.slow
def test_an_error_names_the_step_and_the_reason(chain: Any) -> None:
    answer = answered(chain[0], {"x": ["abc", "a", "abcde"]})
    assert answer.errors == {
        0: RowError("first", "StepError", "ValueError: a multiple of three"),
        1: RowError("second", "StepError", "ValueError: a multiple of four in the batch"),
        2: RowError("second", "StepError", "ValueError: a multiple of four in the batch"),
    }
    assert answer.outputs == {"y": [None] * 3, "first": [None] * 3}


def photos(count: int) -> list[bytes]:
    found = []
    for place in range(count):
        rng = np.random.default_rng(place)
        image = Image.fromarray(rng.integers(0, 255, (20 + place, 30 - place, 3), np.uint8))
        stream = BytesIO()
        image.save(stream, "PNG")
        found.append(stream.getvalue())
    return found


def examples() -> dict[str, tuple[Path, dict[str, list[Any]]]]:
    measures = [np.array([1.4 + row, 0.2, 5.1, 3.5], np.float32) for row in range(9)]
    return {
        "tabular": (
            EXAMPLES / "tabular.yaml",
            {"measures": [*measures, "no numbers", [1, 2, 3, 4]], "habitat": [np.int64(row % 2) for row in range(11)]},
        ),
        "user_node": (EXAMPLES / "user_node.yaml", {"photo": [*photos(6), b"no picture", EXAMPLES / "data/star.png"]}),
        "classifier": (EXAMPLES / "classifier.yaml", {"photo": [*photos(5), str(EXAMPLES / "data/star.png")]}),
    }  # fmt: skip


@pytest.mark.slow(but_first=1)
@pytest.mark.parametrize("name", examples())
def test_examples_answer_as_row_by_row(name: str) -> None:
    pytest.importorskip("onnxruntime")
    file, inputs = examples()[name]
    rows = row_by_row(file, inputs)
    runner = BlockRunner(file)
    try:
        found = by_row(answered(runner, inputs))
    finally:
        runner.close()
    for one, other in zip(found, rows, strict=True):
        assert isinstance(one, RowError) == isinstance(other, RowError)
        if isinstance(one, RowError) or isinstance(other, RowError):
            assert one == other
            continue
        for key, value in one.items():
            if isinstance(value, np.ndarray) and value.dtype == np.float32:
                assert np.allclose(value, other[key], atol=1e-5)  # batches of other sizes round otherwise
            else:
                assert plain(value) == plain(other[key])


@pytest.mark.slow
def test_a_subpipeline_a_constant_a_default_and_what_is_absent(start: Start, tmp_path: Path) -> None:
    inner = Builder("inner", base_dir=STEPS)
    a, b = inner.input("a", "text"), inner.input("b", "text", optional=True)
    inner.output("out", inner.step("m", "function", **function("maybe", a=a, b=b)).output)
    (tmp_path / "inner.yaml").write_text(inner.to_yaml())
    (tmp_path / "plain_steps.py").write_text((STEPS / "plain_steps.py").read_text())
    p = Builder("outer", base_dir=tmp_path)
    x, d = p.input("x", "text"), p.input("d", "text", default="usual")
    o = p.input("o", "text", optional=True)
    sub = p.step("sub", pipeline="inner.yaml", a=x)
    fixed = p.step("fixed", "function", **function("both", a=sub.out, b=constant("!")))
    p.output("y", p.step("s", "function", **function("both", a=fixed.output, b=d)).output)
    p.output("lacking", p.step("t", "function", **function("mark", a=o)).output)
    p.output("m", p.step("u", "function", **function("maybe", a=x, b=o)).output)
    p.output("d", d)
    p.output("o", o)
    built = p.build()
    inputs = {"x": ["a", "b", "c"], "d": [None, "other", None], "o": [None, None, "there"]}
    answer = answered(start(built), inputs)
    same(by_row(answer), row_by_row(built, inputs))
    assert answer.outputs["lacking"] == [None, None, "(there)"]
    assert answer.outputs["m"] == ["a|None", "b|None", "c|there"]
    assert answer.tally.steps["t"].skipped == 2


@pytest.mark.slow
def test_templates_detections_and_lists_travel(start: Start) -> None:
    p = pipeline()
    x = p.input("x", "json")
    found = p.input("found", "detections")
    texts = p.input("texts", "list[text]")
    template = "{{ x.a }} {{ found | describe }} {{ texts | length }}"
    p.output("y", p.step("s", "template", template=template, x=x, found=found, texts=texts).text)
    p.output("found", p.step("t", "echo", type="detections", value=found).value)
    p.output("joined", p.step("u", "function", **function("joined", a=texts)).output)
    one = Detections(np.ones((1, 4), np.float32), np.ones(1, np.float32), np.zeros(1, np.int32), ("star",))
    inputs = {"x": [{"a": 1}, {"a": [None]}, []], "found": [one, one, 7], "texts": [["a", "b"], [], ["c"]]}
    built = p.build()
    same(by_row(answered(start(built), inputs)), row_by_row(built, inputs))


# batches


@pytest.mark.slow
def test_the_same_block_forms_the_same_batches_by_row_order(start: Start, gate: Gate) -> None:
    p = pipeline()
    x = p.input("x", "text")
    first = p.step("first", "function", **function("picky", a=x))
    p.output("y", p.step("s", "fire_steps.py:Gated", **gate.options, value=first.output, batch={"items_max": 4}).value)
    runner = start(p)
    texts = ["a", "abc", "ab", "b", "c", "d", "def", "e", "f"]
    for _ in range(2):
        answered(runner, {"x": texts})
    right = [["ok a", "ok ab", "ok b", "ok c"], ["ok d", "ok e", "ok f"]]
    assert gate.calls() == right * 2


@pytest.mark.slow
def test_every_row_has_its_own_seed_by_its_place(start: Start, tmp_path: Path) -> None:
    (tmp_path / "seeds.py").write_text(
        "import weftline\n\n\ndef seed(a: str) -> str:\n    return str(weftline.current().seed)\n"
    )

    def of(place: int) -> str:
        return str(seed_of(row_seed(3, place), "s"))

    p = Builder("seeds", base_dir=tmp_path)
    p.output("y", p.step("s", "function", function="seeds.py:seed", a=p.input("x", "text")).output)
    runner = start(p, seed=3)
    assert answered(runner, {"x": ["a", "b"]}, place=7).outputs["y"] == [
        of(7),
        of(8),
    ]
    block = RowBlock(0, 0, ["p", "q"], {"x": ["a", "b"]}, None, row_numbers=[5, 90])
    assert runner.submit(block).result(HUNG_S).outputs["y"] == [
        of(5),
        of(90),
    ]


@pytest.mark.slow
def test_blocks_are_answered_whatever_their_order_and_size(start: Start) -> None:
    p = pipeline()
    p.output("y", p.step("s", "function", **function("mark", a=p.input("x", "text"))).output)
    runner = start(p, block_rows=10)
    assert runner.block_rows == 10
    asked = [(place, runner.submit(block_of({"x": [f"{place}.{row}" for row in range(place)]}))) for place in range(40)]
    for place, future in asked:
        assert future.result(HUNG_S).outputs["y"] == [f"({place}.{row})" for row in range(place)]


@pytest.mark.slow
def test_what_steps_did_is_counted(start: Start) -> None:
    p = pipeline()
    x, o = p.input("x", "text"), p.input("o", "text", optional=True)
    s = p.step("s", "function", **function("picky", a=x, batch={"items_max": 4}))
    p.output("y", p.step("t", "function", **function("both", a=s.output, b=o, batch={"items_max": 2})).output)
    runner = start(p)
    answer = answered(runner, {"x": ["a", "b", "abc", "c", "d"], "o": ["x", None, "x", "x", "x"]})
    first, second = answer.tally.steps["s"], answer.tally.steps["t"]
    assert (first.rows, first.failed, first.skipped) == (4, 1, 0)
    assert (second.rows, second.failed, second.skipped) == (3, 0, 1)
    assert second.batches == pytest.approx(2)
    assert first.busy_ms > 0
    assert sum(answer.tally.lengths["y"].values()) == 3
    assert set(runner.figures()) == {"busy:s", "busy:t"}


def test_only_what_is_wanted_runs_and_comes(start: Start, gate: Gate) -> None:
    p = pipeline()
    x, z = p.input("x", "text"), p.input("z", "text", optional=True)
    p.output("gated", p.step("g", "fire_steps.py:Gated", **gate.options, value=z).value)
    p.output("y", p.step("s", "echo", value=x).value)
    runner = start(p, outputs=["y"])
    answer = answered(runner, {"x": ["a"], "z": ["b"]})
    assert answer.outputs == {"y": ["a"]}
    assert gate.calls() == []
    assert {name: str(type) for name, type in runner.outputs.items()} == {"y": "text"}
    assert {name: str(type) for name, type in runner.inputs.items()} == {"x": "text", "z": "text"}
    assert runner.required == {"x"}
    assert runner.repeatable == {"y": "exact"}
    assert runner.instances == {"s": 1}
    assert set(runner.pids()) == {"s"}


# what goes wrong


@pytest.mark.slow
def test_values_that_cannot_be_had_are_error_rows(start: Start) -> None:
    p = pipeline()
    p.output("y", p.step("s", "echo", value=p.input("x", "text")).value)
    answer = answered(start(p), {"x": ["a", Unusable("there is no file b.txt"), "c"]})
    assert answer.errors == {1: RowError("", "InputError", "input x: there is no file b.txt")}
    assert answer.outputs["y"] == ["a", None, "c"]


@pytest.mark.slow
def test_a_block_without_a_usable_row_is_answered(start: Start) -> None:
    p = pipeline()
    p.output("y", p.step("s", "echo", value=p.input("x", "text")).value)
    runner = start(p)
    assert list(answered(runner, {"x": [7, None]}).errors) == [0, 1]
    assert answered(runner, {"x": []}).outputs == {"y": []}


@pytest.mark.slow
def test_large_rows_travel_in_portions(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "PORTION_BYTES", 100_000)
    p = pipeline()
    p.output("y", p.step("s", "function", **function("signal", a=p.input("x", "text"))).output)
    texts = ["abc" * (3000 * row) for row in range(20)]
    outputs = answered(start(p), {"x": texts}).outputs["y"]
    assert [len(array) for array in outputs] == [len(text) for text in texts]
    assert outputs[7].flags.writeable


def test_outputs_that_find_no_room_together_are_made_apart(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked_module, "ARENA_BYTES", 1 << 20)
    (tmp_path / "big.py").write_text(
        "import numpy as np\n\n\ndef big(a: str) -> 'uint8[N]':\n    return np.full(int(a), 7, np.uint8)\n"
    )
    p = Builder("big", base_dir=tmp_path, limits={"arena_bytes": 1 << 20})
    p.output("y", p.step("s", "function", function="big.py:big", a=p.input("x", "text")).output)
    sizes = [300_000] * 4 + [2_000_000, 5]
    answer = answered(start(p), {"x": [str(size) for size in sizes]})
    assert [None if array is None else len(array) for array in answer.outputs["y"]] == [*[300_000] * 4, None, 5]
    assert (answer.errors[4].step, answer.errors[4].error) == ("s", "LimitReached")
    assert "limits.arena_bytes" in answer.errors[4].reason


@pytest.mark.slow
def test_a_row_that_ends_its_worker_is_the_only_one_that_fails(start: Start) -> None:
    p = pipeline()
    x = p.input("x", "text")
    s = p.step("s", "fail", value=x, equals="poison", kill=True, batch={"items_max": 8})
    p.output("y", s.value)
    texts = [f"row {row}" for row in range(12)]
    texts[7] = "poison"
    answer = answered(start(p), {"x": texts})
    assert list(answer.errors) == [7]
    error = answer.errors[7]
    assert (error.step, error.error) == ("s", "WorkerDied")
    assert "2 workers" in error.reason
    assert answer.outputs["y"] == [None if text == "poison" else text for text in texts]


@pytest.mark.slow
def test_a_worker_killed_within_a_block_changes_nothing(start: Start, gate: Gate) -> None:
    p = pipeline()
    x = p.input("x", "text")
    p.output("y", p.step("s", "fire_steps.py:Gated", **gate.options, value=x, batch={"items_max": 4}).value)
    runner = start(p)
    gate.close()
    future = runner.submit(block_of({"x": list("abcdef")}))
    wait_until(lambda: len(gate.calls()) == 1)
    os.kill(runner.pids()["s"], signal.SIGKILL)
    wait_until(lambda: len(gate.calls()) == 2)
    gate.open()
    answer = future.result(HUNG_S)
    assert answer.outputs["y"] == list("abcdef")
    assert answer.errors == {}
    assert gate.calls()[1:] == [list("abcd"), list("ef")]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["blocks", "rows"])
def test_a_step_that_never_comes_back_stops_the_job(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(crew, "RestartPolicy", lambda: RestartPolicy(1.0, 1.0, crashes_max=0))
    p = pipeline()
    x = p.input("x", "text")
    p.output("y", p.step("s", "fire_steps.py:Fragile", folder=str(tmp_path), value=x).value)
    with contextlib.ExitStack() as opened:
        if mode == "blocks":
            runner: Any = start(p)
            pids = runner.pids()
        else:
            session = opened.enter_context(load(p).open())
            runner, pids = SessionRunner(session), session.pids()
            opened.callback(runner.close)
        (tmp_path / "broken").touch()
        os.kill(pids["s"], signal.SIGKILL)
        for _ in range(2):  # while its worker fails, and once it was given up
            with pytest.raises(WeftlineError, match="keeps failing to start"):
                runner.submit(block_of({"x": ["a", "b"]})).result(HUNG_S)


@pytest.mark.slow
def test_closing_ends_what_is_under_way(start: Start, gate: Gate) -> None:
    p = pipeline()
    x = p.input("x", "text")
    p.output("y", p.step("s", "fire_steps.py:Gated", **gate.options, value=x).value)
    runner = start(p)
    gate.close()
    future = runner.submit(block_of({"x": ["a"]}))
    wait_until(gate.calls)
    runner.close()
    runner.close()
    with pytest.raises(SessionClosed):
        future.result(HUNG_S)


def test_a_pipeline_that_cannot_be_given_blocks_is_refused() -> None:
    p = pipeline()
    p.output("y", p.step("s", "trickle", value=p.input("x", "text")).value)
    with pytest.raises(PipelineError, match="cannot run in blocks: step s streams"):
        BlockRunner(p)


def test_an_output_that_does_not_exist_is_refused() -> None:
    p = pipeline()
    p.output("y", p.step("s", "echo", value=p.input("x", "text")).value)
    with pytest.raises(InputError, match="no output is named z; outputs: y"):
        BlockRunner(p, outputs=["z"])


@pytest.mark.slow
def test_a_model_that_cannot_be_opened_leaves_nothing_behind(start: Start) -> None:
    p = pipeline()
    p.output("y", p.step("s", "fail", fail_open=True, value=p.input("x", "text")).value)
    with pytest.raises(WeftlineError, match="failed on purpose"):
        start(p)


# what decides


@pytest.mark.parametrize(
    ("rows", "deadly", "sizes"),
    [(1024, True, [32] * 32), (10, True, [4, 4, 2]), (2, True, [1, 1]), (3, True, [2, 1]), (9, False, [5, 4])],
)
def test_rows_that_fail_together_are_asked_in_parts(rows: int, deadly: bool, sizes: list[int]) -> None:
    found = bisection_ranges(rows, deadly)
    assert [end - start for start, end in found] == sizes
    assert [row for start, end in found for row in range(start, end)] == list(range(rows))


def plan_of(p: Builder | Pipeline) -> Any:
    return make_plan(p.build() if isinstance(p, Builder) else p, Machine(4, 64 << 30))


def test_as_many_blocks_are_under_way_as_keep_all_workers_busy() -> None:
    p = pipeline()
    x = p.input("x", "text")
    one = p.step("one", "echo", value=x)
    two = p.step("two", "echo", value=one.value, instances=3)
    p.output("y", p.step("three", "echo", value=two.value, worker="w").value)
    p.output("z", p.step("four", "echo", value=x, worker="w").value)
    assert ahead_of(block_plan(plan_of(p))) == 2 * (1 + 3 + 1) + 1
    assert ahead_of(block_plan(plan_of(load_file(EXAMPLES / "tabular.yaml")))) == 3
    assert block_rows_of(plan_of(p)) == 1024


def test_failed_rows_are_counted_apart() -> None:
    tally = Tally()
    count(tally, "s", BlockOutcome([(4, 8.0, 1), (2, 5.0, 2)], [], 3))
    step = tally.steps["s"]
    assert (step.rows, step.failed, step.skipped) == (3, 3, 3)
    assert step.busy_ms == pytest.approx(6.0)


def test_room_is_shared_out_and_the_largest_gets_all_of_it() -> None:
    capacity = ByteAllowance(10)
    with capacity.acquire(6), capacity.acquire(4):
        pass
    with ThreadPoolExecutor() as pool, capacity.acquire(6):

        def wait() -> bool:
            with capacity.acquire(1000):
                return True

        waiting = pool.submit(wait)
        with capacity.acquire(4):
            assert not waiting.done()
    assert waiting.result(HUNG_S)


@pytest.mark.slow
def test_a_block_that_finds_no_room_for_now_waits(start: Start, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_module, "ARENA_BYTES", 1 << 20)
    p = pipeline(arena_bytes=1 << 20)
    p.output("y", p.step("s", "fire_steps.py:Gated", **gate.options, value=p.input("x", "text")).value)
    runner = start(p)
    gate.close()
    text = "a" * 349_000  # three of them fit into the arena, and their whole pages do not
    futures = [runner.submit(block_of({"x": [text]})) for _ in range(3)]
    wait_until(lambda: runner._session.stats()["requests"]["refused"])
    gate.open()
    assert [future.result(HUNG_S).outputs["y"] == [text] for future in futures] == [True] * 3


@pytest.mark.slow
def test_closing_ends_those_that_wait_for_room(start: Start, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_module, "ARENA_BYTES", 1 << 20)
    p = pipeline(arena_bytes=1 << 20)
    p.output("y", p.step("s", "fire_steps.py:Gated", **gate.options, value=p.input("x", "text")).value)
    runner = start(p)
    gate.close()
    futures = [runner.submit(block_of({"x": ["a" * 700_000]})) for _ in range(3)]
    wait_until((gate.folder / "calls").exists)
    runner.close()
    for future in futures:
        with pytest.raises(SessionClosed):
            future.result(HUNG_S)
