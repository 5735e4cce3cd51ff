"""Command `weftline fetch`: download the models that pipeline files name by URL, and pin them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import typer

from weftline.cli.options import PipelineFiles
from weftline.engine.flags import Flag, pairs
from weftline.errors import ModelError
from weftline.nodes.contract import ConfigError, model_error
from weftline.nodes.model_download import fetch as fetch_model
from weftline.nodes.model_download import remove_abandoned
from weftline.nodes.model_store import LOCK, add_pin, read_lock, urls_of
from weftline.pipelines.spec.loader import load_file


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    """Options of `weftline fetch`."""

    files: PipelineFiles
    update: Annotated[bool, Flag("--update")] = False
    """Pin what the stores have now, instead of what is pinned."""

    storage: Annotated[
        Mapping[str, str],
        Flag("--storage", "KEY=VALUE", parse=pairs("KEY=VALUE")),
    ] = field(default_factory=dict, repr=False)
    """fsspec option of the file system behind the URLs; repeatable."""


def fetch(options: FetchOptions) -> None:
    """Download the models that pipeline files name by URL, and pin their files in models.lock.json beside them.

    A model that is pinned already is completed and compared with its pin. Other models need no fetching.

    \b
    Examples:
      weftline fetch pipeline.yaml
      weftline fetch --update pipeline.yaml
      weftline fetch --storage endpoint_url=https://minio.local pipeline.yaml
    """
    for file in options.files:
        fetch_file(file, options.update, options.storage)
    remove_abandoned()


def fetch_file(file: str, update: bool, storage: Mapping[str, str]) -> None:
    """Fetch the models of one pipeline file; each is pinned as soon as it is complete."""
    pipeline = load_file(file)
    steps = [(step.name, url) for step in pipeline.steps for url in urls_of(step.options)]
    if not steps:
        typer.echo(f"{file}: no model is named by URL")
    for step, url in {url: (step, url) for step, url in steps}.values():
        try:
            known = read_lock(pipeline.base_dir)
            found = fetch_model(url, None if update else known.get(url), storage, lambda line: typer.echo(f"  {line}"))
            add_pin(pipeline.base_dir, url, found)
        except ConfigError as error:
            raise model_error(error) from None
        except ModelError as error:
            raise ModelError(f"step {step}: {error}") from None
        size = sum(one.size_bytes for one in found.files)
        typer.echo(f"{url}: {len(found.files)} files, {size} bytes, pinned in {LOCK}")
