"""Tasks on recordings: audio-classification, automatic-speech-recognition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weftline.errors import InputError
from weftline.nodes.classify import columns, independent, probable_labels, to_probabilities
from weftline.nodes.contract import Batch, ConfigError, Outputs, StepContext
from weftline.nodes.hugging_face import AUDIO_CLASSIFICATION, CTC, check_tokenizer, read_json
from weftline.nodes.ports import AUDIO_HZ, Ports, port
from weftline.nodes.transformers_tasks.task import (
    LABEL_OUTPUTS,
    Model,
    Task,
    TransformersConfig,
    check_preprocessor,
    check_top_k,
    label_outputs,
    label_ports,
)

_WINDOW = 400
"""Samples of the 25 ms window of a spectrogram at 16 kHz: a shorter recording has none."""

_MASKED_IN_TRAINING = (
    "data2vec_audio", "hubert", "sew", "sew_d", "unispeech", "unispeech_sat", "wav2vec2", "wav2vec2_bert",
    "wav2vec2_conformer", "wavlm",
)  # fmt: skip
"""Models with an embedding of masked frames, by the prefix of their tensors: it is for training only."""


class RecordingTask(Task):
    """A task whose inputs are prepared by a feature extractor."""

    processor = "AutoFeatureExtractor"
    unused = tuple(f"{name}.masked_spec_embed" for name in _MASKED_IN_TRAINING)

    def __init__(self, config: TransformersConfig, model: Model) -> None:
        super().__init__(config, model)
        _check_rate(self._extractor.sampling_rate, model.shown)
        self._least = least_samples(model.config)
        self._masked = model.config.get("feat_extract_norm") == "layer"  # models trained with a mask of the padding

    @classmethod
    def check_files(cls, folder: Path, shown: str) -> None:
        check_preprocessor(folder, shown, "feature_extractor", "AutoFeatureExtractor")
        settings = read_json(folder / "preprocessor_config.json", f"{shown}/preprocessor_config.json")
        if isinstance(settings, dict):
            _check_rate(settings.get("sampling_rate", AUDIO_HZ), shown)

    def warm_up(self) -> None:
        self.run(Batch({"audio": [np.zeros(AUDIO_HZ, np.float32)]}))

    def _calls(self, recordings: Sequence[np.ndarray], items: Sequence[int]) -> Iterator[tuple[list[int], Any]]:
        """Yield positions of recordings, and the output of one call for them.

        Padded recordings share a call where the model was trained with a mask, else recordings of one length do.
        """
        if not items:
            return
        if self._masked:
            found = self._extracted([recordings[item] for item in items], padding=True, return_attention_mask=True)
            yield list(items), self.model(found)
            return
        alone = [self._extracted([recordings[item]]) for item in items]
        columns = {name: [one[name][0] for one in alone] for name in alone[0]}
        for places, output in self.model.grouped(columns):
            yield [items[place] for place in places], output

    def _extracted(self, recordings: Sequence[np.ndarray], **options: Any) -> Any:
        arrays = [np.array(samples) for samples in recordings]  # a copy: extractors may write
        return self._extractor(arrays, sampling_rate=AUDIO_HZ, return_tensors="pt", **options)

    def _sound(self, recordings: Sequence[np.ndarray], found: list[Any]) -> list[int]:
        """Return the positions of recordings that are long enough; in `found`, the others get their error."""
        short = [place for place, samples in enumerate(recordings) if len(samples) < self._least]
        for place in short:
            found[place] = InputError(f"the recording has {len(recordings[place])} samples, expected {self._least}")
        return [place for place in range(len(recordings)) if place not in short]

    @property
    def _extractor(self) -> Any:
        return self.model.processor


def least_samples(config: Mapping[str, Any]) -> int:
    """Return the samples of the shortest recording that gives a model one frame."""
    kernels, strides = config.get("conv_kernel"), config.get("conv_stride")
    if not isinstance(kernels, list | tuple) or not isinstance(strides, list | tuple):
        return _WINDOW
    least = 1
    for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
        least = (least - 1) * int(stride) + int(kernel)
    return least


def _check_rate(rate: Any, shown: str) -> None:
    if rate != AUDIO_HZ:
        found = f"{shown} wants {rate!r:.20} samples per second"
        raise ConfigError("model", found, f"a model for {AUDIO_HZ}, which audio values have")


class AudioClassification(RecordingTask):
    """Labels of a whole recording."""

    name = "audio-classification"
    auto_class = "AutoModelForAudioClassification"
    kinds = (AUDIO_CLASSIFICATION,)
    expected = "a model that labels recordings (...ForAudioClassification, Wav2Vec2ForSequenceClassification)"
    options = ("top_k",)

    def __init__(self, config: TransformersConfig, model: Model) -> None:
        super().__init__(config, model)
        self._labels, self._independent = probable_labels(model.config, model.shown), independent(model.config)

    @classmethod
    def check_config(cls, found: Mapping[str, Any], shown: str) -> None:
        probable_labels(found, shown)

    @classmethod
    def ports(cls, config: TransformersConfig, found: Mapping[str, Any] | None, step: StepContext) -> Ports:
        check_top_k(config)
        labels = () if found is None else probable_labels(found, config.model)
        return Ports((port("audio", "audio", about="the recording"),), label_ports(labels))

    def run(self, batch: Batch) -> Outputs:
        answers: list[Any] = [None] * len(batch)
        for items, output in self._calls(batch["audio"], self._sound(batch["audio"], answers)):
            rows = to_probabilities(output.logits.float().cpu().numpy(), self._independent)
            found = label_outputs(self._labels, rows, self.config.top_k)
            for place, item in enumerate(items):
                answers[item] = {name: found[name][place] for name in LABEL_OUTPUTS}
        return columns(answers, LABEL_OUTPUTS)


class SpeechRecognition(RecordingTask):
    """Transcript by connectionist temporal classification (CTC), without a language model."""

    name = "automatic-speech-recognition"
    auto_class = "AutoModelForCTC"
    processor = "AutoProcessor"
    kinds = (CTC,)
    expected = "a model that transcribes by CTC (...ForCTC)"

    @classmethod
    def ports(cls, config: TransformersConfig, found: Mapping[str, Any] | None, step: StepContext) -> Ports:
        return Ports((port("audio", "audio", about="the recording"),), (port("text", "text", about="the transcript"),))

    @classmethod
    def check_files(cls, folder: Path, shown: str) -> None:
        super().check_files(folder, shown)
        check_tokenizer(folder, shown)

    def run(self, batch: Batch) -> Outputs:
        recordings = batch["audio"]
        texts: list[Any] = [None] * len(batch)
        for items, output in self._calls(recordings, self._sound(recordings, texts)):
            for item, tokens in zip(items, output.logits.argmax(dim=-1).cpu(), strict=True):
                frames = self._frames(len(recordings[item])) if self._masked else len(tokens)
                texts[item] = self.model.processor.tokenizer.decode(tokens[:frames])
        return {"text": texts}

    def _frames(self, samples: int) -> int:
        """Return the frames of a recording; those behind are of padding."""
        return int(self.model.network._get_feat_extract_output_lengths(samples))

    @property
    def _extractor(self) -> Any:
        return self.model.processor.feature_extractor
