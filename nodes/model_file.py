"""Model path resolution, shared by all nodes that name a file or folder."""

from __future__ import annotations

from pathlib import Path

from weftline.nodes.contract import ConfigError


def find_model(model: str, base_dir: Path) -> Path | None:
    """Return the file or folder that `model` names, relative to `base_dir`; None when there is none.

    A name that is no usable path (a NUL in it, too long) is simply not there.
    """
    try:
        path = (base_dir / Path(model).expanduser()).resolve()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):
        return None


def need_file(model: str, base_dir: Path, option: str = "model", inside: str = "") -> Path:
    """Return the file that `model` names, or the file `inside` the folder it names; ConfigError when there is none."""
    path = find_model(model, base_dir)
    if path is None:
        fix = "paths are relative to the pipeline file"
        raise ConfigError(option, f"there is no file or folder {model}", fix=fix)
    if path.is_dir() and inside:
        if not (path / inside).is_file():
            others = sorted(one.name for one in path.glob(f"*{Path(inside).suffix}"))
            fix = f"name the file, {model}/{others[0]}" if len(others) == 1 else ""
            raise ConfigError(option, f"the folder {model} has no {inside}", fix=fix)
        return path / inside
    if not path.is_file():
        raise ConfigError(option, f"{model} is a folder", "a file")
    return path
