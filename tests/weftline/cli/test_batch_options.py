"""From the words of `weftline batch` to a job: what each option means, and every mistake at once."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftline.cli.batch_options import BatchOptions, Via
from weftline.cli.command import from_given
from weftline.cli.remote import Cluster
from weftline.engine.jobs.spec import DataSpec, ErrorsMax, JobSpec, OutSpec

LEAST = {"file": Path("p.yaml"), "data": ["rows.jsonl"], "out": "results"}


def meant(**typed: Any) -> BatchOptions:
    options, mistakes = from_given(BatchOptions, {**LEAST, **typed})
    assert not mistakes
    return options


def wrong(**typed: Any) -> list[str]:
    return from_given(BatchOptions, {**LEAST, **typed})[1]


def test_what_is_left_out_has_the_defaults_of_a_job() -> None:
    job = JobSpec(Path("p.yaml"), DataSpec(("rows.jsonl",)), OutSpec("results"))
    assert meant() == BatchOptions(job=job)
    assert meant().report_place == "results/_report.html"


def test_every_option_reaches_the_job() -> None:
    options = meant(
        data=["a.csv", "b.csv"], format="csv", map=["question=text", "photo=a=b"], id="key", where=["n > 1", "m"],
        limit=9, shuffle=0, shard="2/8", split="train", storage=["anon=true"], out_format="jsonl",
        output=["answer"], keep=["key", "text"], media="inline", part_rows=50, block_rows=5, errors_max="7",
        restart=True, seed=3, dry_run=True, quiet=True,
    )  # fmt: skip
    anon = {"anon": "true"}
    data = DataSpec(
        ("a.csv", "b.csv"), "csv", {"question": "text", "photo": "a=b"}, "key", ("n > 1", "m"), 0, (2, 8), 9, "train",
        anon,
    )  # fmt: skip
    out = OutSpec("results", "jsonl", ("answer",), ("key", "text"), "inline", 50, anon)
    assert options.job == JobSpec(Path("p.yaml"), data, out, ErrorsMax(rows=7), True, False, 3, 5)
    assert (options.dry_run, options.quiet, options.as_json) == (True, True, False)
    assert meant(retry_errors=True, json=True).job.retry_errors


@pytest.mark.parametrize(
    ("text", "means"),
    [("0", ErrorsMax(0)), ("100", ErrorsMax(100)), ("1%", ErrorsMax(share=0.01)), ("0.5%", ErrorsMax(share=0.005))],
)
def test_errors_max_is_a_number_of_rows_or_a_share(text: str, means: ErrorsMax) -> None:
    assert meant(errors_max=text).job.errors_max == means


@pytest.mark.parametrize("text", ["", "%", "-1", "1.5", "101%", "nan%", "inf%", "-1%", "one"])
def test_other_words_for_errors_max_are_refused(text: str) -> None:
    (said,) = wrong(errors_max=text)
    assert "expected a number of rows such as 100, or a share such as 1%" in said


@given(st.integers(1, 50), st.integers(1, 50))
def test_a_shard_is_one_of_so_many(place: int, count: int) -> None:
    if place <= count:
        assert meant(shard=f"{place}/{count}").job.data.shard == (place, count)
    else:
        assert wrong(shard=f"{place}/{count}") == [
            f"--shard {place}/{count}: expected I/N with I from 1 to N, such as 2/8"
        ]


@pytest.mark.parametrize("text", ["", "1", "/", "0/2", "1/0", "-1/2", "1/2/3", "a/b", "1 /2"])
def test_anything_else_is_no_shard(text: str) -> None:
    assert len(wrong(shard=text)) == 1


def test_keep_none_and_all_are_words() -> None:
    assert meant(keep=["none"]).job.out.keep == ()
    assert meant(keep=["all"]).job.out.keep is None
    assert wrong(keep=["none", "key"]) == ["--keep none, all: each stands alone"]


def test_all_mistakes_come_at_once() -> None:
    said = wrong(
        data=["-", "-"], out=None, extra=["b.parquet"], shard="3/2", map=["x", "y=1", "y=2"], errors_max="few",
        storage=["k"], restart=True, retry_errors=True, report="r.parquet", no_report=True, json=True,
        dry_run=True, via="h:1", engine="ray", keep=["all", "x"],
    )  # fmt: skip
    heads = [line.split(":")[0].split(" ")[0] for line in said]
    assert sorted(heads) == sorted([
        "--data", "--out", "b.parquet", "--report", "--restart", "--report", "--json", "--via", "--keep", "--map",
        "--map", "--storage", "--shard", "--errors-max",
    ])  # fmt: skip
    assert "--map y: given twice" in said
    assert any("'rows/*'" in line for line in said)  # a glob that the shell took apart


def test_data_and_out_are_needed() -> None:
    assert [line.split(":")[0] for line in wrong(data=None, out=None)] == ["--data", "--out"]


def test_options_of_a_server_need_one() -> None:
    said = wrong(
        model="m", token_file=Path("t"), tls=True, ca=Path("c"), tls_cert=Path("c"), tls_key=Path("k"), insecure=True
    )
    assert said == [
        f"{name} needs --via HOST:PORT"
        for name in ("--token-file", "--tls", "--ca", "--tls-cert", "--tls-key", "--insecure", "--model")
    ]
    server = Via("h:1", Path("t"), True, Path("c"), model="m")
    assert meant(via="h:1", model="m", token_file=Path("t"), tls=True, ca=Path("c")).server == server


def test_options_of_a_cluster_need_one() -> None:
    said = wrong(replicas=2, gpus_per_replica=0.5, address="auto")
    assert said == [f"{name} needs --engine ray" for name in ("--replicas", "--gpus-per-replica", "--address")]
    assert meant(engine="ray").cluster == Cluster("ray")
    cluster = meant(engine="ray", replicas=2, gpus_per_replica=0.5, address="auto").cluster
    assert cluster == Cluster("ray", 2, 0.5, "auto")


def test_a_report_lies_with_the_results_unless_it_is_named_or_not_wanted() -> None:
    assert meant(out="s3://bucket/answers/").report_place == "s3://bucket/answers/_report.html"
    assert meant(out="out.parquet").report_place == "out.parquet.report.html"
    assert meant(report="mine.html").report_place == "mine.html"
    assert meant(no_report=True).report_place is None
    assert wrong(report="mine.parquet") == ["--report mine.parquet: expected a name that ends in .html"]


def test_storage_options_are_in_no_representation() -> None:
    options = meant(storage=["secret=hush"])
    assert options.job.data.storage == options.job.out.storage == {"secret": "hush"}
    assert "hush" not in repr(options)
