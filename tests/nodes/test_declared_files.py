"""The files that a node loads are found by its options, and identified by their state."""

from __future__ import annotations

from pathlib import Path

import pytest

from weftline.errors import ModelError
from weftline.nodes import declared_files
from weftline.nodes.catalog import resolve
from weftline.nodes.contract import StepContext
from weftline.nodes.declared_files import check_unchanged, identities, listings, named_paths


def made(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def test_options_name_files_and_folders_at_any_depth(tmp_path: Path) -> None:
    made(tmp_path, "model/config.json", "adapters/a", "labels.txt", "cat/1.jpg")
    value = {"model": "model", "adapters": {"a": "adapters/a"}, "more": [{"labels": "labels.txt"}], "kv_bytes": 5}
    assert named_paths(value, tmp_path) == [tmp_path / "model", tmp_path / "adapters/a", tmp_path / "labels.txt"]
    assert (
        named_paths(
            {"labels": ["cat", "dog"], "none": "missing.txt", "text": "a\nb", "stop": ["."], "end": "/"}, tmp_path
        )
        == []
    )


def test_hub_models_in_the_cache_are_named_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    made(tmp_path, "models--org--small/snapshots/1/config.json")
    assert named_paths("org/small", Path("/")) == [tmp_path / "models--org--small/snapshots/1"]
    assert named_paths("org/other", Path("/")) == []


def test_a_folder_stands_for_its_files_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path, "b/2", "b/1", "a", ".git/x", "__pycache__/y")
    assert [one.path for one in identities([tmp_path])] == [str(tmp_path / name) for name in ("a", "b/1", "b/2")]
    monkeypatch.setattr(declared_files, "FILES_MAX", 2)
    assert len(identities([tmp_path])) == 2


def test_a_file_that_is_added_to_a_models_folder_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    made(folder, "config.json", "one.safetensors")
    files = (*identities([folder]), *listings([folder, folder / "config.json", tmp_path / "absent"]))
    made(folder, "notes.md", ".cache/x.json", "run.log")
    check_unchanged(files)
    made(folder, "lora/adapter_model.safetensors")
    with pytest.raises(ModelError, match=f"its files changed since it was planned: {folder}/; reload the pipeline"):
        check_unchanged(files)
    assert listings([folder]) == listings([folder]) != files[-1:]


def test_a_model_in_the_hubs_cache_may_be_completed_by_its_loader(tmp_path: Path) -> None:
    made(tmp_path, "models--org--small/snapshots/1/config.json")
    assert listings([tmp_path / "models--org--small/snapshots/1"]) == ()


@pytest.mark.parametrize("change", ["write", "replace", "remove"])
def test_changed_files_are_named(tmp_path: Path, change: str) -> None:
    path = made(tmp_path, "weights", "rest") / "weights"
    files = identities([tmp_path])
    check_unchanged(files)
    if change == "write":
        path.write_text("weightz")
    elif change == "replace":
        made(tmp_path, "other")
        (tmp_path / "other").replace(path)
    else:
        path.unlink()
    with pytest.raises(ModelError, match=f"its files changed since it was planned: {path}; reload the pipeline"):
        check_unchanged(files)


def test_options_that_travel_with_the_item_name_no_files(tmp_path: Path) -> None:
    made(tmp_path, "en", "model.pt")
    whisper = resolve("whisper", tmp_path)
    config = whisper.Config(model="model.pt", language="en")
    assert [*whisper.files(config, StepContext(tmp_path))] == [tmp_path / "model.pt"]


def test_weights_beside_an_onnx_file_belong_to_it(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    import numpy as np

    weight = onnx.numpy_helper.from_array(np.ones((64, 64), np.float32), "w")
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    ends = [onnx.helper.make_tensor_value_info(name, 1, ["n", 64]) for name in ("x", "y")]
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", ends[:1], ends[1:], [weight]))
    onnx.save_model(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    assert named_paths("m.onnx", tmp_path) == [tmp_path / "m.onnx", tmp_path / "m.data"]
