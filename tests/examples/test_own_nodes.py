"""The example of own nodes in worker processes: answers, chunks, failed items; and the guide that shows its files."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from weftline.engine.session import Session, load
from weftline.errors import PipelineError, StepError

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/own_nodes"
ARTICLE = "Threads meet. A loom is old. Threads part again! Is it late?"


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with load(FOLDER / "pipeline.yaml").open() as session:
        yield session


def test_the_pipeline_extracts_the_sentences_of_the_keyword(session: Session) -> None:
    result = session.run(article=ARTICLE)
    assert result["words"] == ["threads"]
    assert result["extract"] == "Threads meet. Threads part again!"


def test_sentences_arrive_one_by_one(session: Session) -> None:
    pieces = [one.value for one in session.stream(article=ARTICLE) if one.output == "extract" and not one.last]
    assert pieces == ["Threads meet.", " Threads part again!"]


def test_a_text_without_keywords_fails_alone(session: Session) -> None:
    with pytest.raises(StepError, match="no word of 4 or more characters"):
        session.run(article="I am it.")
    assert session.run(article=ARTICLE)["words"] == ["threads"]


def test_a_wrong_option_is_found_by_check(tmp_path: Path) -> None:
    for name in ("keywords.py", "extracts.py"):
        (tmp_path / name).write_text((FOLDER / name).read_text("utf-8"), "utf-8")
    text = (FOLDER / "pipeline.yaml").read_text("utf-8").replace("words_max: 1", "words_max: 0")
    (tmp_path / "pipeline.yaml").write_text(text, "utf-8")
    with pytest.raises(PipelineError, match=r"steps\.keywords\.words_max: 0"):
        load(tmp_path / "pipeline.yaml")


@pytest.mark.slow
def test_the_script_prints_what_the_readme_shows() -> None:
    readme = (ROOT / "examples/README.md").read_text("utf-8")
    shown = re.search(r"^\$ python examples/own_nodes/run\.py\n(.*?)^```", readme, re.M | re.S)
    assert shown
    ended = subprocess.run(
        [sys.executable, FOLDER / "run.py"], cwd=ROOT, capture_output=True, text=True, timeout=100, check=True
    )
    assert ended.stdout == shown[1]


@pytest.mark.parametrize("name", ["keywords.py", "extracts.py", "pipeline.yaml"])
def test_the_guide_shows_the_files_of_the_example(name: str) -> None:
    guide = (ROOT / "docs/guides/nodes.md").read_text("utf-8")
    assert f"# {name}\n{(FOLDER / name).read_text('utf-8')}```" in guide
