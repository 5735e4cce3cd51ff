"""Command `weftline fetch`: download the models that pipeline files name by URL, and pin them."""

from __future__ import annotations

from typing import Annotated

import typer

from weftline.errors import ModelError
from weftline.nodes.contract import ConfigError, model_error
from weftline.nodes.model_download import fetch as fetch_model
from weftline.nodes.model_download import remove_abandoned
from weftline.nodes.model_store import LOCK, add_pin, read_lock, urls_of
from weftline.pipelines.spec.loader import load_file


def fetch(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="One or more pipeline files.")],
    update: Annotated[
        bool, typer.Option("--update", help="Pin what the stores have now, instead of what is pinned.")
    ] = False,
    storage: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="fsspec option of the file system behind the URLs; repeatable."),
    ] = None,
) -> None:
    """Download the models that pipeline files name by URL, and pin their files in models.lock.json beside them.

    A model that is pinned already is completed and compared with its pin. Other models need no fetching.

    \b
    Examples:
      weftline fetch pipeline.yaml
      weftline fetch --update pipeline.yaml
      weftline fetch --storage endpoint_url=https://minio.local pipeline.yaml
    """
    for file in files:
        fetch_file(file, update, read_storage(storage or ()))
    remove_abandoned()


def read_storage(pairs: list[str] | tuple[()]) -> dict[str, str]:
    """Return KEY=VALUE pairs as options for fsspec."""
    wrong = next((pair for pair in pairs if not pair.partition("=")[2]), None)
    if wrong is not None:
        raise typer.BadParameter(f"--storage {wrong}: expected KEY=VALUE")
    return {key: value for key, _, value in (pair.partition("=") for pair in pairs)}


def fetch_file(file: str, update: bool, storage: dict[str, str]) -> None:
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
