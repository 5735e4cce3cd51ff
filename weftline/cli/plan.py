"""Command `weftline plan`: the plan of a pipeline as text, flowchart or picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from weftline.cli.options import Gpus, NoImport, OutputFile, PipelineFiles, write_text
from weftline.engine.flags import Flag
from weftline.engine.machine import this_machine
from weftline.errors import InputError
from weftline.nodes.user_code import without_imports
from weftline.pipelines.placement.machine import Machine, made_up_gpus
from weftline.pipelines.placement.place import size_text
from weftline.pipelines.placement.profile_file import profile_beside
from weftline.pipelines.placement.sharing import plan_shared
from weftline.pipelines.spec.document import is_serve_file, read_file
from weftline.pipelines.spec.loader import load_file

if TYPE_CHECKING:
    from weftline.engine.serving.serve_file import Assembled


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of `weftline plan`."""

    files: PipelineFiles
    mermaid: Annotated[bool, Flag("--mermaid")] = False
    """Print a Mermaid flowchart."""

    svg: Annotated[bool, Flag("--svg")] = False
    """Print an SVG picture."""

    output: OutputFile = None
    cores: Annotated[int | None, Meta(ge=1), Flag("--cores")] = None
    """Plan for a machine with this number of cores."""

    gpus: Gpus = None
    no_import: NoImport = False

    def mistakes(self) -> Iterator[str]:
        """Yield options that exclude each other."""
        if self.mermaid and self.svg:
            yield "--mermaid and --svg exclude each other"
        if len(self.files) > 1 and (self.mermaid or self.svg):
            yield "--mermaid and --svg show one pipeline"


def plan(options: PlanOptions) -> None:
    """Show what would run: steps in order with their types, workers, threads and memory.

    Of several files, or of a serve file, what they load together when they are served, and which steps share it.

    Python files with nodes of the pipeline's own are imported, which runs them: plan a stranger's pipeline with
    --no-import.

    \b
    Examples:
      weftline plan pipeline.yaml
      weftline plan pipeline.yaml --svg --output pipeline.svg
      weftline plan pipeline.yaml --gpus 2:141GiB
      weftline plan serve.yaml
    """
    form = "mermaid" if options.mermaid else "svg" if options.svg else "text"
    with without_imports() if options.no_import else nullcontext():
        one = options.files[0] if len(options.files) == 1 else None
        if one is not None and not is_serve_file(read_file(one)):
            text = explained(one, form, options.cores, options.gpus)
        elif form != "text":
            raise InputError(f"--{form} shows one pipeline; leave it out, or name one of the pipelines")
        else:
            text = explained_together(options.files, options.cores, options.gpus)
    write_text(text, options.output)


def explained(file: str, form: str, cores: int | None, gpus: str | None = None) -> str:
    """Return the plan of a pipeline file as `text`, `mermaid` or `svg`; hypothetical GPUs are named first."""
    machine, pipeline = machine_of(cores, gpus), load_file(file)
    name, profile = pipeline.name, profile_beside(pipeline)
    shared = plan_shared({name: pipeline}, machine, profiles={name: profile})
    made = shared.programs[name].plan
    hypothetical = f"Planned for a hypothetical machine: {_described(machine)}" if gpus is not None else ""
    if form == "svg":
        from weftline.pipelines.render.svg import explain_svg

        text = explain_svg(dataclasses.replace(made, name=f"{made.name} ({hypothetical})") if hypothetical else made)
    else:
        from weftline.pipelines.render.text import explain_mermaid, explain_text, users

        text = explain_mermaid(made) if form == "mermaid" else explain_text(made)
        together = [used for used in users(shared) if len(used) > 1]
        if together and form == "text":
            names = "; ".join(", ".join(one.partition(": ")[2] for one in used) for used in together)
            text += f"Steps that share what is loaded: {names}\n"
        if hypothetical:
            text = f"%% {hypothetical}\n{text}" if form == "mermaid" else f"{hypothetical}\n\n{text}"
    return text if text.endswith("\n") else text + "\n"


def explained_together(files: Sequence[str], cores: int | None, gpus: str | None = None) -> str:
    """Return what files load together when they are served; PipelineError lists every problem."""
    from weftline.pipelines.render.text import explain_shared

    return "\n".join(explain_shared(one) for one in assembled(files, cores, gpus).plans)


def assembled(files: Sequence[str], cores: int | None, gpus: str | None) -> Assembled:
    """Return what `weftline serve` would load of files; PipelineError lists every problem."""
    from weftline.engine.serving.serve_file import assemble

    return assemble(files, None, machine=machine_of(cores, gpus), strict=True)


def machine_of(cores: int | None, gpus: str | None) -> Machine:
    """Return this machine, with other cores and GPUs where given; InputError for a malformed `gpus`."""
    machine = this_machine()
    if cores is not None:
        machine = dataclasses.replace(machine, cores=cores)
    return machine if gpus is None else dataclasses.replace(machine, devices=made_up_gpus(gpus))


def _described(machine: Machine) -> str:
    parts = [counted(machine.cores, "core"), f"{size_text(machine.memory_bytes)} of memory"]
    if machine.devices:
        model = machine.devices[0].model
        each = f"{size_text(machine.devices[0].memory_bytes)}{' each' if len(machine.devices) > 1 else ''}"
        parts.append(f"{counted(len(machine.devices), 'GPU')} of {each}{f' ({model})' if model else ''}")
    return ", ".join(parts if machine.devices else [*parts, "no GPU"])


def counted(count: int, word: str) -> str:
    """Return '1 step', '2 steps'."""
    return f"{count} {word}{'s' if count != 1 else ''}"
