"""The example job over a few pictures: right answers, spoilt pictures as error rows, and the same after a stop."""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("ultralytics")
pytest.importorskip("transformers")

import pyarrow.parquet

from examples.batch import make_scenes, score
from examples.models import language
from examples.models.language import Thing
from weftline.engine.jobs.job import run_job
from weftline.engine.jobs.progress import JobResult, Progress
from weftline.engine.jobs.rows import BlockResult, RowBlock
from weftline.engine.jobs.runners.factory import RunnerFactory, for_jobs, local_runner_factory
from weftline.engine.jobs.runners.session_runner import SessionRunner
from weftline.engine.jobs.spec import DataSpec, JobSpec, OutSpec
from weftline.engine.session import Session, plan_of

pytestmark = pytest.mark.slow

PIPELINE = Path(__file__).parents[2] / "examples" / "batch" / "photo_questions.yaml"
COUNT, SPOILT, PART_ROWS = 12, 3, 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scenes")
    make_scenes.make(folder, COUNT, spoilt=SPOILT)
    return folder


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """Open the models once for all jobs of this file."""
    with Session(for_jobs(plan_of(PIPELINE), PART_ROWS)) as session:
        session.open()
        yield session


def opening(session: Session, kind: type[SessionRunner] = SessionRunner) -> RunnerFactory:
    here = local_runner_factory(PIPELINE, block_rows=PART_ROWS)
    return replace(here, open=lambda progress: kind(session, shared=False, block_rows=PART_ROWS))


class Halting(SessionRunner):
    """Answers the first two parts, and the third never."""

    def submit(self, block: RowBlock) -> Future[BlockResult]:
        return super().submit(block) if block.part < 2 else Future()


@pytest.fixture(scope="module")
def whole(data: Path, session: Session, tmp_path_factory: pytest.TempPathFactory) -> tuple[JobSpec, JobResult]:
    """Run the job in one go."""
    spec = job(data, tmp_path_factory.mktemp("whole") / "answers")
    return spec, run_job(spec, opening(session))


def job(data: Path, out: Path) -> JobSpec:
    rows = DataSpec((str(data / "questions.jsonl"),), id="photo")
    return JobSpec(PIPELINE, rows, OutSpec(str(out), part_rows=PART_ROWS), block_rows=PART_ROWS)


def parts(spec: JobSpec) -> dict[str, bytes]:
    """Return everything that holds results, by name."""
    folder = Path(spec.out.out)
    return {file.name: file.read_bytes() for file in [*folder.glob("*.parquet"), folder / "_errors.jsonl"]}


@pytest.mark.slow
def test_every_picture_that_can_be_read_is_answered_rightly(whole: tuple[JobSpec, JobResult]) -> None:
    spec, end = whole
    scored = score.read(Path(spec.out.out))
    assert end.finished and (end.rows, end.errors) == (COUNT, SPOILT)
    assert len(scored) == COUNT - SPOILT and [one.line for one in scored if not one.right] == []
    assert sum(one.seen for one in scored) >= len(scored) - 1
    assert score.table(scored).splitlines()[-1].split()[:2] == ["all", str(COUNT - SPOILT)]


@pytest.mark.slow
def test_what_the_rows_came_with_is_kept_and_the_order_is_theirs(data: Path, whole: tuple[JobSpec, JobResult]) -> None:
    spec, _ = whole
    rows = [
        row
        for part in sorted(Path(spec.out.out).glob("*.parquet"))
        for row in pyarrow.parquet.read_table(part).to_pylist()
    ]
    spoilt = make_scenes.spoilt_places(make_scenes.SEED, COUNT, SPOILT)
    for place, row in zip((place for place in range(COUNT) if place not in spoilt), rows, strict=True):
        _, line = make_scenes.row(make_scenes.SEED, place)
        assert {name: row[name] for name in line} == line and row["id"] == line["photo"]


def test_spoilt_pictures_are_error_rows_that_say_what_is_wrong(whole: tuple[JobSpec, JobResult]) -> None:
    _, end = whole
    cut, missing, other = (f"{place:05}.png" for place in make_scenes.spoilt_places(make_scenes.SEED, COUNT, SPOILT))
    said = {kind.ids[0]: kind.reason for kind in end.kinds}
    assert set(said) == {cut, missing, other}
    assert "truncated" in said[cut] and f"no file {missing}" in said[missing] and "no picture" in said[other]


@pytest.mark.slow
def test_a_job_that_was_stopped_and_gone_on_with_gives_the_same(
    data: Path, session: Session, whole: tuple[JobSpec, JobResult], tmp_path: Path
) -> None:
    spec, committed = job(data, tmp_path / "answers"), 0

    def watch(progress: Progress) -> None:
        nonlocal committed
        committed = progress.committed

    stopped = run_job(spec, opening(session, Halting), watch, lambda: committed >= PART_ROWS)
    assert not stopped.finished
    end = run_job(spec, opening(session))
    assert end.finished and (end.rows, end.errors) == (COUNT, SPOILT) and PART_ROWS <= end.resumed < COUNT
    assert parts(spec) == parts(whole[0])


def test_equal_seeds_make_equal_files_and_other_seeds_others(tmp_path: Path, data: Path) -> None:
    for folder, seed in (("again", make_scenes.SEED), ("other", 7)):
        make_scenes.make(tmp_path / folder, 4, seed, spoilt=0)
    again, other = ((tmp_path / folder / "questions.jsonl").read_text() for folder in ("again", "other"))
    assert (data / "questions.jsonl").read_text().startswith(again) and again != other
    sound = f"{next(p for p in range(4) if p not in make_scenes.spoilt_places(make_scenes.SEED, COUNT, SPOILT)):05}.png"
    assert (tmp_path / "again" / sound).read_bytes() == (data / sound).read_bytes()


def test_a_second_making_in_the_same_folder_leaves_no_picture_of_the_first(tmp_path: Path) -> None:
    for spoilt in (0, 3):
        make_scenes.make(tmp_path, 3, spoilt=spoilt)
    assert not (tmp_path / f"{make_scenes.spoilt_places(make_scenes.SEED, 3, 3)[1]:05}.png").exists()


def test_a_wrong_answer_and_a_wrong_detection_are_counted_apart() -> None:
    scene = [Thing("red", "circle"), Thing("red", "circle"), Thing("blue", "star")]
    row = {
        "id": "1", "form": "count", "question": "How many red circles are there?", "shows": language.describe(scene),
        "expected": "There are 2 red circles.", "answer": "there are 2 red circles",
        "detections": [{"label": thing.name} for thing in scene],
    }  # fmt: skip
    assert score.judge(row).seen and score.judge(row).right
    assert not score.judge({**row, "answer": "There are 3 red circles."}).right
    blind = score.judge({**row, "detections": row["detections"][1:]})
    assert not blind.seen and blind.right and "saw 1 blue star, 1 red circle" in blind.line
    assert score.judge({**row, "shows": "nothing", "detections": []}).seen
