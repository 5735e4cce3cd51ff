"""Model files: path resolution, and loading of untrusted weights as safetensors or torch files without unpickling code.

Neither format can run code from the file: safetensors contains none, and torch loads with `weights_only=True`, which
refuses every object that is not a tensor or a plain container. Headers are compared with the file before a loader reads
them, so that a wrong size is an error with a reason, not an allocation.
"""

from __future__ import annotations

import math
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weftline.errors import ModelError, first_line
from weftline.nodes.contract import ConfigError
from weftline.nodes.model_limits import check_entries, open_file, open_zip, parse_json
from weftline.nodes.model_store import find_stored, is_url
from weftline.shm.spec import RANK_MAX


def find_model(model: str, base_dir: Path) -> Path | None:
    """Return the file or folder that `model` names, relative to `base_dir`; None when there is none.

    A name that is no usable path (a NUL in it, too long) is simply not there. ConfigError for the URL of a model that
    was not fetched, and for a model with pipes or devices, or text files that are too large.
    """
    if is_url(model):
        stored = find_stored(model, base_dir)
        if stored is not None:
            check_entries(stored, model)
        return stored
    try:
        path = (base_dir / Path(model).expanduser()).resolve()
        if not path.exists():
            return None
    except (OSError, ValueError, RuntimeError):
        return None
    check_entries(path, model)
    return path


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


_WEIGHT_FILES = ("model.safetensors", "model.bin", "model.pt", "model.onnx")


def stored_bytes(model: str, base_dir: Path) -> int:
    """Return the bytes of the weights that `model` names, a file or a folder; 0 where it is not on this machine."""
    path = find_model(model, base_dir)
    if path is None or path.is_file():
        return 0 if path is None else path.stat().st_size
    return folder_bytes(path)


def folder_bytes(folder: Path) -> int:
    """Return the bytes of the weights in a folder: one file, or all parts of a checkpoint."""
    parts = [one for one in folder.glob("*.safetensors") if one.is_file()]
    single = [folder / name for name in _WEIGHT_FILES if (folder / name).is_file()]
    numbered = [one for one in parts if "-of-" in one.name]  # a folder may hold a second copy in another layout
    return sum(one.stat().st_size for one in single[:1] or numbered or parts)


SAFETENSORS_HEADER_MAX = 32 << 20
"""Largest accepted header in bytes, which has room for 250 000 tensors; the format allows 100 MB."""

SAFETENSORS_VALUES_MAX = 1 << 20
"""Most values of a header: 8 for a tensor of 2 axes."""

_SAFETENSORS_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64,
}  # fmt: skip


def load_weights(path: Path, shown: str, device: str = "cpu") -> dict[str, Any]:
    """Return the state dict in `path`, by name: torch tensors on `device`. `shown` is its name in errors.

    A file that ends in .safetensors is read as that, anything else as torch's zip format. ModelError when it is not
    what it should be.
    """
    if path.suffix == ".safetensors":
        return _load_safetensors(path, shown, device)
    state = load_torch(path, shown, device)
    state = state.get("state_dict", state) if isinstance(state, dict) else state
    check_state(state, shown)
    found: dict[str, Any] = state
    return found


def _load_safetensors(path: Path, shown: str, device: str) -> dict[str, Any]:
    check_safetensors(path, shown)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found: dict[str, Any] = load_file(path, device=device)
        return found
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"{shown}: {_reason(error, path, shown)}") from None


def check_safetensors(path: Path, shown: str) -> None:
    """Raise ModelError unless the header of `path` is sound and its tensors fill the file exactly.

    Format: huggingface/safetensors README: 8 bytes little-endian header size, a JSON header, then the tensors' bytes.
    """
    try:
        header, data_bytes = _read_header(path)
        _check_tensors(header, data_bytes)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"{shown} is no safetensors file, or a truncated one: {reason}") from None


def safetensors_names(path: Path) -> list[str]:
    """Return the names of a file's tensors, none where its header cannot be read: opening the file reports that."""
    try:
        return [name for name in _read_header(path)[0] if name != "__metadata__"]
    except (OSError, ValueError, TypeError):
        return []


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return a header as it is, and the bytes of the file behind it."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(SAFETENSORS_HEADER_MAX, max(size - 8, 0)):
            raise ValueError(f"its header claims {length} bytes, the file has {size}")
        try:
            return parse_json(file.read(length), SAFETENSORS_VALUES_MAX), size - 8 - length
        except ValueError as error:
            raise ValueError(f"its header {error}") from None


def _check_tensors(header: dict[str, Any], data_bytes: int) -> None:
    spans = []
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        shape, (start, end) = tensor["shape"], tensor["data_offsets"]
        if len(shape) > RANK_MAX or any(type(n) is not int or n < 0 for n in (*shape, start, end)):
            raise ValueError(f"tensor {name!r:.80} has a shape or place that is no list of sizes")
        bits = _SAFETENSORS_BITS.get(tensor["dtype"])
        if bits is None or math.prod(shape) * bits != (end - start) * 8:
            raise ValueError(f"tensor {name!r:.80} does not fill its place")
        spans.append((start, end))
    at = 0
    for start, end in sorted(spans):
        if start != at:
            raise ValueError("its tensors overlap or leave gaps")
        at = end
    if at != data_bytes:
        raise ValueError(f"its tensors take {at} bytes, the file holds {data_bytes}")


def load_torch(path: Path, shown: str, device: str = "cpu") -> Any:
    """Return what torch.load finds in `path`, of plain containers and tensors only; ModelError for anything else."""
    check_torch_zip(path, shown)
    import torch

    try:
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # a hostile pickle makes the unpickler raise nearly anything
        raise ModelError(f"{shown}: {_reason(error, path, shown)}") from None


def check_torch_zip(path: Path, shown: str) -> None:
    """Raise ModelError unless `path` is a torch zip file: stored entries without compression, within the file."""
    try:
        size = path.stat().st_size
        with open_zip(path) as archive:
            entries = archive.infolist()
        names = [entry.filename for entry in entries]
        if not any(name.endswith("/data.pkl") for name in names):
            raise ValueError("it is a zip file without torch's data.pkl")
        if any(name.startswith(("/", "\\")) or ".." in name.split("/") for name in names):
            raise ValueError("it holds a path that leads outside")
        check_stored(entries, size)
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError, EOFError, struct.error) as error:
        reason = "no zip file: an old format, or truncated" if isinstance(error, zipfile.BadZipFile) else error
        raise ModelError(f"{shown} is no torch checkpoint: {reason}") from None


PICKLE_BYTES_SCANNED = 4 << 20
_GLOBAL = re.compile(rb"c([\w.]{1,200})\n([\w.]{1,200})\n")
"""A pickle's opcode that names a class or function, as torch.save writes it (protocol 2)."""
_PLAIN = re.compile(
    r"^(collections|torch|torch\._utils|torch\._tensor|torch\.nn\.parameter|numpy(\..*)?|_codecs|builtins)$"
)
"""Modules of what a state dict is made of."""

TORCHSCRIPT, EXPORTED, STATE_DICT, PICKLED_OBJECT, OLD_PICKLE = "script", "exported", "state", "object", "pickle"


def torch_kind(path: Path) -> tuple[str, str]:
    """Return what torch wrote to a file, ('', '') for something else, and the class of a pickled object.

    Read from the names of the archive's entries and the bytes of its pickle; nothing is unpickled.
    """
    try:
        with open_file(path) as file:
            head = file.read(2)
        if head in (b"\x80\x02", b"\x80\x04", b"\x80\x05"):
            return OLD_PICKLE, ""
        with open_zip(path) as archive:
            inside = {name.partition("/")[2]: name for name in archive.namelist()}
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile, NotImplementedError):
        return "", ""
    if any(name.startswith("models/") or name == "serialized_exported_program.json" for name in inside):
        return EXPORTED, ""
    if any(name.startswith("code/") for name in inside):
        return TORCHSCRIPT, ""
    objects = pickled_classes(path)
    if objects is None:
        return "", ""
    return (PICKLED_OBJECT, objects[0]) if objects else (STATE_DICT, "")


def pickled_classes(path: Path) -> list[str] | None:
    """Return the classes that the pickle of torch's zip format names, besides those of state dicts; None: no such file.

    Nothing is unpickled: the names are searched in its bytes.
    """
    try:
        with open_zip(path) as archive:
            pickles = [name for name in archive.namelist() if name.partition("/")[2] == "data.pkl"]
            if not pickles:
                return None
            with archive.open(pickles[-1]) as pickled:
                data = pickled.read(PICKLE_BYTES_SCANNED)
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError):
        return None
    named = [(found[1].decode("latin-1"), found[2].decode("latin-1")) for found in _GLOBAL.finditer(data)]
    return [f"{module}.{name}" for module, name in named if not _PLAIN.match(module)]


def check_stored(entries: Sequence[zipfile.ZipInfo], archive_bytes: int) -> None:
    """Raise ValueError unless all `entries` of an archive of that size are stored as they are, in room of their own."""
    unpacked = sum(entry.file_size for entry in entries)
    if unpacked > archive_bytes or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError(f"it unpacks to {unpacked} bytes from {archive_bytes}: torch never compresses")


def check_state(state: Any, shown: str) -> None:
    """Raise ModelError unless `state` is a dict of dense tensors by name."""
    import torch

    if not isinstance(state, dict) or not state:
        raise ModelError(f"{shown} holds {type(state).__name__}, expected a state dict: tensors by name")
    for name, tensor in state.items():
        dense = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
        if not isinstance(name, str) or not dense:
            raise ModelError(f"{shown}: {name!r:.80} is no dense tensor")


def load_into(module: Any, state: dict[str, Any], shown: str) -> None:
    """Load `state` into a torch module, every tensor and no other; ModelError lists what does not match."""
    try:
        module.load_state_dict(state, strict=True)
    except (RuntimeError, ValueError, TypeError) as error:
        lines = [line.strip() for line in str(error).splitlines()[1:]] or [first_line(error)]
        raise ModelError(f"{shown} does not fit the model: {' '.join(lines):.300}") from None


def _reason(error: BaseException, path: Path, shown: str) -> str:
    """Return one line about why a loader failed, without this machine's paths or the loader's advice to trust it."""
    text = str(error).replace(str(path), shown)
    if "weights_only" in text or "WeightsUnpickler" in text or "Unsupported" in text:
        found = text.partition("GLOBAL ")[2].split()[:1]
        what = f" ({found[0]})" if found else ""
        return f"refused: it holds objects{what} that are not weights, and loading those can run code"
    return f"corrupt or truncated: {first_line(error).replace(str(path), shown):.200}"
