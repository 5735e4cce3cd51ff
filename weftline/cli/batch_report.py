"""Location and atomic write of a job's HTML report.

A report that cannot be made or written is told and no more: the results are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from weftline.engine.jobs.progress import JobEnd
from weftline.errors import MissingPackage


def write_report(end: JobEnd, place: str, storage: Mapping[str, str], note: Callable[[str], None]) -> JobEnd:
    """Write the report of a job, and return its end with the report among its files.

    One that a run wrote which answered rows is not replaced by that of a run which had nothing left to do.
    """
    try:
        import fsspec

        files, path = fsspec.core.url_to_fs(place, **storage)
        if not (end.finished and end.rows == end.resumed and files.exists(path)):
            from weftline.engine.jobs.report.html import report

            text = report(end)
            files.makedirs(path.rpartition("/")[0] or "/", exist_ok=True)
            with files.transaction, files.open(path, "wb") as file:
                file.write(text.encode("utf-8", "replace"))
        return replace(end, files={**end.files, "report": place})
    except ModuleNotFoundError as error:
        note(f"no report: {MissingPackage(error.name or 'a package', 'batch')}")
    except Exception as error:  # a file system of fsspec may raise anything
        note(f"no report at {place}: {type(error).__name__}: {error}")
    return end
