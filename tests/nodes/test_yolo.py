import json
import os
import resource
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.nodes.device_values import DEVICE, Bench, moves_of_modules
from tests.nodes.model_files import Harm, broken
from weftline.errors import ModelError
from weftline.nodes.contract import Batch, ConfigError, OpenContext, StepContext
from weftline.nodes.detections import Detections
from weftline.nodes.yolo import Yolo, YoloConfig
from weftline.nodes.yolo_file import quiet_ultralytics

ARCHITECTURE = {
    "nc": 2,
    "scales": {"n": [0.5, 0.25, 1024]},
    "scale": "n",
    "backbone": [
        [-1, 1, "Conv", [64, 3, 2]],
        [-1, 1, "Conv", [128, 3, 2]],
        [-1, 1, "C2f", [128, True]],
        [-1, 1, "Conv", [256, 3, 2]],
    ],
    "head": [[-1, 1, "C2f", [256]], [-1, 1, "Conv", [256, 3, 2]], [[4, 5], 1, "Detect", ["nc"]]],
}
"""A small detector: two scales, random weights."""

CONFIG = {
    "format": "weftline-yolo", "architecture": ARCHITECTURE, "names": {"0": "red circle", "1": "blue star"},
    "image_size": 96, "confidence": 0.001, "iou": 0.5,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("yolo")
    quiet_ultralytics(folder / "cache", offline=True)
    from ultralytics.nn.tasks import DetectionModel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = DetectionModel(json.loads(json.dumps(ARCHITECTURE)), ch=3, nc=2, verbose=False)
    with torch.no_grad():  # untrained class scores are all alike; spread them, so that there is something to sort
        for parameter in network.model[-1].parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for branch in network.model[-1].cv2:  # and prefer short distances from the middle: boxes inside the picture
            branch[-1].bias.view(4, 16).sub_(torch.arange(16.0))
    (folder / "detector").mkdir()
    state = {name: t.half() if t.ndim > 1 else t for name, t in network.state_dict().items()}
    save_file(state, folder / "detector" / "model.safetensors")
    (folder / "detector" / "config.json").write_text(json.dumps(CONFIG))
    return folder


EXAMPLES = Path(__file__).parents[2] / "examples"


def opened(folder: Path, device: str = "cpu", **options: object) -> Yolo:
    node = Yolo(YoloConfig(**{"model": "detector", **options}))
    node.open(OpenContext(folder, device, cache_dir=folder / "cache"))
    return node


def pictures() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 255, (h, w, 3), dtype=np.uint8) for h, w in ((60, 90), (96, 96), (200, 50))]


def test_a_batch_finds_what_ultralytics_own_predictor_finds(folder: Path) -> None:
    from ultralytics.engine.results import Results
    from ultralytics.models.yolo.detect import DetectionPredictor

    node = opened(folder)
    found = node.run(Batch({"image": pictures()}))["detections"]
    overrides = {
        "conf": 0.001,
        "iou": 0.5,
        "imgsz": 96,
        "rect": False,
        "save": False,
        "verbose": False,
        "device": "cpu",
    }
    for image, detections in zip(pictures(), found):
        predictor = DetectionPredictor(overrides=overrides)
        predictor.setup_model(node._opened.network, verbose=False)
        predictor.model.pt = False  # squares, as for an exported model: no rectangles
        (wanted,) = list(predictor(image[..., ::-1].copy()))
        assert isinstance(wanted, Results) and len(detections) == len(wanted.boxes) > 3
        assert len({tuple(box) for box in detections.boxes.tolist()}) > 3
        rows = np.column_stack([detections.boxes, detections.classes, detections.scores])
        theirs = np.column_stack([wanted.boxes.xyxy, wanted.boxes.cls, wanted.boxes.conf])
        np.testing.assert_allclose(_in_order(rows), _in_order(theirs), atol=1e-3)


def _in_order(rows: np.ndarray) -> np.ndarray:
    """Rows by place: equal scores leave the order open."""
    return rows[np.lexsort(rows[:, :5].round(1).T)]


def test_detections_are_typed_sorted_and_inside_the_picture(folder: Path) -> None:
    for image, found in zip(pictures(), opened(folder).run(Batch({"image": pictures()}))["detections"]):
        assert (found.boxes.dtype, found.scores.dtype, found.classes.dtype) == (np.float32, np.float32, np.int32)
        assert np.all(np.diff(found.scores) <= 0) and set(found.labels) <= {"red circle", "blue star"}
        assert found.boxes.min() >= 0 and np.all(found.boxes.max(axis=0) <= np.array([*image.shape[1::-1]] * 2))


def test_options_of_the_step_go_before_those_of_the_model(folder: Path) -> None:
    def count(**options: object) -> int:
        return len(opened(folder, **options).run(Batch({"image": pictures()[:1]}))["detections"][0])

    assert count(confidence=1.0) == 0
    assert count(detections_max=2) == 2
    assert count(iou=0.01) < count(iou=0.99)


def compare(host: Detections, there: Detections) -> None:
    assert len(host) == len(there) > 3 and host.names == there.names and host.labels == there.labels
    np.testing.assert_allclose(there.boxes, host.boxes, atol=0.1)
    np.testing.assert_allclose(there.scores, host.scores, atol=1e-3)


@pytest.mark.slow
def test_pictures_on_device_and_host_have_equal_detections(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photo = np.asarray(Image.open(EXAMPLES / "data" / "photo.png").convert("RGB"))
    nodes = []
    for device in ("cpu", DEVICE):
        nodes.append(Yolo(YoloConfig("shapes-detector")))
        nodes[-1].open(OpenContext(EXAMPLES / "models", device, cache_dir=folder / "cache"))
        nodes[-1].warm_up()
    host, there = nodes
    bench, images = Bench(), [photo, photo[:, ::-1], photo[50:400, 100:500]]
    wanted = host.run(Batch({"image": images}))["detections"]
    near = [bench.put(image) for image in images]
    mixed = there.run(Batch({"image": [near[0], images[1], near[2]]}))["detections"]
    assert there.sleep("host") and not there.sleep("nothing")
    there.wake()
    monkeypatch.setattr("weftline.nodes.yolo.letterbox", None)  # the host's, not needed from here on
    one_size = there.run(Batch({"image": near[:2]}))["detections"]
    sizes = there.run(Batch({"image": near}))["detections"]
    for place, found in enumerate([*one_size, *sizes, *mixed]):
        compare(wanted[(0, 1, 0, 1, 2, 0, 1, 2)[place]], found)
    assert Yolo.device_ports(there.config, Yolo.ports(there.config, StepContext(EXAMPLES / "models"))) == {"image"}


def test_asleep_its_weights_are_in_host_memory_and_awake_where_they_were(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = opened(folder)
    node._device = "cuda:1"
    moves = moves_of_modules(monkeypatch)
    assert node.sleep("host") and moves == ["cpu"]
    node.wake()
    assert moves == ["cpu", "cuda:1"]


def test_a_pickle_is_refused_where_the_pipeline_is_checked_and_explained(tmp_path: Path) -> None:
    torch.save({"model": Harm(tmp_path / "ran")}, tmp_path / "yolo11n.pt")
    node = Yolo(YoloConfig("yolo11n.pt"))
    with pytest.raises(ConfigError, match="pickle") as caught:
        node.ports(node.config, StepContext(tmp_path))
    assert "trust_pickle: true" in caught.value.fix
    with pytest.raises(ModelError, match=r"(?s)pickle.*trust_pickle: true"):
        node.open(OpenContext(tmp_path, cache_dir=tmp_path))
    assert not (tmp_path / "ran").exists()


def test_a_trusted_pickle_is_not_loaded_where_the_pipeline_is_checked(tmp_path: Path) -> None:
    torch.save({"model": Harm(tmp_path / "ran")}, tmp_path / "own.pt")
    ports = Yolo.ports(YoloConfig("own.pt", trust_pickle=True), StepContext(tmp_path))
    assert [port.name for port in ports.outputs] == ["detections"] and not (tmp_path / "ran").exists()


def test_a_trusted_pickle_of_ultralytics_works(folder: Path) -> None:
    from ultralytics.nn.tasks import DetectionModel

    network = DetectionModel(json.loads(json.dumps(ARCHITECTURE)), ch=3, nc=2, verbose=False)
    network.names = {0: "red circle", 1: "blue star"}
    torch.save({"model": network, "train_args": {"imgsz": 64}}, folder / "own.pt")
    node = opened(folder, model="own.pt", trust_pickle=True, confidence=0.0)
    found = node.run(Batch({"image": pictures()}))["detections"]
    assert node._side == 64 and len(found) == 3 and found[0].names == ("red circle", "blue star")


def test_a_failed_download_by_ultralytics_is_a_model_error(folder: Path) -> None:
    assert os.environ["YOLO_OFFLINE"] == "true"
    with pytest.raises(ModelError, match=r"yolo11n\.pt"):
        opened(folder, model="yolo11n.pt", trust_pickle=True)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"format": "other"}, "format"), ({"names": {"1": "a"}}, "names"), ({"names": {"0": "a"}}, "nc"),
        ({"image_size": 100}, "image_size"), ({"confidence": 7}, "confidence"),
        ({"architecture": {**ARCHITECTURE, "activation": "__import__('os').mkdir('ran')"}}, "activation"),
        ({"architecture": {**ARCHITECTURE, "head": [[-1, 1, "__import__", ["os"]]]}}, "layer 4"),
        ({"architecture": {**ARCHITECTURE, "head": [[-1, 1, "Conv", [1 << 40]]]}}, "small numbers"),
        ({"architecture": {**ARCHITECTURE, "backbone": [[-1, 10**9, "Conv", [8]]]}}, "repeats"),
        ({"architecture": {**ARCHITECTURE, "backbone": 5}}, "no list of layers"),
        ({"architecture": {**ARCHITECTURE, "head": [[-1, 1, "Conv\n", [8]]]}}, "layer 4"),
    ],
)  # fmt: skip
def test_a_config_that_is_wrong_or_hostile_is_refused_when_checked(
    folder: Path, tmp_path: Path, change: dict[str, object], found: str
) -> None:
    (tmp_path / "detector").mkdir()
    (tmp_path / "detector" / "config.json").write_text(json.dumps({**CONFIG, **change}))
    with pytest.raises(ConfigError, match=found) as caught:
        Yolo.ports(YoloConfig("detector"), StepContext(tmp_path))
    assert caught.value.option == "model"


@pytest.mark.timeout(60)
def test_a_network_larger_than_its_weights_is_not_allocated(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "detector", tmp_path / "detector")
    wide = [[-1, 60, "Conv", [8192, 3, 1]] for _ in ARCHITECTURE["backbone"]]
    written = {**CONFIG, "architecture": {**ARCHITECTURE, "backbone": wide}}
    (tmp_path / "detector" / "config.json").write_text(json.dumps(written))
    with pytest.raises(ModelError, match=r"describes a network of at least \d{8,} weights, and \d+ bytes"):
        opened(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 8 << 20


def test_truncated_weights_are_refused_when_checked(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "detector", tmp_path / "detector")
    weights = tmp_path / "detector" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"detector/model\.safetensors is no safetensors file, or a truncated"):
        Yolo.ports(YoloConfig("detector"), StepContext(tmp_path))


def test_a_missing_file_is_not_called_a_pickle(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file x/absent\.pt"):
        Yolo.ports(YoloConfig("x/absent.pt"), StepContext(tmp_path))


def test_truncated_or_flipped_weights_fail_with_a_reason(folder: Path, tmp_path: Path) -> None:
    from weftline.nodes.model_file import load_weights

    (tmp_path / "detector").mkdir()
    (tmp_path / "detector" / "config.json").write_text(json.dumps(CONFIG))
    data = (folder / "detector" / "model.safetensors").read_bytes()
    refused = 0
    for place, candidate in enumerate(broken(data, truncations=100, flips=range(0, 400, 4))):
        (tmp_path / "detector" / "model.safetensors").write_bytes(candidate)
        started = time.process_time()
        try:  # truncations are found without building the network; flips of names only by it
            opened(tmp_path) if place % 20 == 0 else load_weights(
                tmp_path / "detector" / "model.safetensors", "detector/w"
            )
        except ModelError as error:
            refused += 1
            assert "detector/" in str(error)
        assert time.process_time() - started < 1
    assert refused >= 100


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"model": "absent"}, "model"), ({"model": "x/absent.pt", "trust_pickle": True}, "model"),
        ({"confidence": 2}, "confidence"), ({"image_size": 33}, "image_size"), ({"image_size": 8224}, "image_size"),
        ({"detections_max": 0}, "detections_max"), ({"detections_max": 30_001}, "detections_max"),
    ],
)  # fmt: skip
def test_wrong_options_are_named(folder: Path, options: dict[str, object], option: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Yolo.ports(YoloConfig(**{"model": "detector", **options}), StepContext(folder))
    assert caught.value.option == option


def test_a_folder_without_config_names_the_file_inside(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "yolo11n.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"has no config\.json") as caught:
        Yolo.ports(YoloConfig("m"), StepContext(tmp_path))
    assert caught.value.option == "model" and caught.value.fix == "name the file, m/yolo11n.pt"
