"""Command `weftline batch`: options and help. `batch_options` validates, `cli_batch` runs."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class DataFormat(StrEnum):
    """How rows are stored."""

    parquet = "parquet"
    jsonl = "jsonl"
    csv = "csv"
    arrow = "arrow"
    files = "files"
    webdataset = "webdataset"
    hf = "hf"


class OutFormat(StrEnum):
    """How results are stored."""

    parquet = "parquet"
    jsonl = "jsonl"
    arrow = "arrow"
    hf = "hf"


class Media(StrEnum):
    """Where pictures and recordings among the results go."""

    files = "files"
    inline = "inline"


class Engine(StrEnum):
    """Where the pipeline runs."""

    local = "local"
    ray = "ray"


def add_to(app: typer.Typer) -> None:
    """Give a command line the command of this file."""
    app.command(short_help="Run a pipeline over a data set.", context_settings={"allow_extra_args": True})(batch)


def batch(
    context: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE", help="The pipeline's YAML file.")],
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="INPUT",
            help="Rows: a file, a folder, a glob in quotes, a URL, hf:NAME, or - for standard input; repeatable.",
        ),
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="OUTPUT", help="Where results go: a folder, or one file such as out.parquet.")
    ] = None,
    format: Annotated[DataFormat | None, typer.Option(help="What INPUT is, where its name does not tell.")] = None,
    maps: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="INPUT=COLUMN",
            help="The column a pipeline input is read from, where names differ; repeatable.",
        ),
    ] = None,
    id: Annotated[
        str | None, typer.Option("--id", metavar="COLUMN", help="The column with rows' ids; FILE#ROW by default.")
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COND", help="Only rows for which this holds, such as \"lang == 'en'\"; repeatable, all must hold."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many rows.")] = None,
    shuffle: Annotated[
        int | None, typer.Option(metavar="SEED", min=0, help="In another order, which this seed gives.")
    ] = None,
    shard: Annotated[str | None, typer.Option(metavar="I/N", help="Only the I-th of N shares.")] = None,
    split: Annotated[str | None, typer.Option(metavar="NAME", help="Of a Hugging Face data set.")] = None,
    storage: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="An option of the file system behind URLs, as fsspec has it; repeatable."
        ),
    ] = None,
    out_format: Annotated[
        OutFormat | None, typer.Option(help="What is written; by OUTPUT's name, else parquet.")
    ] = None,
    outputs: Annotated[
        list[str] | None,
        typer.Option("--output", "-o", metavar="NAME", help="Only this output, and the steps it needs; repeatable."),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN",
            help="Write this input column too; repeatable. none: no column; all, the default: all but media.",
        ),
    ] = None,
    media: Annotated[Media, typer.Option(help="Pictures and recordings beside the table, or in it.")] = Media.files,
    part_rows: Annotated[
        int | None, typer.Option(min=1, help="Rows that are committed together; as many as suit the pipeline.")
    ] = None,
    block_rows: Annotated[
        int | None, typer.Option(min=1, help="Rows that are answered together; as many as suit the pipeline.")
    ] = None,
    errors_max: Annotated[
        str | None, typer.Option(metavar="N|P%", help="Stop at more error rows than that, such as 100 or 1%.")
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Throw away what an earlier run left at OUTPUT, and begin anew.")
    ] = False,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Run the error rows of a finished job again, and nothing else.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="What rows' seeds are made from, where a step draws.")] = 0,
    via: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Ask this running server, and load no model here."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="What the server calls the pipeline; its own name by default.")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", metavar="FILE", help="A file that holds your token, and nothing else."),
    ] = None,
    tls: Annotated[bool, typer.Option("--tls", help="Connect with TLS, trusting whom this machine trusts.")] = False,
    ca: Annotated[Path | None, typer.Option(metavar="PEM", help="Connect with TLS, trusting this authority.")] = None,
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", metavar="PEM", help="Your certificate, where one is asked for.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", metavar="PEM", help="Its private key.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Send the token to another machine without TLS.")
    ] = False,
    engine: Annotated[Engine, typer.Option(help="In this machine's processes, or on a Ray cluster.")] = Engine.local,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="On Ray: how many copies of the whole pipeline; 1 by default.")
    ] = None,
    gpus_per_replica: Annotated[float | None, typer.Option(min=0.0, help="On Ray: GPUs of each; 0 by default.")] = None,
    address: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="On Ray: the cluster's; one is started here by default.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show plan, columns and three answered rows; write nothing.")
    ] = False,
    report: Annotated[
        str | None, typer.Option(metavar="FILE.html", help="Where the report goes; OUTPUT/_report.html by default.")
    ] = None,
    no_report: Annotated[bool, typer.Option("--no-report", help="Write no report.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="The job's figures as one json object on standard output.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Neither progress nor a summary; only errors.")] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Show INFO records of steps, and tracebacks of unexpected errors."),
    ] = False,
) -> None:
    """Answer every row of a data set with a pipeline. The same command again goes on where an earlier run was ended.

    Results are committed in parts, every row exactly once; rows that fail are kept aside with their reasons. Ctrl-C
    ends it (parts that are complete are committed), a second one at once. On standard output stands where the results
    are. The exit code is 0 when every row was answered, and 5 when the job finished with error rows.

    \b
    Examples:
      weftline batch assistant.yaml --data questions.jsonl --out answers --dry-run
      weftline batch assistant.yaml --data 'rows/*.parquet' --map question=text --id key --out answers.parquet
      weftline batch detect.yaml --data photos/ --out found --errors-max 1% --keep none
      weftline batch assistant.yaml --data s3://bucket/rows/ --shard 2/8 --out s3://bucket/answers-2
      weftline batch assistant.yaml --data questions.jsonl --out answers --via localhost:8001
    """
    from weftline.cli.batch import run_batch
    from weftline.cli.batch_options import Typed, understood

    typed = Typed(
        file=file,
        extra=tuple(context.args),
        data=tuple(data or ()),
        out=out,
        format=format,
        maps=tuple(maps or ()),
        id=id,
        where=tuple(where or ()),
        limit=limit,
        shuffle=shuffle,
        shard=shard,
        split=split,
        storage=tuple(storage or ()),
        out_format=out_format,
        outputs=tuple(outputs or ()),
        keep=tuple(keep or ()),
        media=media,
        part_rows=part_rows,
        block_rows=block_rows,
        errors_max=errors_max,
        restart=restart,
        retry_errors=retry_errors,
        seed=seed,
        via=via,
        model=model,
        token_file=token_file,
        tls=tls,
        ca=ca,
        tls_cert=tls_cert,
        tls_key=tls_key,
        insecure=insecure,
        engine=engine,
        replicas=replicas,
        gpus_per_replica=gpus_per_replica,
        address=address,
        dry_run=dry_run,
        report=report,
        no_report=no_report,
        as_json=as_json,
        quiet=quiet,
    )
    request, mistakes = understood(typed)
    if request is None:
        raise typer.BadParameter("\n  ".join(mistakes))
    if code := run_batch(request, sys.stdout, sys.stderr):
        raise typer.Exit(code)
