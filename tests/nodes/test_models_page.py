"""docs/models.md: every task and family has its row, and the step in it passes `check` and runs with its outputs."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import whisper

from benchmarks.whisper_conversion import convert, hugging_face_form
from tests.engine.llm import tiny
from tests.engine.llm.packed_checkpoints import AWQ, GPTQ, write_packed
from tests.engine.llm.vision import tiny_vision
from tests.nodes import random_models
from tests.nodes.random_models import names
from tests.nodes.test_text_models import write_onnx
from tests.nodes.yolo_models import SUFFIXES, save_yolo
from weftline import load
from weftline.engine.llm.node import Llm
from weftline.engine.llm.vision.families import FAMILIES
from weftline.nodes.audio import decode_audio
from weftline.nodes.catalog import resolve
from weftline.nodes.contract import Batch, Node, OpenContext, StepContext
from weftline.nodes.transformers_tasks.node import TASKS, Transformers
from weftline.nodes.yolo import Yolo
from weftline.nodes.yolo_tasks import TASKS as YOLO_TASKS
from weftline.pipelines.check.options import to_config
from weftline.pipelines.placement.machine import Machine
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.spec.loader import load_file

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text("utf-8")
ROWS = [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in PAGE.splitlines() if line[:3] == "| `"]
SPOKEN = Path(__file__).parents[2] / "examples" / "models" / "spoken-questions"
MODELS: dict[str, Callable[[Path], Path]] = {
    "vit": lambda folder: random_models.save_vit(folder, **names("red", "blue")),
    "sentiment": lambda folder: random_models.save_bert(
        "BertForSequenceClassification", folder, **names("good", "bad")
    ),
    "bert": lambda folder: random_models.save_bert("BertModel", folder),
    "ner": lambda folder: random_models.save_bert("BertForTokenClassification", folder, **names("O", "B-PER", "I-PER")),
    "squad": lambda folder: random_models.save_bert("BertForQuestionAnswering", folder),
    "nli": lambda folder: random_models.save_bert(
        "BertForSequenceClassification", folder, **names("not", "entailment")
    ),
    "detr": lambda folder: random_models.save_detr(folder, **names("cat", "dog")),
    "dpt": random_models.save_dpt,
    "clip": random_models.save_clip,
    "ast": lambda folder: random_models.save_ast(folder, **names("yes", "no")),
    "ctc": lambda folder: random_models.save_wav2vec2("Wav2Vec2ForCTC", folder, "layer"),
    "segformer": lambda folder: random_models.save_segformer(folder, **names("sky", "sea")),
    "mask2former": lambda folder: random_models.save_mask2former(folder, **names("cat", "dog")),
    "vitpose": lambda folder: random_models.save_vitpose(folder, "nose", "left", "right"),
    "t5": random_models.save_t5,
    "vits": random_models.save_vits,
    "yolo": lambda folder: save_yolo(folder, "detect"),
    **{
        f"yolo{suffix[1:]}": lambda folder, task=task: save_yolo(folder, task)  # type: ignore[misc]
        for task, suffix in SUFFIXES.items()
        if suffix
    },
}
NODES: dict[str, Any] = {"transformers": Transformers, "yolo": Yolo}
INPUTS = {"sound": "audio", "photo": "image", "words": "text", "page": "text", "people": "detections"}


def node_of(row: tuple[str, ...]) -> str:
    return re.findall(r"node: (\w+)", row[2])[0]


LLM_ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and "node: llm" in line]
FAMILY_ROWS, VIDEO_ROWS = (
    [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in LLM_ROWS if re.search(shown, line)]
    for shown in ("photo", "clip|frames")
)
LANGUAGE_ROWS = [line for line in LLM_ROWS if not re.search("photo|clip|frames", line)]


def save_packed(folder: Path, settings: dict[str, Any]) -> None:
    write_packed(folder, settings, whole=tiny.model_of_words("llama"))
    tiny.tokenizer().save_pretrained(folder)


def save_gguf(folder: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    from tests.engine.llm.gguf_files import make, write_gguf

    folder.parent.mkdir(parents=True)
    write_gguf(folder, make("qwen3"))


LANGUAGE_MODELS: dict[str, Callable[[Path], Any]] = {
    "chat": tiny.save,
    "chat-awq": lambda folder: save_packed(folder, AWQ),
    "chat-gptq": lambda folder: save_packed(folder, GPTQ),
    "chat.gguf": save_gguf,
}


def test_the_page_has_a_row_for_every_task() -> None:
    for node, tasks in (("transformers", TASKS), ("yolo", YOLO_TASKS)):
        rows = [row for row in ROWS if node_of(row) == node]
        assert list(dict.fromkeys(row[0].strip("`") for row in rows)) == list(tasks)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2].partition(":")[0].strip("`") + "-" + row[0].strip("`"))
def test_the_step_of_a_row_is_checked_and_runs(tmp_path: Path, row: tuple[str, ...]) -> None:
    task, _, step, outputs = row
    model = re.findall(r"model: models/(\w+)", step)[0]
    MODELS[model](tmp_path / "models" / model)
    named = dict(re.findall(r"`(\w+): ([^`]+)`", outputs))
    wires = re.findall(r"\w+: (\w+)[,}]", step.partition("inputs: ")[2])
    name = step.strip("`").partition(":")[0]
    (tmp_path / "p.yaml").write_text(
        f"weftline: 1\nname: p\ninputs: {{{', '.join(f'{wire}: {INPUTS[wire]}' for wire in wires)}}}\n"
        f"outputs: {{{', '.join(f'out_{port}: {name}.{port}' for port in named)}}}\nsteps: {{{step.strip('`')}}}\n"
    )
    graph = load_file(tmp_path / "p.yaml")
    make_plan(graph, Machine(cores=2, memory_bytes=8 << 30))
    (only,) = graph.steps
    kind = NODES[node_of(row)]
    config = to_config(kind, only.options)
    ports = kind.ports(config, StepContext(tmp_path, tuple(only.inputs)))
    assert config.task == task.strip("`")
    assert {port.name: str(port.type) for port in ports.outputs} == named
    values: dict[str, Any] = {
        "image": np.zeros((40, 50, 3), np.uint8),
        "text": "Anna lives in Paris",
        "audio": np.zeros(9000, np.float32),
    }
    batch = Batch({port.name: [values[str(port.type)]] for port in ports.inputs if not port.optional})
    configs = [config]
    if kind is Transformers:
        configs.append(replace(config, precision="bfloat16"))
    for one in configs:
        node: Node = kind(one)
        node.open(OpenContext(tmp_path, cache_dir=tmp_path / "cache"))
        found = node.run(batch)
        assert set(found) == set(named) and all(len(values) == 1 for values in found.values())
        answers = [found[port][0] for port in named if named[port] == "json"]
        assert json.loads(json.dumps(answers)) == answers


TEXT_ROWS = [line for line in PAGE.splitlines() if re.search(r"node: (embed|rerank|classify)", line)]
RECORDING_ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and "node: whisper" in line]


def sentence_folder(folder: Path, network: Any, tokenizer: Any, pooling: str) -> Any:
    """Write a network as sentence-transformers does, with a pooling, scaling and a prompt `query`."""
    random_models.save(network, folder, tokenizer)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    stated = {"word_embedding_dimension": 16, f"pooling_mode_{pooling}": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(stated))
    prompts = {"prompts": {"query": "anna is in ", "document": ""}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return network.eval()


def encoder(folder: Path, pooling: str) -> Any:
    network = transformers.BertModel(random_models.bert_config(), add_pooling_layer=False)
    return sentence_folder(folder, network, random_models.bert_tokenizer(), pooling)


def decoder(folder: Path) -> Any:
    """Write a model as Qwen3-Embedding is published: a language model without its last layer."""
    config = transformers.Qwen3Config(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    network = sentence_folder(folder, transformers.Qwen3Model(config), random_models.bert_tokenizer(), "lasttoken")
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**known, "architectures": ["Qwen3ForCausalLM"]}))
    return network


TEXT_MODELS: dict[str, Callable[[Path], Any]] = {
    "minilm": lambda folder: encoder(folder, "mean_tokens"),
    "bge": lambda folder: encoder(folder, "cls_token"),
    "qwen3": decoder,
    "bert": lambda folder: MODELS["bert"](folder) and transformers.BertModel.from_pretrained(folder).eval(),
    "cross": lambda folder: random_models.save_bert("BertForSequenceClassification", folder, num_labels=1),
    "sentiment": MODELS["sentiment"],
    "guard": write_onnx,
}
POOLED = {
    "minilm": lambda states: states.mean(0),
    "bge": lambda states: states[0],
    "qwen3": lambda states: states[-1, :8],
    "bert": lambda states: states.mean(0),
}


def checked(base: Path, step: str, inputs: str, named: dict[str, str]) -> Node:
    """Return the node of a step of the page, opened, after `check`, a plan and a comparison of its outputs."""
    name = step.partition(":")[0]
    (base / "p.yaml").write_text(
        f"weftline: 1\nname: p\ninputs: {{{inputs}}}\nsteps: {{{step}}}\n"
        f"outputs: {{{', '.join(f'out_{port}: {name}.{port}' for port in named)}}}\n"
    )
    graph = load_file(base / "p.yaml")
    make_plan(graph, Machine(cores=2, memory_bytes=8 << 30))
    (only,) = graph.steps
    kind = resolve(only.node, base)
    config = to_config(kind, only.options)
    ports = kind.ports(config, StepContext(base, tuple(only.inputs)))
    assert {port.name: str(port.type) for port in ports.outputs} == named
    node = kind(config)
    node.open(OpenContext(base))
    return node


@pytest.mark.parametrize("row", TEXT_ROWS, ids=lambda row: re.findall(r"model: models/([\w-]+)", row)[0])
def test_the_step_of_a_text_model_is_checked_and_runs(tmp_path: Path, row: str) -> None:
    _, step, outputs = (cell.strip() for cell in row.strip("| ").split(" | "))
    (model,) = re.findall(r"model: models/([\w-]+)", step)
    made = TEXT_MODELS[model](tmp_path / "models" / model)
    named = dict(re.findall(r"`(\w+): ([^`]+)`", outputs))
    node = checked(tmp_path, step.strip("`"), "words: text" + ", pages: 'list[text]'" * ("pages" in step), named)
    texts = ["good day", "paris"]
    values = {"text": texts, "query": texts, "passages": [["bad", "a key"], ["anna"]]}
    found = node.run(Batch({name: values[name] for name in (("query", "passages") if "pages" in step else ("text",))}))
    assert set(found) == set(named)
    if model not in POOLED:  # compared with transformers elsewhere
        sizes = [np.shape(one) for one in found.get("scores", ())]
        assert sizes == ([(2,), (1,)] if "pages" in step else [()] * 2)
        return
    prompt = "anna is in " if "prompt: query" in step else ""
    for text, embedding in zip(texts, found["embedding"], strict=True):
        ids = torch.tensor([random_models.bert_tokenizer()(prompt + text)["input_ids"]])
        with torch.inference_mode():
            wanted = POOLED[model](made(ids).last_hidden_state[0])
        np.testing.assert_allclose(embedding, wanted / wanted.norm(), atol=1e-5)


def test_the_page_has_a_row_for_every_kind_of_text_model() -> None:
    assert [re.findall(r"model: models/([\w-]+)", row)[0] for row in TEXT_ROWS] == list(TEXT_MODELS)


def test_the_step_of_every_kind_of_whisper_hears_the_same(tmp_path: Path) -> None:
    network = whisper.load_model(str(SPOKEN / "model.pt"), device="cpu")
    (tmp_path / "models").mkdir()
    shutil.copy(SPOKEN / "model.pt", tmp_path / "models" / "whisper.pt")
    hugging_face_form(network).save_pretrained(tmp_path / "models" / "whisper-hf")
    convert(network, tmp_path / "models" / "whisper-ct2")
    assert len(RECORDING_ROWS) == 3
    recording = decode_audio((SPOKEN.parents[1] / "data" / "question.wav").read_bytes())
    for row in RECORDING_ROWS:
        step = row.strip("| ").split(" | ")[1].strip("`")
        node = checked(tmp_path, step, "sound: audio", {"text": "text", "language": "text", "segments": "json"})
        assert node.run(Batch({"audio": [recording]}))["text"] == ["How many red circles are there?"]


def test_the_page_has_a_row_for_every_family() -> None:
    assert [row[1].split("`")[1] for row in FAMILY_ROWS] == [family.architecture for family in FAMILIES.values()]
    videos = [family.architecture for family in FAMILIES.values() if family.videos]
    assert [row[1].split("`")[1] for row in VIDEO_ROWS] == videos


@pytest.mark.slow
@pytest.mark.parametrize("row", [*FAMILY_ROWS, *VIDEO_ROWS], ids=lambda row: row[0])
def test_the_step_of_a_family_is_checked_and_runs(tmp_path: Path, row: tuple[str, ...]) -> None:
    _, architecture, step, outputs = row
    model = re.findall(r"model: models/(\w+)", step)[0]
    (tmp_path / "models" / model).mkdir(parents=True)
    made = tiny_vision.make(model, tmp_path / "models" / model)
    named = dict(re.findall(r"`(\w+): ([^`]+)`", outputs))
    types = {"photo": "image", "clip": "'uint8[F, H, W, 3]'", "frames": "'list[image]'", "words": "text"}
    inputs = {name: type for name, type in types.items() if re.search(rf"\b{name}\b", step)}
    (tmp_path / "p.yaml").write_text(
        f"weftline: 1\nname: p\ninputs: {{{', '.join(f'{name}: {type}' for name, type in inputs.items())}}}\n"
        f"outputs: {{{', '.join(f'out_{port}: look.{port}' for port in named)}}}\nsteps: {{{step.strip('`')}}}\n"
    )
    graph = load_file(tmp_path / "p.yaml")
    plan = make_plan(graph, Machine(cores=2, memory_bytes=8 << 30))
    assert {"look", "look_prompt"} <= {one.name for one in plan.steps}
    values = {
        "photo": tiny_vision.picture(30, 40),
        "clip": tiny_vision.clip(4),
        "frames": list(tiny_vision.clip(3)),
        "words": "what is it",
    }
    with load(tmp_path / "p.yaml").open() as session:
        found = session.run(**{name: values[name] for name in inputs})
    assert type(made.reference).__name__ == architecture.split("`")[1]
    assert set(found) == {f"out_{port}" for port in named}
    assert found["out_usage"]["prompt_tokens"] > 10


def test_the_page_has_a_row_for_every_kind_of_weights() -> None:
    assert [re.findall(r"model: models/([\w.-]+)", row)[0] for row in LANGUAGE_ROWS] == list(LANGUAGE_MODELS)


@pytest.mark.parametrize("row", LANGUAGE_ROWS, ids=lambda row: re.findall(r"model: models/([\w.-]+)", row)[0])
def test_the_step_of_a_language_model_is_checked_and_runs(tmp_path: Path, row: str) -> None:
    step = row.strip("| ").split(" | ")[2].strip("`")
    (model,) = re.findall(r"model: models/([\w.-]+)", step)
    LANGUAGE_MODELS[model](tmp_path / "models" / model)
    (tmp_path / "p.yaml").write_text(
        f"weftline: 1\nname: p\ninputs: {{words: text}}\noutputs: {{out: answer.text}}\nsteps: {{{step}}}\n"
    )
    graph = load_file(tmp_path / "p.yaml")
    make_plan(graph, Machine(cores=2, memory_bytes=8 << 30))
    node = Llm(replace(to_config(Llm, graph.steps[0].options), kv_bytes=4 << 20))
    node.open(OpenContext(tmp_path))
    node.submit(0, {"prompt": "the user asks", "sampling": {"tokens_max": 4, "ignore_eos": True}})
    pieces = []
    while node.busy:
        pieces += node.round()
    node.close()
    assert pieces[-1].error is None and pieces[-1].outputs["usage"]["completion_tokens"] == 4
