"""Tasks of node transformers on recordings give the answers of transformers' own pipelines."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.nodes import random_models
from tests.nodes.random_models import assert_same_scores, names, opened, pipeline, refused
from weftline.errors import InputError, ModelError
from weftline.nodes.classify import Classify, ClassifyConfig
from weftline.nodes.contract import Batch, ConfigError, StepContext

SOUNDS = names("yes", "no", "stop")


def save(kind: str, folder: Path, **options: Any) -> Path:
    if kind == "ast":
        return random_models.save_ast(folder, **options)
    return random_models.save_wav2vec2("Wav2Vec2ForSequenceClassification", folder, kind, **options)


@pytest.mark.parametrize("kind", ["ast", "layer", "group"])
def test_recordings_are_classified_as_the_pipeline_does(tmp_path: Path, kind: str) -> None:
    save(kind, tmp_path / "m", **SOUNDS)
    recordings = random_models.recordings()
    node = opened(tmp_path, "audio-classification", top_k=2)
    whole = node.run(Batch({"audio": recordings}))
    own = pipeline(tmp_path, "audio-classification")
    for place, recording in enumerate(recordings):
        wanted = own(recording.copy(), top_k=2)
        for found in (whole["scores"][place], node.run(Batch({"audio": [recording]}))["scores"][0]):
            assert_same_scores(found, wanted)
        assert whole["label"][place] == wanted[0]["label"]


@pytest.mark.parametrize("norm", ["layer", "group"])
def test_transcripts_are_those_of_the_pipeline(tmp_path: Path, norm: str) -> None:
    random_models.save_wav2vec2("Wav2Vec2ForCTC", tmp_path / "m", norm)
    recordings = random_models.recordings()
    node = opened(tmp_path, "automatic-speech-recognition")
    whole = node.run(Batch({"audio": recordings}))["text"]
    own = pipeline(tmp_path, "automatic-speech-recognition")
    wanted = [own(recording.copy())["text"] for recording in recordings]
    assert whole == wanted and len(set(wanted)) > 2
    assert [node.run(Batch({"audio": [recording]}))["text"][0] for recording in recordings] == wanted


@pytest.mark.parametrize("kind", ["ast", "layer", "group"])
def test_a_recording_that_is_too_short_fails_alone(tmp_path: Path, kind: str) -> None:
    save(kind, tmp_path / "m", **SOUNDS)
    node = opened(tmp_path, "audio-classification")
    least = 400 if kind == "ast" else 10 + 5 * (8 - 1) + 20 * (4 - 1)
    short, just = np.zeros(least - 1, np.float32), np.ones(least, np.float32)
    found = node.run(Batch({"audio": [short, just, short[:0]]}))
    for port in ("label", "scores"):
        assert [isinstance(one, InputError) for one in found[port]] == [True, False, True]
    assert isinstance(node.run(Batch({"audio": [short]}))["label"][0], InputError)


def test_an_extractor_of_another_sample_rate_is_refused(tmp_path: Path) -> None:
    folder = save("layer", tmp_path / "m", **SOUNDS)
    path = folder / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "sampling_rate": 8000}))
    assert "8000 samples per second" in refused(tmp_path, "audio-classification").found
    path.unlink()
    assert refused(tmp_path, "audio-classification").found == "m has no preprocessor_config.json"


def test_models_of_recordings_are_not_taken_for_those_of_texts(tmp_path: Path) -> None:
    save("layer", tmp_path / "m", **SOUNDS)
    with pytest.raises(ConfigError) as caught:
        Classify.ports(ClassifyConfig("m"), StepContext(tmp_path))
    assert "`task: audio-classification`" in caught.value.fix
    error = refused(tmp_path, "automatic-speech-recognition")
    assert "labels recordings" in error.found and "`task: audio-classification`" in error.fix
    folder = random_models.save_wav2vec2("Wav2Vec2ForCTC", tmp_path / "n" / "m", "layer")
    assert "`task: automatic-speech-recognition`" in refused(tmp_path / "n", "audio-classification").fix
    (folder / "vocab.json").unlink()
    for path in folder.glob("tokenizer.json"):
        path.unlink()
    assert refused(tmp_path / "n", "automatic-speech-recognition").found == "m has no tokenizer"


@pytest.mark.parametrize("kind", ["Wav2Vec2ForCTC", "Wav2Vec2ForSequenceClassification"])
def test_weights_may_lack_what_only_training_uses(tmp_path: Path, kind: str) -> None:
    folder = random_models.save_wav2vec2(kind, tmp_path / "m", "layer", **SOUNDS)
    task = "automatic-speech-recognition" if kind.endswith("CTC") else "audio-classification"
    batch = Batch({"audio": random_models.recordings()})
    wanted = opened(tmp_path, task).run(batch)
    random_models.drop(folder, "wav2vec2.masked_spec_embed")
    assert opened(tmp_path, task).run(batch) == wanted
    random_models.drop(folder, "wav2vec2.feature_projection.projection.weight")
    with pytest.raises(ModelError, match="projection"):
        opened(tmp_path, task)


def test_older_names_of_normalised_weights_are_read(tmp_path: Path) -> None:
    folder = random_models.save_wav2vec2("Wav2Vec2ForCTC", tmp_path / "m", "layer")
    batch, task = Batch({"audio": random_models.recordings()}), "automatic-speech-recognition"
    wanted = opened(tmp_path, task).run(batch)
    state = load_file(folder / "model.safetensors")
    older = {name.replace("parametrizations.weight.original0", "weight_g"): one for name, one in state.items()}
    older = {name.replace("parametrizations.weight.original1", "weight_v"): one for name, one in older.items()}
    assert any(name.endswith("weight_g") for name in older)
    save_file(older, folder / "model.safetensors", metadata={"format": "pt"})
    assert opened(tmp_path, task).run(batch) == wanted
