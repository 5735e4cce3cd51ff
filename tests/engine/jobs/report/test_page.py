"""The report's page, read back with a parser."""

import base64
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from tests.engine.jobs.report.made import HOSTILE, job, samples, tally
from weftline.engine.jobs.progress import ErrorKind, JobResult, RatePoint, Sample, StepTally, Tally
from weftline.engine.jobs.report.page import report
from weftline.engine.jobs.report.samples import RowSampler
from weftline.nodes.detections import Detections

VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Every tag with its attributes, all text, and whether each tag is closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self._open = "", list[str]()
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def count(self, tag: str) -> int:
        return sum(one == tag for one, _ in self.tags)


def check_alone(text: str) -> Page:
    """Parse a page, and refuse everything in it that runs or that asks anybody for anything."""
    page = Page(text)
    for tag, attributes in page.tags:
        assert tag not in {"script", "iframe", "object", "embed", "link", "base", "form", "a"}, tag
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href", "xlink:href"):
            if name in attributes:
                assert (attributes[name] or "").startswith(("data:image/png;", "data:image/jpeg;", "#")), attributes[
                    name
                ]
    style = text[text.index("<style>") : text.index("</style>")]
    assert "@import" not in style and "url(" not in style
    assert set(re.findall(r"url\(([^)])", text)) <= {"#"}
    return page


@pytest.fixture(scope="module")
def ordinary() -> str:
    return report(job())


@pytest.mark.slow
def test_a_page_has_every_part_and_needs_nothing_else(ordinary: str) -> None:
    page = check_alone(ordinary)
    assert page.count("svg") == 5 and page.count("article") == 24
    assert "default-src 'none'" in ordinary
    for said in (
        "picture-questions", "finished, 10 rows with errors", "--retry-errors", "2\u202f000", "1m11s",
        "81\u202f234", "the prompt has N tokens", "train/00017", "Throughput", "Length of text outputs", "1059",
        "results.parquet",
        "the same bytes in every run", "numbers may differ by rounding", "0.1.0", "pictures/*.parquet", "see 1, an",
        "not usable: pictures/00003.png", "sound of 1.5 s", "red block 0.97", "empty in ",
    ):  # fmt: skip
        assert said in page.text, said


@pytest.mark.slow
def test_equal_jobs_have_equal_pages(ordinary: str) -> None:
    assert report(job()) == ordinary


def test_pictures_are_small_files_in_the_page(ordinary: str) -> None:
    page = Page(ordinary)
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) == 18 * 2 + 5
    for one in images:
        data = base64.b64decode((one["src"] or "").partition("base64,")[2], validate=True)
        assert data.startswith((b"\x89PNG", b"\xff\xd8"))
        assert int(one["width"] or 0) <= 240 and int(one["height"] or 0) <= 240


def empty(**changed: Any) -> JobResult:
    nothing: dict[str, Any] = {
        "data": (), "out": "", "files": {}, "rows": 0, "errors": 0, "elapsed_s": 0.0, "tally": Tally(), "figures": {},
        "instances": {}, "repeatable": {}, "rates": (), "samples": (), "kinds": (), "versions": {},
    }  # fmt: skip
    return job(**{**nothing, **changed})


def test_a_job_without_rows_has_a_page() -> None:
    page = check_alone(report(empty(finished=False, why="interrupted")))
    assert "stopped: interrupted" in page.text and "run the same command again" in page.text
    assert page.count("svg") == page.count("article") == 0


def test_a_job_of_one_row_has_a_page() -> None:
    end = empty(rows=1, elapsed_s=0.001, tally=tally(1), rates=[RatePoint(0.0, 1000.0)], samples=samples(1))
    assert check_alone(report(end)).count("svg") == 4


def test_a_step_that_never_ran_is_in_the_table() -> None:
    assert "never" in check_alone(report(empty(tally=Tally({"never": StepTally(skipped=9)})))).text


def hostile() -> JobResult:
    """Return a job whose every text is an attack."""
    odd = Detections(np.zeros((1, 4), np.float32), np.ones(1, np.float32), np.zeros(1, np.int32), (HOSTILE,))
    values = {
        HOSTILE: HOSTILE,
        "detections": odd,
        "json": {HOSTILE: [HOSTILE]},
        "bytes": HOSTILE.encode("utf-8", "replace"),
    }
    made = tally(10)
    made.steps[HOSTILE], made.lengths[HOSTILE] = made.steps["see"], {20: 4, -60: 1}
    return job(
        pipeline=HOSTILE, data=(HOSTILE, HOSTILE), out=HOSTILE, files={HOSTILE: HOSTILE}, finished=False, why=HOSTILE,
        tally=made, instances={HOSTILE: 2}, repeatable={HOSTILE: HOSTILE}, versions={HOSTILE: HOSTILE},
        samples=[Sample(HOSTILE, values, values, HOSTILE), Sample("", {}, {})],
        kinds=[ErrorKind(HOSTILE, HOSTILE, HOSTILE, 3, (HOSTILE, "")), ErrorKind("", "", "", 1, ())],
    )  # fmt: skip


@pytest.mark.slow
def test_hostile_texts_are_text() -> None:
    text = report(hostile())
    page = check_alone(text)
    text.encode()
    assert not set(text) & set("\x00\x1b\u202e\ud800")
    assert page.text.count("<script>alert(1)</script>") >= 12
    assert "\\u202eevil" in page.text, "what would turn the reading direction is written out"


@pytest.mark.slow
def test_a_page_is_bounded_whatever_the_job_was() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (300, 300, 3), np.uint8)
    long = {f"{n}": "<" * 10_000 for n in range(20)}
    rows = [Sample("i" * 10**5, {"a": noise, "b": noise, "c": noise, **long}, long, "e" * 10**5) for _ in range(24)]
    steps = {f"{n}" + "s" * 10**4: StepTally(5, 1, 1, 5.0, 5.0, {n: 1, n - 60: 3}) for n in range(1000)}
    kinds = [ErrorKind("&" * 10**4, "&" * 10**4, "&" * 10**5, 5, ["&" * 10**5] * 50) for _ in range(500)]
    many = {f"{n}" + "<" * 10**3: "<" * 10**4 for n in range(1000)}
    rates = [RatePoint(float(n), float(n % 7)) for n in range(50_000)]
    end = job(
        tally=Tally(steps, {name: {5: 1} for name in steps}), samples=rows, kinds=kinds, rates=rates, files=many,
        versions=many, repeatable=many, instances=dict.fromkeys(many, 3), why="<" * 10**6, finished=False,
        data=["<" * 10**5] * 99,
    )  # fmt: skip
    text = report(end)
    assert len(text.encode()) < 2_000_000
    assert "left out: the page would be too large" in check_alone(text).text


@pytest.mark.slow
def test_samples_may_be_small_already(ordinary: str) -> None:
    sampler = RowSampler()
    for place, row in enumerate(samples()):
        sampler.offer(place, lambda row=row: row, bool(row.error))  # type: ignore[misc]
    assert report(job(samples=sampler.samples())) == ordinary
