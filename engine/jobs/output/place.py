"""Output location: from `--out` to a folder and file names."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weftline.engine.jobs.output.files import Files
from weftline.engine.jobs.output.local_files import LocalFiles
from weftline.engine.jobs.output.naming import ResultLayout
from weftline.engine.jobs.output.remote_files import RemoteFiles
from weftline.engine.jobs.sources.shown import shown_url
from weftline.errors import InputError, MissingPackage

LOCAL = ("file", "local")


@dataclass(frozen=True, slots=True)
class ResultFolder:
    """A folder, the names in it, and how the user wrote them.

    out:    as the user wrote it, without a password.
    folder: the same, of the folder in which results lie.
    """

    out: str
    folder: str
    files: Files
    layout: ResultLayout

    def shown(self, name: str) -> str:
        """Return a name as the user would write it."""
        return posixpath.join(self.folder, name).rstrip("/") if self.folder else name.rstrip("/")


def find(out: str, single_file: bool, suffix: str, storage: Mapping[str, str]) -> ResultFolder:
    """Return the place that `out` names; InputError when it names none that can be written to."""
    told = shown_url(out)
    protocol, _, path = out.rpartition("://")
    folder, final = posixpath.split(out) if single_file else (out, "")
    if single_file and not final:
        raise InputError(f"--out {told}: names no file")
    folder += "//" if folder.endswith(":") else ""
    layout = ResultLayout(f"{final}.job/", final, suffix) if single_file else ResultLayout("", "", suffix)
    if protocol and protocol not in LOCAL:
        return ResultFolder(told, shown_url(folder), _remote(told, folder, storage), layout)
    root = Path(posixpath.dirname(path) if single_file else path).expanduser()
    _refuse_misfits(out, root, root / final if final else None)
    return ResultFolder(out, folder, LocalFiles(root), layout)


def _refuse_misfits(out: str, root: Path, final: Path | None) -> None:
    if root.is_file():
        raise InputError(
            f"--out {out}: {root.name} is a file; results go to a folder, or to a file with a known suffix"
        )
    if final is not None and final.is_dir():
        raise InputError(f"--out {out}: {final.name} is a folder, and one file is to be written there")


def _remote(out: str, folder: str, storage: Mapping[str, str]) -> RemoteFiles:
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise MissingPackage("fsspec", "batch") from None
    try:
        system, root = url_to_fs(folder, **storage)
    except (ImportError, ValueError, TypeError, OSError) as error:  # of an address, a package for it, or its options
        raise InputError(shown_url(f"--out {out}: {error}")) from None
    return RemoteFiles(system, root)
