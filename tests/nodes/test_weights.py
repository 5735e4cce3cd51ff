import json
import struct
import time
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.nodes.model_files import Harm, broken
from weftline.errors import ModelError
from weftline.nodes.model_file import check_safetensors, load_into, load_torch, load_weights


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    return torch.nn.Linear(4, 3).state_dict()


def test_both_formats_give_the_same_tensors(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    save_file(state, tmp_path / "a.safetensors")
    torch.save(state, tmp_path / "a.pt")
    for name in ("a.safetensors", "a.pt"):
        found = load_weights(tmp_path / name, name)
        assert all(torch.equal(found[key], state[key]) for key in state)


def test_truncated_or_flipped_safetensors_are_refused_or_harmless(
    tmp_path: Path, state: dict[str, torch.Tensor]
) -> None:
    save_file(state, tmp_path / "a.safetensors")
    data = (tmp_path / "a.safetensors").read_bytes()
    header = 8 + struct.unpack("<Q", data[:8])[0]
    _break_all(tmp_path / "b.safetensors", data, header)


@pytest.mark.slow
def test_every_truncation_and_flip_of_a_torch_file_is_refused_or_harmless(
    tmp_path: Path, state: dict[str, torch.Tensor]
) -> None:
    torch.save(state, tmp_path / "a.pt")
    _break_all(tmp_path / "b.pt", (tmp_path / "a.pt").read_bytes(), 600)


def _break_all(path: Path, data: bytes, header: int) -> None:
    refused = 0
    for candidate in broken(data, flips=range(header)):
        path.write_bytes(candidate)
        module = torch.nn.Linear(4, 3)
        started = time.process_time()
        try:
            load_into(module, load_weights(path, "b"), "b")
        except ModelError as error:
            refused += 1
            assert str(error).startswith("b") and str(path.parent) not in str(error) and "Traceback" not in str(error)
        assert time.process_time() - started < 1
    assert refused >= 100  # every truncation, and most flips


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [1 << 62], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1 << 60]}},
        {
            "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        },
        {"a": {"dtype": "F32"}},
        {"a": 7},
        [],
    ],
)
def test_a_safetensors_header_that_lies_about_its_tensors_is_refused(tmp_path: Path, header: object) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 4)
    with pytest.raises(ModelError, match=r"a\.safetensors"):
        check_safetensors(tmp_path / "a.safetensors", "a.safetensors")


@pytest.mark.parametrize("size", [1 << 63, (1 << 64) - 1, 1 << 40, 3, 0])
def test_a_safetensors_header_of_absurd_size_is_refused_at_once(tmp_path: Path, size: int) -> None:
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", size) + b"{}")
    started = time.process_time()
    with pytest.raises(ModelError, match="header claims"):
        load_weights(tmp_path / "a.safetensors", "a.safetensors")
    assert time.process_time() - started < 0.5


def test_a_pickle_that_would_run_code_does_not_run_it(tmp_path: Path) -> None:
    torch.save({"a": Harm(tmp_path / "ran")}, tmp_path / "a.pt")
    with pytest.raises(ModelError, match="not weights"):
        load_weights(tmp_path / "a.pt", "a.pt")
    torch.save({"a": Harm(tmp_path / "ran")}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ModelError, match="no torch checkpoint"):
        load_weights(tmp_path / "old.pt", "old.pt")
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "a.pt", weights_only=False)
    assert (tmp_path / "ran").exists()  # the payload is live: it was refused, not dead


def test_zip_bombs_and_paths_that_lead_outside_are_refused(tmp_path: Path) -> None:
    for name, entries, compression in (
        ("bomb.pt", {"a/data.pkl": b"\0" * 10_000_000}, zipfile.ZIP_DEFLATED),
        ("slip.pt", {"a/data.pkl": b"\x80\x02}.", "../../etc/x": b""}, zipfile.ZIP_STORED),
        ("other.pt", {"readme": b""}, zipfile.ZIP_STORED),
    ):
        with zipfile.ZipFile(tmp_path / name, "w", compression) as archive:
            for entry, data in entries.items():
                archive.writestr(entry, data)
        with pytest.raises(ModelError, match="no torch checkpoint"):
            load_torch(tmp_path / name, name)


def test_sparse_tensors_and_other_objects_are_no_state(tmp_path: Path) -> None:
    for value in ({"a": torch.eye(3).to_sparse()}, {"a": 7}, [torch.eye(3)], {}):
        torch.save(value, tmp_path / "a.pt")
        with pytest.raises(ModelError):
            load_weights(tmp_path / "a.pt", "a.pt")


def test_weights_of_another_model_are_named(state: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ModelError, match="bias"):
        load_into(torch.nn.Linear(4, 3), {"weight": state["weight"]}, "w")
    with pytest.raises(ModelError, match="size mismatch"):
        load_into(torch.nn.Linear(5, 3), state, "w")
