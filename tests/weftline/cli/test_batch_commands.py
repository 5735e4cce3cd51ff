"""From the words of `weftline batch` to a job: what each option means, and every mistake at once."""

from dataclasses import MISSING, fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weftline.cli.batch_commands import BatchOptions, BatchRequest, RayTarget, ServerTarget, parse, report_place
from weftline.cli.main import command
from weftline.cli.remote import Remote
from weftline.engine.jobs.spec import DataSpec, ErrorsMax, JobSpec, OutSpec

LEAST = BatchOptions(file="p.yaml", data=("rows.jsonl",), out="results")


def meant(**typed: object) -> BatchRequest:
    request, mistakes = parse(replace(LEAST, **typed))
    assert request is not None and not mistakes
    return request


def wrong(**typed: object) -> list[str]:
    request, mistakes = parse(replace(LEAST, **typed))
    assert request is None
    return list(mistakes)


def test_what_is_left_out_has_the_defaults_of_a_job() -> None:
    spec = JobSpec(Path("p.yaml"), DataSpec(("rows.jsonl",)), OutSpec("results"))
    assert meant() == BatchRequest(spec, None, "results/_report.html")


def test_every_option_reaches_the_job() -> None:
    request = meant(
        data=("a.csv", "b.csv"), format="csv", maps=("question=text", "photo=a=b"), id="key", where=("n > 1", "m"),
        limit=9, shuffle=0, shard="2/8", split="train", storage=("anon=true",), out_format="jsonl",
        outputs=("answer",), keep=("key", "text"), media="inline", part_rows=50, block_rows=5, errors_max="7",
        restart=True, seed=3, dry_run=True, quiet=True,
    )  # fmt: skip
    anon = {"anon": "true"}
    data = DataSpec(
        ("a.csv", "b.csv"), "csv", {"question": "text", "photo": "a=b"}, "key", ("n > 1", "m"), 0, (2, 8), 9, "train",
        anon,
    )  # fmt: skip
    out = OutSpec("results", "jsonl", ("answer",), ("key", "text"), "inline", 50, anon)
    assert request.spec == JobSpec(Path("p.yaml"), data, out, ErrorsMax(rows=7), True, False, 3, 5)
    assert (request.dry_run, request.quiet, request.as_json) == (True, True, False)
    assert meant(retry_errors=True, as_json=True).spec.retry_errors


@pytest.mark.parametrize(
    ("text", "means"),
    [("0", ErrorsMax(0)), ("100", ErrorsMax(100)), ("1%", ErrorsMax(share=0.01)), ("0.5%", ErrorsMax(share=0.005))],
)
def test_errors_max_is_a_number_of_rows_or_a_share(text: str, means: ErrorsMax) -> None:
    assert meant(errors_max=text).spec.errors_max == means


@pytest.mark.parametrize("text", ["", "%", "-1", "1.5", "101%", "nan%", "inf%", "-1%", "one"])
def test_other_words_for_errors_max_are_refused(text: str) -> None:
    (said,) = wrong(errors_max=text)
    assert "expected a number of rows such as 100, or a share such as 1%" in said


@given(st.integers(1, 50), st.integers(1, 50))
def test_a_shard_is_one_of_so_many(place: int, count: int) -> None:
    request, mistakes = parse(replace(LEAST, shard=f"{place}/{count}"))
    if place <= count:
        assert request is not None and request.spec.data.shard == (place, count)
    else:
        assert mistakes == [f"--shard {place}/{count}: expected I/N with I from 1 to N, such as 2/8"]


@pytest.mark.parametrize("text", ["", "1", "/", "0/2", "1/0", "-1/2", "1/2/3", "a/b", "1 /2"])
def test_anything_else_is_no_shard(text: str) -> None:
    assert len(wrong(shard=text)) == 1


def test_keep_none_and_all_are_words() -> None:
    assert meant(keep=("none",)).spec.out.keep == ()
    assert meant(keep=("all",)).spec.out.keep is None
    assert wrong(keep=("none", "key")) == ["--keep: none and all stand alone"]


def test_all_mistakes_come_at_once() -> None:
    said = wrong(
        data=("-", "-"), out=None, extra=("b.parquet",), shard="3/2", maps=("x", "y=1", "y=2"), errors_max="few",
        storage=("k",), restart=True, retry_errors=True, report="r.parquet", no_report=True, as_json=True,
        dry_run=True, via="h:1", engine="ray", keep=("all", "x"),
    )  # fmt: skip
    heads = [line.split(":")[0].split(" ")[0] for line in said]
    assert heads == [
        "--data", "--out", "b.parquet", "--report", "--restart", "--report", "--json", "--via", "--keep", "--map",
        "--map", "--storage", "--shard", "--errors-max",
    ]  # fmt: skip
    assert "--map y: given twice" in said
    assert any("'rows/*'" in line for line in said)  # a glob that the shell took apart


def test_data_and_out_are_needed() -> None:
    assert [line.split(":")[0] for line in wrong(data=(), out=None)] == ["--data", "--out"]


def test_options_of_a_server_need_one() -> None:
    said = wrong(
        model="m", token_file=Path("t"), tls=True, ca=Path("c"), tls_cert=Path("c"), tls_key=Path("k"), insecure=True
    )
    assert said == [
        f"{name} needs --via HOST:PORT"
        for name in ("--model", "--token-file", "--tls", "--ca", "--tls-cert", "--tls-key", "--insecure")
    ]
    remote = Remote("h:1", Path("t"), True, Path("c"))
    assert meant(via="h:1", model="m", token_file=Path("t"), tls=True, ca=Path("c")).where == ServerTarget(remote, "m")


def test_options_of_a_cluster_need_one() -> None:
    said = wrong(replicas=2, gpus_per_replica=0.5, address="auto")
    assert said == [f"{name} needs --engine ray" for name in ("--replicas", "--gpus-per-replica", "--address")]
    assert meant(engine="ray").where == RayTarget()
    assert meant(engine="ray", replicas=2, gpus_per_replica=0.5, address="auto").where == RayTarget(2, 0.5, "auto")


def test_a_report_lies_with_the_results_unless_it_is_named_or_not_wanted() -> None:
    assert report_place("s3://bucket/answers/") == "s3://bucket/answers/_report.html"
    assert report_place("out.parquet") == "out.parquet.report.html"
    assert meant(report="mine.html").report == "mine.html"
    assert meant(no_report=True).report is None
    assert wrong(report="mine.parquet") == ["--report mine.parquet: expected a name that ends in .html"]


def test_storage_options_are_in_no_representation() -> None:
    request = meant(storage=("secret=hush",))
    assert request.spec.data.storage == {"secret": "hush"}
    assert "hush" not in repr(request) + repr(replace(LEAST, storage=("secret=hush",)))


def test_the_command_has_one_parameter_per_field_with_equal_defaults() -> None:
    parameters = {one.name: one for one in command("batch").params if one.name != "help"}
    declared = {one.name: one.default for one in fields(BatchOptions) if one.name != "extra"}
    assert set(parameters) == set(declared)
    assert [name for name, one in parameters.items() if one.required] == ["file"] and declared["file"] is MISSING
    for name, default in declared.items():
        if name != "file":
            assert parameters[name].default == (None if default == () else default), name
