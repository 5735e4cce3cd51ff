"""Whisper node: speech recognition (A. Radford et al., 2022), run by openai-whisper or by CTranslate2.

Checkpoints of openai-whisper, Hugging Face or CTranslate2 of any size work. The window length follows the model's own
sizes and may be below 30 s. A longer recording is cut into windows where speech is (`voice_activity.py`), and the texts
are joined. The windows of all items of a batch are decoded together (`whisper_decoding.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np

from weftline.errors import InputError
from weftline.fields import REQUEST
from weftline.node import (
    AUDIO_HZ,
    Batch,
    BatchNode,
    ConfigError,
    MissingPackage,
    ModelError,
    OpenContext,
    Outputs,
    Ports,
    StepContext,
    as_array,
    port,
)
from weftline.nodes.contract import model_error
from weftline.nodes.hugging_face import is_path
from weftline.nodes.model_file import find_model, stored_bytes
from weftline.nodes.precision import PRECISIONS, check_precision
from weftline.nodes.subtitles import srt, vtt
from weftline.nodes.voice_activity import Span, speech_regions, speech_windows, split_windows
from weftline.nodes.whisper_ctranslate2 import PRECISIONS as CTRANSLATE2_PRECISIONS
from weftline.nodes.whisper_ctranslate2 import CTranslate2Network, check_folder, is_ctranslate2
from weftline.nodes.whisper_decoding import HOP, Network, Recording, Search, Window, WindowDecoder
from weftline.nodes.whisper_file import (
    KNOWN,
    LANGUAGES,
    PUBLISHED_TEXT_CONTEXT,
    check_whisper,
    english_only,
    load_whisper,
)
from weftline.nodes.whisper_torch import TorchNetwork

TASKS = ("transcribe", "translate")
TIMESTAMPS = ("none", "segment", "word")


@dataclass(frozen=True, slots=True)
class WhisperConfig:
    """Options of `whisper`.

    model:      a checkpoint (.pt), a folder with model.pt, a folder of Hugging Face's Whisper (config.json and
                *.safetensors), or one that CTranslate2 has converted (model.bin), relative to the pipeline file; or one
                of openai-whisper's names (tiny, base.en, large-v3, turbo ...), from its cache or downloaded by it with
                its checksum. A folder of CTranslate2 is run by faster-whisper and needs `weftline[faster-whisper]`.
    language:   spoken language, such as 'en'; 'auto': detected for each recording by a multilingual model. The optional
                input `language` overrides it.
    task:       'transcribe', or 'translate' into English (multilingual models). The optional input `task` overrides it.
    prompt:     text before the recording: names and spellings to expect. Of a longer one than half of the model's text
                context (224 tokens for published models), its end counts.
    beams:      width of the beam search; 1 is greedy.
    tokens_max: most tokens for one window, at most half of the model's text context; None means that half.
    precision:  number format of the network: 'auto' (float16 on a GPU, float32 on the CPU), 'float32', 'tf32' (GPUs
                only), 'bfloat16' or 'float16'. Compared with float32 on the CPU, with random weights in the sizes of
                'tiny', states of the encoder moved by 0.6 % in bfloat16 and 0.08 % in float16, and the likeliest next
                tokens were the same. TF32 was not measured. For a folder of CTranslate2: 'auto' (that of its weights,
                or the next one that the device has), 'float32', 'bfloat16', 'float16' or 'int8', where the device has
                it.
    timestamps: 'none': a segment is a window of the recording. 'segment': segments as the model divides its text.
                'word': these with their words. Both cost time: a window may be decoded more than once, and words need
                one more pass of the decoder.
    timestamp_tokens: false for a model that was trained without timestamps: a segment is a window then, also with
                words. Without effect on `timestamps: none`, which decodes without them.
    vad:        leave out the silence of a recording that is longer than the model's window; false: cut it only.
    no_speech_threshold: a window counts as silence and adds no text if its `no_speech` is above this probability and
                its `logprob` is not above `logprob_threshold`, as in openai-whisper's `transcribe`; null: none does.
    logprob_threshold: null: `no_speech_threshold` decides alone.
    """

    model: str
    language: Annotated[str, REQUEST] = "auto"
    task: Annotated[str, REQUEST] = "transcribe"
    prompt: str = ""
    beams: int = 1
    tokens_max: int | None = None
    precision: str = "auto"
    timestamps: str = "none"
    timestamp_tokens: bool = True
    vad: bool = True
    no_speech_threshold: float | None = 0.6
    logprob_threshold: float | None = -1.0


class Whisper(BatchNode):
    """Transcribes recordings."""

    Config: ClassVar[type[Any]] = WhisperConfig
    extra: ClassVar[str] = "whisper"
    heavy: ClassVar[bool] = True
    batch_default: ClassVar[tuple[int, float]] = (8, 5.0)
    mixed_options: ClassVar[bool] = True

    _network: Any = None  # a whisper_decoding.Network while the node is open
    _search: Search
    _items_max: int = 1

    @classmethod
    def ports(cls, config: WhisperConfig, step: StepContext) -> Ports:
        _check_model(config, step)
        _check_options(config)
        about = "for each segment: start and end in seconds, text, no_speech, logprob"
        words = "; with timestamps word: words, of word, start, end, probability"
        outputs = [
            port("text", "text", about="the transcript"),
            port("language", "text", about="code of the language, such as en; empty if a long recording has no speech"),
            port("segments", "json", about=about + (words if config.timestamps == "word" else "")),
        ]
        if config.timestamps != "none":
            outputs.append(port("srt", "text", about="with timestamps segment or word: subtitles in SubRip's format"))
            outputs.append(port("vtt", "text", about="with timestamps segment or word: subtitles in WebVTT's format"))
        return Ports(
            inputs=(
                port("audio", "audio", about="the recording"),
                port("language", "text", optional=True, about="code of the spoken language, or auto"),
                port("task", "text", optional=True, about="transcribe or translate"),
            ),
            outputs=tuple(outputs),
        )

    @classmethod
    def device_ports(cls, config: WhisperConfig, ports: Ports) -> frozenset[str]:
        return frozenset({"audio"})

    @classmethod
    def model_bytes(cls, config: WhisperConfig, step: StepContext) -> int:
        return stored_bytes(config.model, step.base_dir) // 4  # stored as float32, held as int8

    def open(self, context: OpenContext) -> None:
        config = self.config
        try:
            found = find_model(config.model, context.base_dir)
            if found is not None and is_ctranslate2(found):
                words = config.timestamps == "word"
                self._network = CTranslate2Network(found, config.model, context, config.precision, words)
            else:
                self._network = _torch_network(config, context)
            _check_languages(config, self._network.multilingual, self._network.languages)
        except ConfigError as error:
            raise model_error(error) from None
        half = self._network.text_context // 2  # the other half is for the prompt and the control tokens
        if (config.tokens_max or 0) > half:
            expected = f"expected at most {half}, half of the text context of {config.model}"
            raise ModelError(f"tokens_max: found {config.tokens_max}, {expected}")
        thresholds = config.no_speech_threshold, config.logprob_threshold
        self._search = Search(config.prompt, config.beams, config.tokens_max or half, self._segments, *thresholds)
        self._items_max = max(context.items_max, 1)

    def warm_up(self) -> None:
        one_second = np.zeros(min(AUDIO_HZ, self._window), np.float32)
        silence = self._recording(one_second, self.config.language, self.config.task)
        if isinstance(silence, Recording):
            self._decoder(replace(self._search, tokens_max=2, no_speech_threshold=None)).decode([silence])

    def run(self, batch: Batch) -> Outputs:
        wishes = zip(batch["audio"], batch.get("language"), batch.get("task"), self.configs(batch), strict=True)
        found = [
            self._recording(audio, language or own.language, task or own.task) for audio, language, task, own in wishes
        ]
        for position, one in enumerate(found):
            if isinstance(one, Recording):
                one.cancelled = partial(batch.cancelled, position)
        self._decoder(self._search).decode([one for one in found if isinstance(one, Recording)])
        answers = [_answer(one, self.config.timestamps) if isinstance(one, Recording) else one for one in found]
        names = ["text", "language", "segments", *(("srt", "vtt") if self.config.timestamps != "none" else ())]
        return {name: [one[name] if isinstance(one, dict) else one for one in answers] for name in names}

    def sleep(self, keep: str) -> bool:
        if keep != "host":
            return False
        self._network.sleep()
        return True

    def wake(self) -> None:
        self._network.wake()

    def close(self) -> None:
        self._network = None

    @property
    def _segments(self) -> bool:
        """Return True if the model divides its text into segments."""
        return bool(self.config.timestamps != "none" and self.config.timestamp_tokens)

    @property
    def _window(self) -> int:
        """Number of samples in one window of the model."""
        return int(self._network.positions) * 2 * HOP

    def _decoder(self, search: Search) -> WindowDecoder:
        return WindowDecoder(self._network, search, self._items_max, self._segments, self.config.timestamps == "word")

    def _recording(self, samples: Any, language: str, task: str) -> Recording | InputError:
        """Return a recording with its windows, or the reason why its request is refused."""
        try:
            recording = Recording(self._network.samples(samples), self._language(language), self._task(task))
        except InputError as error:
            return error
        recording.windows = [Window(recording, start, end) for start, end in self._cut(recording)]
        return recording

    def _language(self, wanted: str) -> str:
        """Return the code of a request's language; '': to be detected."""
        code = wanted.strip().lower()
        if code not in ("auto", *LANGUAGES[: self._network.languages]):
            raise InputError(
                f"language: found {code!r:.40}, expected a code such as en or de that the model has, or auto"
            )
        if not self._network.multilingual:
            if code not in ("auto", "en"):
                raise InputError(f"language: found {code!r}, but the model is English-only")
            return "en"
        return "" if code == "auto" else code

    def _task(self, task: str) -> str:
        if task not in TASKS:
            raise InputError(f"task: found {task!r:.40}, expected transcribe or translate")
        if task == "translate" and not self._network.multilingual:
            raise InputError("task: found translate, but the model is English-only")
        return task

    def _cut(self, recording: Recording) -> list[Span]:
        """Return the windows of a recording, and set its regions with speech where they are needed."""
        samples, window = recording.samples, self._window
        long = len(samples) > window
        if not (long or self._segments):
            return [(0, len(samples))]
        here = samples if isinstance(samples, np.ndarray) else as_array(samples)  # on the device: a copy
        if self.config.vad:
            recording.regions = speech_regions(here)
        if not long:
            return [(0, len(samples))]
        return (
            split_windows(here, window)
            if recording.regions is None
            else speech_windows(here, recording.regions, window)
        )


def _torch_network(config: WhisperConfig, context: OpenContext) -> Network:
    """Return the network of a checkpoint of openai-whisper or Hugging Face."""
    try:
        import torch
        import whisper  # noqa: F401
    except ImportError:
        raise MissingPackage("openai-whisper", Whisper.extra) from None
    device = context.framework_device
    if config.timestamps == "word":
        _compile_alignment(context.threads, device)
    torch.set_num_threads(max(context.threads, 1))  # numba's start overwrites it
    by_device = "float16" if device.startswith("cuda") else "float32"
    precision = by_device if config.precision == "auto" else config.precision
    return TorchNetwork(load_whisper(config.model, context, precision == "float16"), device, precision)


def _compile_alignment(threads: int, device: str) -> None:
    """Compile openai-whisper's alignment for float64 costs, and limit its threads."""
    import numba
    import torch
    from whisper.timing import dtw

    settings: Any = numba.config
    numba.set_num_threads(min(max(threads, 1), settings.NUMBA_NUM_THREADS))
    dtw(torch.zeros((2, 4), device=device))


def _check_model(config: WhisperConfig, step: StepContext) -> None:
    """Raise ConfigError for a model that is not there, is no Whisper, or lacks what the options need."""
    path = find_model(config.model, step.base_dir)
    if path is None and config.model not in KNOWN:
        expected = f"a file, a folder with model.pt, model.bin or config.json, or one of {', '.join(KNOWN)}"
        short = config.model.rpartition("/")[2].removeprefix("whisper-")
        fix = f"write {short}: names of the hub are not fetched" if short in KNOWN else ""
        if "/" in config.model and not fix and not is_path(config.model, step.base_dir):
            fix = f"for a model of the hub write hf://{config.model}@REVISION and run `weftline fetch`"
        raise ConfigError("model", f"there is no {config.model}", expected, fix)
    words = config.timestamps == "word"
    sizes = check_folder(path, config.model, words) if path is not None and is_ctranslate2(path) else None
    if path is not None and sizes is None:
        check_whisper(path, config.model)
    if config.language not in ("auto", *LANGUAGES):
        expected = "auto, or a code of Whisper's languages, such as en or de"
        raise ConfigError("language", f"{config.language!r:.40}", expected)
    if config.task not in TASKS:
        raise ConfigError("task", f"{config.task!r:.40}", "transcribe or translate")
    if sizes is not None:
        _check_languages(config, sizes.multilingual, sizes.languages)
    elif english_only(path, config.model):
        _check_languages(config, False, len(LANGUAGES))
    most = sizes.text_context if sizes is not None else PUBLISHED_TEXT_CONTEXT if path is None else None
    tokens_max = most // 2 if most is not None else None  # otherwise it is in the checkpoint
    if config.tokens_max is not None and not 1 <= config.tokens_max <= (tokens_max or config.tokens_max):
        expected = f"from 1 to {tokens_max}" if tokens_max else "a count from 1"
        raise ConfigError("tokens_max", f"{config.tokens_max}", expected)
    if config.precision == "int8" and sizes is None:
        expected = f"one of auto, {', '.join(PRECISIONS)}"
        raise ConfigError("precision", "'int8'", expected, "int8 needs a model in CTranslate2's format, with model.bin")
    check_precision(config.precision, ("auto", *(PRECISIONS if sizes is None else CTRANSLATE2_PRECISIONS)))


def _check_languages(config: WhisperConfig, multilingual: bool, languages: int) -> None:
    """Raise ConfigError for a language or a task that the model does not have."""
    fix = "name a multilingual model, such as base"
    if not multilingual and config.task != "transcribe":
        raise ConfigError("task", f"{config.task}, but {config.model} is English-only", "transcribe", fix)
    if not multilingual and config.language not in ("auto", "en"):
        raise ConfigError("language", f"{config.language}, but {config.model} is English-only", "en", fix)
    if config.language not in ("auto", *LANGUAGES[:languages]):
        raise ConfigError("language", f"{config.language}, which {config.model} does not have", "auto, or another one")


def _check_options(config: WhisperConfig) -> None:
    if config.beams < 1:
        raise ConfigError("beams", f"{config.beams}", "a count from 1")
    if config.timestamps not in TIMESTAMPS:
        raise ConfigError("timestamps", f"{config.timestamps!r:.40}", f"one of {', '.join(TIMESTAMPS)}")
    no_speech, logprob = config.no_speech_threshold, config.logprob_threshold
    if no_speech is not None and not 0 <= no_speech <= 1:
        raise ConfigError("no_speech_threshold", f"{no_speech}", "a probability from 0 to 1, or null")
    if logprob is not None and not -math.inf < logprob <= 0:
        raise ConfigError("logprob_threshold", f"{logprob}", "a log-likelihood of at most 0, or null")


def _answer(recording: Recording, timestamps: str) -> dict[str, Any]:
    segments = recording.segments
    answer = {"text": recording.text, "language": recording.language, "segments": segments}
    return answer if timestamps == "none" else answer | {"srt": srt(segments), "vtt": vtt(segments)}
