"""Task text-to-speech: VITS (J. Kim et al., 2021), and so Meta's MMS voices."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from weftline.errors import InputError
from weftline.nodes.audio import resample
from weftline.nodes.contract import Batch, ConfigError, Outputs, StepContext
from weftline.nodes.hugging_face import SPEECH, check_tokenizer, read_json
from weftline.nodes.ports import AUDIO_HZ, Ports, port
from weftline.nodes.transformers_tasks.task import Model, Task, TransformersConfig

CHARS_MAX = 4096
"""Longest text of an item, as in OpenAI's API."""

SPEEDS = (0.25, 4.0)
"""Least and largest value of option and input `speed`, as in OpenAI's API."""

_PACKAGES = {
    "phonemize": ("phonemizer", "converts text to phonemes (GPL-3.0, and it needs the program espeak-ng, GPL-3.0)"),
    "is_uroman": ("uroman", "converts other scripts to Latin letters"),
}
"""Settings of a tokenizer that need a package, and what for."""


class TextToSpeech(Task):
    """Speech from a text.

    Each text is a call of its own, because the decoder's convolutions read the padding. The model's noise is drawn
    from `seed` for every text, so that equal texts give equal recordings.
    """

    name = "text-to-speech"
    auto_class = "AutoModelForTextToWaveform"
    processor = "AutoTokenizer"
    kinds = (SPEECH,)
    expected = "a VITS model (VitsModel)"
    options = ("speed", "speaker", "seed")
    unused = ("posterior_encoder.",)

    def __init__(self, config: TransformersConfig, model: Model) -> None:
        super().__init__(config, model)
        self._rate_hz = int(model.config["sampling_rate"])
        self._rate = float(model.config["speaking_rate"]) * (config.speed or 1.0)

    @classmethod
    def ports(cls, config: TransformersConfig, found: Mapping[str, Any] | None, step: StepContext) -> Ports:
        least, most = SPEEDS
        if config.speed is not None and not least <= config.speed <= most:
            raise ConfigError("speed", f"{config.speed}", f"from {least} to {most:g}")
        if config.seed is not None and not 0 <= config.seed < 1 << 63:
            raise ConfigError("seed", f"{config.seed}", "a whole number from 0")
        if found is not None:
            _check_speaker(config, found)
        speed = f"a number from {least} to {most:g} that multiplies the speed"
        return Ports(
            (port("text", "text"), port("speed", "json", optional=True, about=speed)),
            (port("audio", "audio", about="the recording, resampled to 16 kHz"),),
        )

    @classmethod
    def check_config(cls, found: Mapping[str, Any], shown: str) -> None:
        rate = found.get("sampling_rate", AUDIO_HZ)
        if type(rate) is not int or not 1000 <= rate <= 192_000:
            raise ConfigError("model", f"{shown}: sampling_rate is {rate!r:.40}", "a rate in Hz")

    @classmethod
    def check_files(cls, folder: Path, shown: str) -> None:
        check_tokenizer(folder, shown)
        file = "tokenizer_config.json"
        settings = read_json(folder / file, f"{shown}/{file}")
        settings = {"phonemize": True} | settings if isinstance(settings, dict) else {}
        for setting, (package, purpose) in _PACKAGES.items():
            if settings.get(setting) and importlib.util.find_spec(package) is None:
                found = f"{shown}/{file} has {setting}: package {package}, which {purpose}, is not installed"
                fix = f"pip install {package}, or name a model that reads plain letters, such as those of MMS"
                raise ConfigError("model", found, "", fix)

    def warm_up(self) -> None:
        tokenizer = self.model.processor
        self._speak(tokenizer.convert_ids_to_tokens(tokenizer.vocab_size - 1), 1.0)

    def run(self, batch: Batch) -> Outputs:
        speeds = batch.get("speed")
        return {"audio": [self._item(text, speed) for text, speed in zip(batch["text"], speeds, strict=True)]}

    def _item(self, text: str, speed: Any) -> np.ndarray | InputError:
        """Return float32[samples] at 16 kHz, or the reason why there is none."""
        speed = 1.0 if speed is None else speed
        least, most = SPEEDS
        if type(speed) not in (int, float) or not least <= speed <= most:
            return InputError(f"speed: expected a number from {least} to {most:g}, found {speed!r:.40}")
        if len(text) > CHARS_MAX:
            return InputError(f"the text has {len(text)} characters, expected at most {CHARS_MAX}")
        return self._speak(text, float(speed))

    def _speak(self, text: str, speed: float) -> np.ndarray | InputError:
        import torch

        inputs = self.model.processor(text, return_tensors="pt")
        if not (inputs["input_ids"] > 0).any():  # 0 separates characters
            return InputError("the text has no character that the model can read")
        options = {} if self.config.speaker is None else {"speaker_id": self.config.speaker}
        torch.manual_seed(self.config.seed or 0)
        found = self.model(inputs, speaking_rate=self._rate * speed, **options)
        return resample(found.waveform[0].float().cpu().numpy(), self._rate_hz, AUDIO_HZ)


def _check_speaker(config: TransformersConfig, found: Mapping[str, Any]) -> None:
    """Raise ConfigError unless option `speaker` numbers a speaker of a model that has several."""
    speakers = found.get("num_speakers", 1)
    speakers = speakers if type(speakers) is int else 1
    if speakers > 1 and config.speaker is None:
        raise ConfigError("speaker", "there is none", f"a number from 0 to {speakers - 1}", "write speaker: 0")
    if config.speaker is not None and (speakers == 1 or not 0 <= config.speaker < speakers):
        expected = "no speaker: the model has one" if speakers == 1 else f"a number from 0 to {speakers - 1}"
        raise ConfigError("speaker", f"{config.speaker}", expected)
