"""Command `weftline run`: one options."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO

from msgspec import Meta

from weftline.cli.command import unexpected
from weftline.cli.inputs import STDIN, read_inputs
from weftline.cli.options import Outputs, PipelineFile, Quiet, Verbose
from weftline.cli.progress import loading_shown
from weftline.cli.save import element_name, make_folder, save_outputs
from weftline.cli.show import as_json, as_text, printable
from weftline.engine.flags import Flag
from weftline.engine.request import RequestOptions
from weftline.engine.result import Result
from weftline.engine.scheduler.request import StepTiming
from weftline.engine.session import Session, load
from weftline.errors import InputError
from weftline.nodes.ports import PortType
from weftline.pipelines.placement.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of `weftline run`. extra: arguments beyond FILE."""

    file: PipelineFile
    extra: tuple[str, ...] = ()
    inputs: Annotated[tuple[str, ...], Flag("--input", "NAME=VALUE", short="-i")] = ()
    """One input: NAME=@FILE reads a file, NAME=@- standard input; anything else is the value itself, read as json where
    the input is json or a tensor. Double the leading @ of a text: @@. Repeat it for each element of a list."""

    outputs: Outputs = ()
    as_json: Annotated[bool, Flag("--json")] = False
    """Print one json object, outputs by name."""

    stream: Annotated[bool, Flag("--stream")] = False
    """Print outputs in chunks, as they arrive."""

    deadline_ms: Annotated[float | None, Meta(ge=0.0), Flag("--deadline-ms")] = None
    """Fail when the answer takes longer, in milliseconds."""

    save: Annotated[Path | None, Flag("--save", "DIR")] = None
    """Write pictures, sound, tensors and bytes to this folder, detections as pictures."""

    debug: Annotated[str, Flag("--debug", "STEP")] = ""
    """Run this step in the command's own process, without time limits, so that breakpoint() in its code uses this
    terminal."""

    quiet: Quiet = False
    verbose: Verbose = False

    def mistakes(self) -> Iterator[str]:
        """Yield unexpected arguments, and options that exclude each other."""
        yield from unexpected(self.extra, "pass inputs with -i: -i NAME=VALUE")
        if self.as_json and self.stream:
            yield "--json and --stream exclude each other: --json prints one object at the end"

    @property
    def request(self) -> RequestOptions:
        """Options of the options."""
        return RequestOptions(outputs=self.outputs or None, deadline_ms=self.deadline_ms)


def run(options: RunOptions) -> None:
    """Load a pipeline's models, run one request, and close everything.

    Outputs go to standard output, progress and the table of times to standard error.

    \b
    Examples:
      weftline run assistant.yaml --input question=@question.wav --input photo=@photo.png
      weftline run classify.yaml -i text="call me at 555 0100" --output verdict --json
      cat photo.png | weftline run detect.yaml -i photo=@- --save out
      weftline run classify.yaml -i text="call me" --debug verdict
    """
    run_request(options, sys.stdout, sys.stderr)


def run_request(options: RunOptions, out: TextIO, err: TextIO) -> None:
    """Print the outputs on `out`; progress, the names of saved files and the table of times go to `err`.

    Mistakes that need no model are refused before one is loaded. All processes have ended when this returns or raises.
    """
    pipeline = load(options.file)
    check_outputs(pipeline.plan, options.outputs)
    if options.debug:
        pipeline = pipeline.to_debug(options.debug)
        if any(one.partition("=")[2] == STDIN for one in options.inputs):
            raise InputError("--debug: the debugger uses standard input; read the input from a file, NAME=@FILE")
    inputs = read_inputs(pipeline.plan, options.inputs, sys.stdin.buffer)
    if options.save is not None:
        make_folder(options.save)
    with loading_shown(err, options.quiet, plain=bool(options.debug)) as progress:
        session = pipeline.open(progress)
    with session:
        if options.stream:
            _stream(session, options, inputs, out, err)
        else:
            _answer(session, options, inputs, out, err)


def check_outputs(plan: Plan, wanted: Sequence[str] | None) -> None:
    """Refuse outputs that the pipeline does not have."""
    known = [output.name for output in plan.outputs]
    for name in wanted or ():
        if name not in known:
            raise InputError(f"--output {name:.80}: the pipeline has no such output; it has {', '.join(known)}")


def _answer(session: Session, options: RunOptions, inputs: Mapping[str, Any], out: TextIO, err: TextIO) -> None:
    result = session.run(options.request, **inputs)
    saved = _save(session.plan, options, inputs, result, err)
    types = {output.name: output.type for output in session.plan.outputs if output.name in result}
    if options.as_json:
        answer = {name: _json(name, result[name], type, saved) for name, type in types.items()}
        print(json.dumps(answer, ensure_ascii=False), file=out, flush=True)
        return
    for name, type in types.items():
        print(as_text(name, result[name], type), file=out)
    out.flush()
    if not options.quiet:
        _print_timings(result, err)


def _json(name: str, value: Any, type: PortType, saved: Mapping[str, Path]) -> Any:
    """Return an output as json; an array or bytes that were saved, as the name of their file."""
    if type.item is not None and isinstance(value, list):
        return [_json(element_name(name, place), one, type.item, saved) for place, one in enumerate(value)]
    if name not in saved or type.kind == "detections":
        return as_json(name, value, type)
    if type.kind == "bytes":
        return {"size_bytes": len(value), "file": str(saved[name])}
    return {"dtype": str(value.dtype), "shape": list(value.shape), "file": str(saved[name])}


def _stream(session: Session, options: RunOptions, inputs: Mapping[str, Any], out: TextIO, err: TextIO) -> None:
    """Print chunks as they arrive: text follows its output's name, other values are printed when complete."""
    types = {output.name: output.type for output in session.plan.outputs}
    whole: dict[str, Any] = {}
    grown: dict[str, list[str]] = {}
    growing = ""
    for piece in session.stream(options.request, **inputs):
        if piece.last:
            whole[piece.output] = piece.value
        if not piece.last and isinstance(piece.value, str):
            start = "" if growing == piece.output else ("\n" if growing else "") + f"{piece.output}: "
            grown.setdefault(piece.output, []).append(piece.value)
            growing = piece.output
            print(start + printable(piece.value), end="", file=out, flush=True)
        elif "".join(grown.get(piece.output, [])) != piece.value or not grown.get(piece.output):
            print(
                ("\n" if growing else "") + as_text(piece.output, piece.value, types[piece.output]),
                file=out,
                flush=True,
            )
            growing = ""
    if growing:
        print(file=out, flush=True)
    _save(session.plan, options, inputs, whole, err)


def _save(
    plan: Plan, options: RunOptions, inputs: Mapping[str, Any], outputs: Mapping[str, Any], err: TextIO
) -> dict[str, Path]:
    saved = save_outputs(plan, inputs, outputs, options.save) if options.save is not None else {}
    for path in saved.values():
        print(f"wrote {path}", file=err)
    return saved


def _print_timings(result: Result, err: TextIO) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=None)
    table.add_column("step")
    for heading in ("queued ms", "run ms", "batch"):
        table.add_column(heading, justify="right")
    for row in timing_rows(result.timings):
        table.add_row(*row)
    console = Console(file=err, highlight=False, markup=False)
    console.print()
    console.print(table)
    console.print(f"{result.total_ms:.1f} ms in all")


def timing_rows(timings: Sequence[StepTiming]) -> list[tuple[str, str, str, str]]:
    """Return the table's rows; the elements of a `map:` step share one, with their longest times."""
    together: dict[tuple[str, str, int], list[StepTiming]] = {}
    for place, timing in enumerate(timings):
        together.setdefault((timing.step, timing.outcome, -1 if timing.element >= 0 else place), []).append(timing)
    return [_row(same) for same in together.values()]


def _row(same: Sequence[StepTiming]) -> tuple[str, str, str, str]:
    first = same[0]
    name = f"{first.step} x {len(same)}" if first.element >= 0 else first.step
    if first.outcome == "skipped":
        return name, "", "", "skipped"
    queued_ms, run_ms, batch = (max(getattr(one, of) for one in same) for of in ("queued_ms", "run_ms", "batch"))
    return name, f"{queued_ms:.1f}", f"{run_ms:.1f}", f"{batch}" if first.outcome == "ok" else first.outcome
