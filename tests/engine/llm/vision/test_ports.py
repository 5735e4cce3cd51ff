"""Checks of a model with pictures, from its folder alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.llm import tiny
from tests.engine.llm.vision.tiny_vision import VIDEO_FAMILIES
from weftline.engine.llm.node import Llm
from weftline.engine.llm.options import LlmConfig
from weftline.engine.llm.vision.families import FAMILIES, check_family
from weftline.nodes.contract import ConfigError, StepContext
from weftline.nodes.ports import PortType


def ports(folder: Path, *wired: str, **options: Any) -> Any:
    types = {"images": PortType.parse("image")} if "images" in wired else {}
    return Llm.ports(LlmConfig(model=folder.name, **options), StepContext(folder.parent, wired, types))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("models") / "texts")


def test_only_a_model_for_pictures_has_input_images(models, texts):
    see = models("llava").folder
    assert str(ports(see).input("images").type) == "list[image]"
    assert str(ports(see, "images").input("images").type) == "image"  # one picture may be wired as it is
    assert ports(texts).input("images") is None
    with pytest.raises(ConfigError) as refused:
        ports(texts, "images")
    assert refused.value.option == "model"
    assert "LlamaForCausalLM, which reads texts only" in refused.value.found
    assert all(family.architecture in refused.value.expected for family in FAMILIES.values())


@pytest.mark.parametrize(
    ("wired", "type"),
    [
        (None, "list[uint8[?, ?, ?, 3]]"),
        ("list[image]", "list[image]"),  # frames of one video
        ("uint8[F, 240, 320, 3]", "uint8[?, ?, ?, 3]"),
        ("list[uint8[F, H, W, 3]]", "list[uint8[?, ?, ?, 3]]"),
    ],
)
def test_only_a_model_for_videos_has_input_videos(models, texts, wired, type):
    for family in VIDEO_FAMILIES:
        folder = models(family).folder
        types = {} if wired is None else {"videos": PortType.parse(wired)}
        found = Llm.ports(LlmConfig(model=folder.name), StepContext(folder.parent, tuple(types), types))
        assert str(found.input("videos").type) == type
        assert str(found.input("fps").type) == "json"
    for family, reads in (("llava", "reads pictures and no videos"), ("idefics3", "reads pictures and no videos")):
        assert ports(models(family).folder).input("videos") is None
        with pytest.raises(ConfigError) as refused:
            ports(models(family).folder, "videos")
        assert reads in refused.value.found
        assert "input videos: Qwen2VL" in refused.value.expected and "Llava" not in refused.value.expected
    with pytest.raises(ConfigError, match="reads texts only"):
        ports(texts, "videos")


def test_a_hub_model_that_is_not_here_may_have_pictures(tmp_path):
    found = Llm.ports(LlmConfig(model="someone/unknown-model"), StepContext(tmp_path))
    assert found.input("images") is not None
    assert found.input("videos") is not None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"weights": "int8"}, "weights"),
        ({"ranks": 2}, "ranks"),
        ({"adapters": {"a": "b"}}, "adapters"),
        ({"task": "embed"}, "model"),
    ],
)
def test_what_does_not_fit_a_model_for_pictures_is_refused(models, options, named):
    with pytest.raises(ConfigError) as refused:
        ports(models("llava").folder, **options)
    assert refused.value.option == named


def test_draft_models_are_of_texts_and_for_texts(models, texts, tmp_path):
    for name, folder in (("see", models("llava").folder), ("texts", texts)):
        shutil.copytree(folder, tmp_path / name)
    for model, draft, option in (("see", "texts", "speculation"), ("texts", "see", "draft_model")):
        config = LlmConfig(model=model, speculation="draft", draft_model=draft)
        with pytest.raises(ConfigError) as refused:
            Llm.ports(config, StepContext(tmp_path))
        assert refused.value.option == option


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "llava_next", "vision_config": {"a": 1}}, "pictures are not supported"),
        ({"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"], "vision_config": {"a": 1}},
         "Qwen3VLForConditionalGeneration"),
        ({"model_type": "qwen2_audio", "audio_config": {"a": 1}}, "recordings are not supported"),
        ({"model_type": "llava_qwen", "mm_vision_tower": "google/siglip"}, "pictures are not supported"),
        ({"model_type": "llava", "vision_config": {"model_type": "pixtral"}}, "vision encoder of type pixtral"),
        ({"model_type": "qwen2_vl", "vision_config": {}, "quantization_config": {"a": 1}}, "quantised weights"),
    ],
)  # fmt: skip
def test_other_families_are_refused_by_name(config, named):
    with pytest.raises(ConfigError) as refused:
        check_family(config, "models/m")
    assert refused.value.option == "model"
    assert named in refused.value.found


@pytest.mark.parametrize(
    "config", [{"model_type": "llama"}, {"model_type": "llava", "vision_config": {}}, {"vision_config": None}]
)
def test_models_of_texts_and_of_known_families_pass(config):
    check_family(config, "models/m")


def test_a_model_whose_texts_alone_are_read_has_a_note(tmp_path, texts):
    shutil.copytree(texts, tmp_path / "gemma")
    config = tmp_path / "gemma" / "config.json"
    found = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {"a": 1}}
    config.write_text(json.dumps(found))
    assert ports(tmp_path / "gemma").input("images") is None
    with pytest.raises(ConfigError, match="reads texts only"):
        ports(tmp_path / "gemma", "images")
    (note,) = Llm.plan_notes(LlmConfig(model="gemma"), StepContext(tmp_path))
    assert "reads texts only" in note


def test_a_folder_without_settings_of_its_pictures_is_refused(models, tmp_path):
    shutil.copytree(models("llava").folder, tmp_path / "bare")
    for path in (tmp_path / "bare").glob("*processor_config.json"):
        path.unlink()
    with pytest.raises(ConfigError, match="has no preprocessor_config"):
        ports(tmp_path / "bare")
    (tmp_path / "bare" / "processor_config.json").write_text('{"image_processor": {}}')
    assert ports(tmp_path / "bare").input("images") is not None


def test_the_check_loads_no_framework(models):
    folder = models("qwen2_vl").folder
    code = (
        "import sys; from pathlib import Path\n"
        "from weftline.engine.llm.node import Llm, LlmConfig\n"
        "from weftline.nodes.contract import StepContext\n"
        f"config, context = LlmConfig(model={folder.name!r}), StepContext(Path({str(folder.parent)!r}))\n"
        "assert Llm.ports(config, context).input('images')\n"
        "assert not {'torch', 'transformers', 'PIL'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
