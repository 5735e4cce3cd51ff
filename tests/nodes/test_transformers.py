"""Node transformers: what `check` finds in a folder, and what all tasks share."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.nodes import random_models
from tests.nodes.device_values import moves_of_modules
from tests.nodes.random_models import names, opened, refused
from weftline.errors import ModelError
from weftline.nodes.classify import Classify, ClassifyConfig
from weftline.nodes.contract import Batch, ConfigError, OpenContext, StepContext
from weftline.nodes.transformers_tasks.node import TASKS, Transformers, TransformersConfig

ROOT = Path(__file__).parents[2]
COLOURS = names("red", "green", "blue")


def change(path: Path, **keys: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


@pytest.mark.parametrize(
    ("task", "kind", "found", "fix"),
    [
        ("token-classification", "BertForQuestionAnswering", "marks an answer", "`task: question-answering`"),
        ("question-answering", "BertForTokenClassification", "labels single tokens", "`task: token-classification`"),
        ("question-answering", "BertForSequenceClassification", "a label to a whole text", "use node classify"),
        ("image-classification", "BertForMaskedLM", "guesses masked words", "use node embed"),
        ("token-classification", "BertLMHeadModel", "generates text", "use node llm"),
    ],
)
def test_a_model_for_another_task_is_refused_by_name(
    tmp_path: Path, task: str, kind: str, found: str, fix: str
) -> None:
    random_models.save_bert(kind, tmp_path / "m")
    error = refused(tmp_path, task)
    assert f"m is a {kind}, which" in error.found and found in error.found and fix in error.fix
    assert error.option == "model"
    with pytest.raises(ModelError, match=kind):  # the same where the folder came after the check
        Transformers(TransformersConfig(task, "m")).open(OpenContext(tmp_path))


def test_node_classify_names_the_task_for_a_model_of_pictures(tmp_path: Path) -> None:
    random_models.save_vit(tmp_path / "m", **COLOURS)
    with pytest.raises(ConfigError) as caught:
        Classify.ports(ClassifyConfig("m"), StepContext(tmp_path))
    assert "use node transformers with `task: image-classification`" in caught.value.fix


@pytest.mark.parametrize(
    ("task", "fix"),
    [("sentiment-analysis", "use node classify"), ("text-generation", "use node llm"), ("video-classification", "")],
)
def test_a_task_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path, task: str, fix: str) -> None:
    error = refused(tmp_path, task)
    assert error.option == "task" and task in error.found and fix == error.fix
    assert error.expected == f"one of {', '.join(TASKS)}"


def test_an_option_of_another_task_is_refused(tmp_path: Path) -> None:
    random_models.save_vit(tmp_path / "m", **COLOURS)
    error = refused(tmp_path, "image-classification", aggregation="simple")
    assert error.option == "aggregation" and error.expected == "one of task, model, precision, top_k"
    assert refused(tmp_path, "image-classification", precision="half").option == "precision"


def test_an_incomplete_folder_is_refused_with_a_fix(tmp_path: Path) -> None:
    folder, task = random_models.save_vit(tmp_path / "m", **COLOURS), "image-classification"
    settings = (folder / "preprocessor_config.json").read_text()
    (folder / "preprocessor_config.json").unlink()
    error = refused(tmp_path, task)
    assert error.found == "m has no preprocessor_config.json"
    assert "AutoImageProcessor.from_pretrained(...).save_pretrained('m')" in error.fix
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": json.loads(settings)}))
    opened(tmp_path, task)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    error = refused(tmp_path, task)
    assert "m has no *.safetensors, but pytorch_model.bin; pickled weights are not loaded" in error.found
    assert "AutoModelForImageClassification" in error.fix
    random_models.save_bert("BertForTokenClassification", folder)
    (folder / "tokenizer.json").unlink()
    assert refused(tmp_path, "token-classification").found == "m has no tokenizer"


@pytest.mark.parametrize("file", ["config.json", "preprocessor_config.json"])
def test_a_model_with_code_of_its_own_is_refused_and_not_run(tmp_path: Path, file: str) -> None:
    folder = random_models.save_vit(tmp_path / "m", **COLOURS)
    change(folder / file, auto_map={"AutoImageProcessor": "mine.P", "AutoModelForImageClassification": "mine.M"})
    (folder / "mine.py").write_text(f"import os; os.mkdir({str(tmp_path / 'ran')!r})")
    error = refused(tmp_path, "image-classification")
    assert error.found == f"m/{file} has auto_map: the model is code of its own"
    with pytest.raises(ModelError, match="auto_map"):
        Transformers(TransformersConfig("image-classification", "m")).open(OpenContext(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_a_corrupt_processor_is_an_error_without_the_machines_paths(tmp_path: Path) -> None:
    folder = random_models.save_vit(tmp_path / "m", **COLOURS)
    change(folder / "preprocessor_config.json", image_processor_type="NoSuchProcessor")
    change(folder / "config.json", model_type="vit")
    with pytest.raises(ModelError, match="m has no usable processor") as caught:
        opened(tmp_path, "image-classification")
    assert str(tmp_path) not in str(caught.value)


def test_weights_that_lack_a_tensor_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = random_models.save_vit(tmp_path / "m", **COLOURS)
    state = load_file(folder / "model.safetensors")
    del state["classifier.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"classifier\.weight"):
        opened(tmp_path, "image-classification")


def test_ports_are_read_without_a_framework(tmp_path: Path) -> None:
    random_models.save_vit(tmp_path / "m", **COLOURS)
    code = (
        "import sys; from pathlib import Path\n"
        "from weftline.nodes.transformers_tasks.node import *\n"
        f"step = StepContext(Path({str(tmp_path)!r}))\n"
        "Transformers.ports(TransformersConfig('image-classification', 'm'), step)\n"
        "print(sorted({'torch', 'transformers', 'tokenizers', 'PIL'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_hub_model_that_is_not_here_has_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for task in TASKS:
        labels = ("good", "bad") if task.startswith("zero-shot") else None
        ports = Transformers.ports(TransformersConfig(task, "someone/model", labels=labels), StepContext(tmp_path))
        assert ports.inputs and ports.outputs


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_is_near_float32(tmp_path: Path, precision: str) -> None:
    random_models.save_vit(tmp_path / "m", **COLOURS)
    batch = Batch({"image": random_models.pictures()})
    wanted, found = (
        opened(tmp_path, "image-classification", precision=one).run(batch) for one in ("float32", precision)
    )
    scores = [[{one["label"]: one["score"] for one in of} for of in answer["scores"]] for answer in (wanted, found)]
    for near, far in zip(*scores, strict=True):
        assert far == pytest.approx(near, abs=0.05)
    assert scores[0] != scores[1]


def test_sleep_moves_the_weights_to_host_memory_and_wake_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_models.save_vit(tmp_path / "m", **COLOURS)
    node = opened(tmp_path, "image-classification")
    assert node._task is not None
    node._task.model.device = "cuda:1"
    moves = moves_of_modules(monkeypatch)
    assert node.sleep("host") and not node.sleep("process")
    node.wake()
    assert moves == ["cpu", "cuda:1"]


@pytest.mark.slow
def test_candidate_labels_are_wired_in_a_pipeline_file(tmp_path: Path) -> None:
    import weftline

    random_models.save_bert("BertForSequenceClassification", tmp_path / "m", **names("not", "entailment"))
    (tmp_path / "p.yaml").write_text(
        "weftline: 1\nname: p\ninputs: {words: text, topics: json}\noutputs: {label: sort.label, scores: sort.scores}\n"
        "steps: {sort: {node: transformers, task: zero-shot-classification, model: m, "
        "inputs: {text: words, labels: topics}}}\n"
    )
    with weftline.load(tmp_path / "p.yaml").open() as session:
        result = session.run(words="Anna lives in Paris", topics=["good", "bad"])
        assert {one["label"] for one in result["scores"]} == {"good", "bad"}
        assert result["label"] == result["scores"][0]["label"]
        with pytest.raises(weftline.WeftlineError, match="no list of 1 to 1000 texts"):
            session.run(words="Anna lives in Paris", topics="good")


def test_a_model_runs_from_a_pipeline_file(tmp_path: Path) -> None:
    import weftline

    random_models.save_vit(tmp_path / "m", **COLOURS)
    (tmp_path / "p.yaml").write_text(
        "weftline: 1\nname: p\ninputs: {photo: image}\noutputs: {colour: see.label, scores: see.scores}\n"
        "steps: {see: {node: transformers, task: image-classification, model: m, inputs: {image: photo}}}\n"
    )
    picture: Any = random_models.pictures()[0]
    with weftline.load(tmp_path / "p.yaml").open() as session:
        result = session.run(photo=np.ascontiguousarray(picture))
    wanted = opened(tmp_path, "image-classification").run(Batch({"image": [picture]}))
    assert result["colour"] == wanted["label"][0]
    random_models.assert_same_scores(result["scores"], wanted["scores"][0])
