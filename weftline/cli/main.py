"""Command line: all `weftline` commands with their options and help.

The implementation of a command is imported when it runs, so that `--help` and
shell completion answer at once and `check` works where no framework is installed. Answers go to standard output,
everything else to standard error.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from weftline import errors
from weftline.cli import batch_commands, profile_commands, remote_commands, serve_commands
from weftline.cli.exit import ending, exit_codes, open_closed_streams


def _epilog() -> str:
    return "\b\nExit codes:\n" + "\n".join(f"  {code:>3}  {meaning}" for code, meaning in exit_codes().items())


app = typer.Typer(
    name="weftline",
    help="Check, explain, run, measure and serve pipelines of models.",
    epilog=_epilog(),
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)

PipelineFile = Annotated[str, typer.Argument(metavar="FILE", help="The pipeline's YAML file.")]
Gpus = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        metavar="N[:MEMORY[:MODEL]]",
        help="Plan for this machine with other GPUs, such as 2:141GiB or 2:141GiB:H200; 0 for none.",
    ),
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Show INFO records of steps, and tracebacks of unexpected errors."),
]

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Neither progress nor tables of times; only errors.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        import weftline

        typer.echo(f"weftline {weftline.__version__}")
        raise typer.Exit


@app.callback()
def _front(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Check, explain, run, measure and serve pipelines of models."""


@app.command(short_help="List every problem of pipeline files.")
def check(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="One or more pipeline files.")],
    file_only: Annotated[bool, typer.Option("--file-only", help="Leave out whether it fits this machine.")] = False,
    gpus: Gpus = None,
) -> None:
    """List every problem of pipeline files; nothing is started and no framework is imported.

    \b
    Examples:
      weftline check pipeline.yaml
      weftline check --file-only pipelines/*.yaml
      weftline check --gpus 2:141GiB pipeline.yaml
    """
    if file_only and gpus is not None:
        raise typer.BadParameter("--file-only and --gpus exclude each other")
    from weftline.cli.pipeline import check_file

    wrong = 0
    for file in files:
        try:
            typer.echo(check_file(file, file_only=file_only, gpus=gpus))
        except errors.PipelineError as error:
            typer.echo(str(error), err=True)
            wrong += 1
    if wrong:
        raise typer.Exit(errors.PipelineError.exit_code)


@app.command(short_help="Show what would run, and where.")
def plan(
    file: PipelineFile,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="As a Mermaid flowchart.")] = False,
    svg: Annotated[bool, typer.Option("--svg", help="As a picture, in SVG.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="OUT", help="Write it to this file.")] = None,
    cores: Annotated[int | None, typer.Option(min=1, help="Plan for a machine with so many cores.")] = None,
    gpus: Gpus = None,
) -> None:
    """Show what would run: steps in order with their types, workers, threads and memory.

    \b
    Examples:
      weftline plan pipeline.yaml
      weftline plan pipeline.yaml --svg --output pipeline.svg
      weftline plan pipeline.yaml --gpus 2:141GiB
    """
    if mermaid and svg:
        raise typer.BadParameter("--mermaid and --svg exclude each other")
    from weftline.cli.pipeline import explained

    _give(explained(file, "mermaid" if mermaid else "svg" if svg else "text", cores, gpus), output)


@app.command(short_help="Answer one request with a pipeline.")
def run(
    file: PipelineFile,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            "-i",
            metavar="NAME=VALUE",
            help="One input: NAME=@FILE reads a file, NAME=@- standard input; anything else is the value itself, read "
            "as json where the input is json or a tensor. A text that begins with @ is written with two.",
        ),
    ] = None,
    outputs: Annotated[
        list[str] | None,
        typer.Option("--output", "-o", metavar="NAME", help="Only this output, and the steps it needs; repeatable."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One json object on standard output, outputs by name.")
    ] = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print outputs piece by piece, as they become known.")
    ] = False,
    deadline_ms: Annotated[
        float | None, typer.Option(min=0.0, help="Give up when the answer takes longer, in milliseconds.")
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write pictures, sound, tensors, bytes and annotated pictures here."),
    ] = None,
    debug: Annotated[
        str,
        typer.Option(
            metavar="STEP",
            help="Run this step in the command's own process, so that breakpoint() in its code has this terminal; "
            "without time limits.",
        ),
    ] = "",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Load a pipeline's models, answer one request, and close everything.

    Outputs go to standard output, progress and the table of times to standard error.

    \b
    Examples:
      weftline run assistant.yaml --input question=@question.wav --input photo=@photo.png
      weftline run classify.yaml -i text="call me at 555 0100" --output verdict --json
      cat photo.png | weftline run detect.yaml -i photo=@- --save out
      weftline run classify.yaml -i text="call me" --debug verdict
    """
    if as_json and stream:
        raise typer.BadParameter("--json and --stream exclude each other: --json prints one object at the end")
    from weftline.cli.run import Request, run_request

    wanted = tuple(outputs or ()) or None
    request = Request(file, tuple(inputs or ()), wanted, as_json, stream, deadline_ms, save, quiet, debug)
    run_request(request, sys.stdout, sys.stderr)


@app.command(short_help="Talk to a pipeline's language model.")
def chat(
    file: PipelineFile,
    step: Annotated[str, typer.Option(metavar="NAME", help="Which llm step, when there are several.")] = "",
    once: Annotated[
        str | None, typer.Option(metavar="QUESTION", help="Answer this one and end; nothing is read from a terminal.")
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Said to the model first, instead of what the step says.")
    ] = None,
    sampling: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a sampling option, such as temperature=0.7; repeatable."
        ),
    ] = None,
    load: Annotated[
        Path | None, typer.Option(metavar="SAVED", help="Go on with a conversation that was saved.")
    ] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Talk to the llm step of a pipeline, alone: answers stream, and each question finds its conversation in the cache.

    Other steps are left out, so nothing but text is needed. Type /help for commands. Piped, each line is a question.

    \b
    Examples:
      weftline chat assistant.yaml
      weftline chat assistant.yaml --step answer --system "Answer in one sentence." --set temperature=0.7
      weftline chat assistant.yaml --once "What can you do?"
      weftline chat assistant.yaml < questions.txt > answers.txt
    """
    from weftline.cli.chat import ChatRequest, run_chat

    asked = ChatRequest(file, step, once, system, tuple(sampling or ()), load, quiet)
    if code := run_chat(asked, sys.stdin, sys.stdout, sys.stderr):
        raise typer.Exit(code)


@app.command(short_help="Measure a pipeline under load.")
def bench(
    file: PipelineFile,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input", "-i", metavar="NAME=VALUE", help="One input of every request, as for run; others are made up."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="ROWS", help="A JSONL file, one request's inputs a line by name; taken in turn."),
    ] = None,
    outputs: Annotated[
        list[str] | None,
        typer.Option("--output", "-o", metavar="NAME", help="Only this output, and the steps it needs; repeatable."),
    ] = None,
    closed: Annotated[
        int | None, typer.Option(min=1, max=1024, help="So many callers, each waiting for its answer; 8 by default.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Arrivals a second, whatever becomes of them, instead of callers.")
    ] = None,
    bursty: Annotated[bool, typer.Option("--bursty", help="With --rate: in bursts of four times the rate.")] = False,
    duration_s: Annotated[float, typer.Option(min=0.1, max=86_400.0, help="How long to measure, in seconds.")] = 10.0,
    warm_up_s: Annotated[float, typer.Option(min=0.0, max=3600.0, help="How long to load it before that.")] = 1.0,
    requests: Annotated[
        int | None, typer.Option(min=1, max=200_000, help="Measure so many requests at most; 200,000 by default.")
    ] = None,
    deadline_ms: Annotated[
        float | None, typer.Option(min=0.0, help="Deadline of every request, in milliseconds.")
    ] = None,
    priority: Annotated[int, typer.Option(min=-100, max=100, help="Priority of every request.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="For arrivals and for inputs that are made up.")] = 0,
    trace: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Write a trace that opens at ui.perfetto.dev.")
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="OUT", help="Write all figures as json.")] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Load a pipeline with requests for a while and say what it did: latency, steps, batches, where the time went.

    \b
    Examples:
      weftline bench pipeline.yaml --closed 16
      weftline bench pipeline.yaml --rate 200 --bursty --deadline-ms 50 --trace out.json
      weftline bench pipeline.yaml --data rows.jsonl --input photo=@photo.png --requests 500
    """
    if closed is not None and rate is not None:
        raise typer.BadParameter("--closed and --rate exclude each other: callers wait for answers, arrivals do not")
    if bursty and rate is None:
        raise typer.BadParameter("--bursty needs --rate, the mean rate of arrivals")
    from weftline.cli.bench import Bench, run_bench
    from weftline.engine.bench.arrivals import Closed, Open

    asked = Bench(
        file,
        Closed(closed or 8) if rate is None else Open(rate, bursty, seed),
        tuple(inputs or ()),
        data,
        tuple(outputs or ()) or None,
        duration_s,
        warm_up_s,
        requests or 200_000,
        deadline_ms,
        priority,
        seed,
        trace,
        json,
        quiet,
    )
    run_bench(asked, sys.stdout, sys.stderr)


@app.command(short_help="List nodes, or show one.")
def nodes(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A node, to see its ports and options.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="As json.")] = False,
) -> None:
    """List the nodes that steps can run, or show one with its ports and options.

    \b
    Examples:
      weftline nodes
      weftline nodes onnx
      weftline nodes my_nodes.py:Crop --json
    """
    from weftline.cli.nodes import describe_node, list_nodes

    typer.echo(describe_node(name, as_json) if name else list_nodes(as_json))


@app.command(short_help="Print the JSON Schema of pipeline files.")
def schema(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write it to this file.")
    ] = None,
) -> None:
    """Print the JSON Schema of pipeline files, with which editors complete and check them.

    \b
    Examples:
      weftline schema --output pipeline.schema.json
      # then, as the first line of a pipeline file:
      # yaml-language-server: $schema=pipeline.schema.json
    """
    import json

    from weftline.pipelines.spec.json_schema import json_schema

    _give(json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n", output)


profile_commands.add_to(app)
batch_commands.add_to(app)
serve_commands.add_to(app)
remote_commands.add_to(app)


def _give(text: str, output: Path | None) -> None:
    """Print `text`, or write it to a file and say so."""
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, "utf-8")
    except OSError as error:
        raise errors.WeftlineError(f"cannot write {output}: {error.strerror}") from None
    typer.echo(f"wrote {output}", err=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; no error leaves it, and users see no traceback."""
    open_closed_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    verbose = not {"--verbose", "-v"}.isdisjoint(given)
    if verbose:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    return ending(lambda: _dispatch(given), verbose=verbose)


def _dispatch(arguments: list[str]) -> int:
    """Return the exit code of the command; usage errors are told here already."""
    try:
        typer.main.get_command(app)(args=arguments, prog_name="weftline")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return 0
