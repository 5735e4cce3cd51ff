"""Whisper networks of CTranslate2, run by faster-whisper, without torch.

A folder of CTranslate2 holds model.bin, config.json, vocabulary.json or .txt, and tokenizer.json of the original model.
model.bin is no pickle: names, shapes and numbers of variables one after the other (ctranslate2.specs.model_spec).
Its sizes are read and validated here before CTranslate2 opens it. Spectrograms, tokens and words are faster-whisper's.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from weftline.errors import MissingPackage, ModelError, first_line
from weftline.nodes.contract import ConfigError, OpenContext
from weftline.nodes.device_tensors import as_array
from weftline.nodes.hugging_face import read_json
from weftline.nodes.model_limits import JSON_BYTES_MAX, check_json_files, open_file, read_bytes
from weftline.nodes.ports import AUDIO_HZ
from weftline.nodes.tokenizer_trial import try_tokenizer
from weftline.nodes.whisper_decoding import HOP, Found, Recording, Search, mel_frames
from weftline.nodes.whisper_file import LANGUAGES, RANGES, VOCABULARIES, VOCABULARY_MIN, is_head

FILE = "model.bin"

PRECISIONS = ("float32", "bfloat16", "float16", "int8")
"""Of option `precision`, those that CTranslate2 computes in; the file may hold another one."""

VERSION = 6
"""Version of the file format that CTranslate2 has written since it has Whisper."""

VOCABULARY_BYTES_MAX = 4 << 20
"""Largest vocabulary.txt; those of Whisper take 0.5 MB."""

VARIABLES_MAX = 100_000
NAME_BYTES_MAX = 1000
RANK_MAX = 8

ITEM_BYTES = {0: 4, 1: 1, 2: 2, 3: 4, 4: 2, 5: 2}
"""Bytes of a number by its type's code: float32, int8, int16, int32, float16, bfloat16."""

START = "<|startoftranscript|>"

CONTROLS = {"<|translate|>": 1507, "<|transcribe|>": 1506, "<|startoflm|>": 1505, "<|startofprev|>": 1504,
            "<|notimestamps|>": 1502}  # fmt: skip
"""Control tokens, by their distance from the end of a vocabulary, which is 1501 timestamps in all of VOCABULARIES."""

N_FFT = 400
"""Samples of a spectrogram's window."""

PREPENDED, APPENDED = "\"'“¿([{-", "\"'.。,，!！?？:：”)]}、"
"""Punctuation that belongs to the next word, and to the word before: the defaults of openai-whisper."""

SHAPES = {
    "bands": ("encoder/conv1/weight", 1), "positions": ("encoder/position_encodings/encodings", 0),
    "text_context": ("decoder/position_encodings/encodings", 0), "vocabulary": ("decoder/embeddings/weight", 0),
    "text_heads": ("decoder/num_heads", 0),
}  # fmt: skip
"""Of each field of Sizes, the variable and the axis that have it; a number without axes counts as its only one."""

DIMS = {"bands": "n_mels", "positions": "n_audio_ctx", "text_context": "n_text_ctx", "text_heads": "n_text_head"}
"""Of fields of Sizes, the same in openai-whisper's dims."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a model: mel bands, positions of encoder and decoder, tokens, and layers and heads of the decoder."""

    bands: int
    positions: int
    text_context: int
    vocabulary: int
    text_heads: int
    text_layers: int

    @property
    def multilingual(self) -> bool:
        return self.vocabulary > VOCABULARY_MIN

    @property
    def languages(self) -> int:
        """Number of languages, those first in LANGUAGES."""
        return self.vocabulary - VOCABULARY_MIN + len(LANGUAGES) - 1 - self.multilingual

    @property
    def start(self) -> int:
        """Token of START."""
        return 50_257 + self.multilingual


def is_ctranslate2(path: Path) -> bool:
    """Return whether a path is a folder with a model of CTranslate2."""
    return (path / FILE).is_file() and not (path / "model.pt").is_file()


def check_folder(folder: Path, shown: str, words: bool) -> Sizes:
    """Return the sizes of a model in CTranslate2's folder; ConfigError when it is no Whisper that can be opened.

    words: it must have the attention heads that align words.
    """
    try:
        sizes = read_sizes(folder / FILE)
    except (OSError, ValueError) as error:
        expected = "a Whisper model that CTranslate2 has converted"
        raise ConfigError("model", f"{shown}/{FILE}: {error}", expected) from None
    if sizes.vocabulary not in VOCABULARIES:
        found = f"{shown}/{FILE} has {sizes.vocabulary} tokens"
        raise ConfigError("model", found, f"one of Whisper's vocabularies, {', '.join(map(str, VOCABULARIES))}")
    for field, own in DIMS.items():
        low, high = RANGES[own]
        if not low <= getattr(sizes, field) <= high:
            found = f"{field.replace('_', ' ')} of {shown}/{FILE} are {getattr(sizes, field)}"
            raise ConfigError("model", found, f"from {low} to {high}")
    check_json_files(folder, shown)
    _check_config(folder, shown, sizes, words)
    _check_tokens(folder, shown, sizes)
    return sizes


def _check_config(folder: Path, shown: str, sizes: Sizes, words: bool) -> None:
    """Raise ConfigError for settings that CTranslate2 uses as indices unchecked, or that claim memory."""
    config = read_json(folder / "config.json", f"{shown}/config.json")
    if not isinstance(config, dict):
        raise ConfigError(
            "model", f"the folder {shown} has {FILE} and no config.json", "both, as CTranslate2 writes them"
        )
    for name in ("suppress_ids_begin", "lang_ids"):
        tokens = config.get(name, "")  # null means none
        if tokens is not None and not _are_tokens(tokens, sizes.vocabulary):
            found = f"{shown}/config.json has " + (f"{name} {tokens!r:.60}" if name in config else f"no {name}")
            expected = f"{name}: a list of tokens below {sizes.vocabulary}, as CTranslate2 writes it"
            raise ConfigError("model", found, expected, "convert the model again")
    heads, most = config.get("alignment_heads"), [sizes.text_layers, sizes.text_heads]
    if words and not _are_heads(heads, most):
        found = f"alignment_heads in {shown}/config.json are {heads!r:.60}"
        expected = f"pairs of a layer below {most[0]} and a head below {most[1]}, each once"
        raise ConfigError("model", found, expected, "convert the model again, or set `timestamps: segment`")
    file = "preprocessor_config.json"
    read = read_json(folder / file, f"{shown}/{file}")
    spectrogram = read if isinstance(read, dict) else {}
    wanted = {"feature_size": sizes.bands, "n_fft": N_FFT, "hop_length": HOP, "sampling_rate": AUDIO_HZ}
    wrong = [name for name, value in wanted.items() if spectrogram.get(name, value) != value]
    if read is not None and not isinstance(read, dict):
        raise ConfigError("model", f"{shown}/{file} is no JSON object")
    if wrong:
        found = f"{wrong[0]} in {shown}/{file} is {spectrogram[wrong[0]]!r:.40}"
        raise ConfigError("model", found, str(wanted[wrong[0]]), "copy the file from the original model, or remove it")


def _check_tokens(folder: Path, shown: str, sizes: Sizes) -> None:
    """Raise ConfigError unless the vocabulary and the tokenizer have Whisper's control tokens at their places."""
    words = _vocabulary(folder, shown)
    if words[sizes.start : sizes.start + 1] != [START]:
        found = f"the vocabulary of {shown} has no {START} at {sizes.start}"
        raise ConfigError("model", found, "the file that CTranslate2 wrote with the model")
    tokenizer = read_json(folder / "tokenizer.json", f"{shown}/tokenizer.json", JSON_BYTES_MAX)
    added = tokenizer.get("added_tokens") if isinstance(tokenizer, dict) else None
    listed = [one for one in added if isinstance(one, dict)] if isinstance(added, list) else []
    known = {str(one.get("content")): one.get("id") for one in listed}
    wanted = {START: sizes.start, **{token: sizes.vocabulary - place for token, place in CONTROLS.items()}}
    wrong = [token for token, place in wanted.items() if known.get(token) != place]
    if wrong:
        place = known.get(wrong[0])
        found = "is missing" if tokenizer is None else f"has {wrong[0]} at {place}" if place else f"has no {wrong[0]}"
        expected = f"the tokenizer of the original Whisper model, with {wrong[0]} at {wanted[wrong[0]]}"
        fix = "copy it from the original model, or convert with --copy_files tokenizer.json"
        raise ConfigError("model", f"{shown}/tokenizer.json {found}", expected, fix)


def _vocabulary(folder: Path, shown: str) -> list[Any]:
    """Return the tokens of vocabulary.json or vocabulary.txt in their order; ConfigError when there is neither."""
    words = read_json(folder / "vocabulary.json", f"{shown}/vocabulary.json", JSON_BYTES_MAX)
    if words is None:
        try:
            return read_bytes(folder / "vocabulary.txt", VOCABULARY_BYTES_MAX).decode("utf-8", "replace").split("\n")
        except (OSError, ValueError):
            pass
    if not isinstance(words, list):
        found = f"the folder {shown} has no vocabulary.json" + ("" if words is None else " that is a list")
        raise ConfigError("model", found, "all files that CTranslate2 wrote")
    return words


def _are_tokens(tokens: Any, vocabulary: int) -> bool:
    return isinstance(tokens, list) and all(type(one) is int and 0 <= one < vocabulary for one in tokens)


def _are_heads(heads: Any, most: list[Any]) -> bool:
    """Return whether `heads` are different pairs of a layer and a head below `most`, the counts of both."""
    known = isinstance(heads, list) and all(is_head(head, most) for head in heads)
    return known and 0 < len({tuple(head) for head in heads}) == len(heads)


def read_sizes(path: Path) -> Sizes:
    """Return the sizes of a model in a file of CTranslate2; ValueError unless it is a whole file of a Whisper."""
    with open_file(path) as file:
        end = file.seek(0, 2)
        file.seek(0)
        try:
            version = _number(file, "I")
            if version != VERSION:
                raise ValueError(f"its first 4 bytes are no version of CTranslate2's format, {VERSION}")
            name = _text(file)
            if name != "WhisperSpec":
                raise ValueError(f"it holds a {name!r:.60}, expected a WhisperSpec")
            _number(file, "I")  # revision of the spec
            shapes = dict(_variable(file) for _ in range(_count(file)))
            for _ in range(_count(file)):  # aliases
                _text(file), _text(file)
        except (struct.error, UnicodeDecodeError):
            raise ValueError("it ends early, or its headers are damaged") from None
        if file.tell() != end:
            raise ValueError(f"it has {end - file.tell()} bytes after its last variable")
    missing = [variable for variable, axis in SHAPES.values() if len(shapes.get(variable, ())) <= axis]
    if missing:
        raise ValueError(f"it has no {missing[0]}")
    layers = {found[1] for variable in shapes if (found := re.match(r"decoder/layer_(\d+)/", variable))}
    sizes = {field: shapes[variable][axis] for field, (variable, axis) in SHAPES.items()}
    return Sizes(**sizes, text_layers=len(layers))


def _variable(file: IO[bytes]) -> tuple[str, tuple[int, ...]]:
    """Read a variable and return its name and shape, or the value of a whole number without axes as a shape."""
    name, rank = _text(file), _number(file, "B")
    if rank > RANK_MAX:
        raise ValueError(f"{name} has {rank} dimensions")
    shape = tuple(_number(file, "I") for _ in range(rank))
    kind, size = _number(file, "B"), _number(file, "I")
    if size != math.prod(shape) * ITEM_BYTES.get(kind, -1):
        raise ValueError(f"{name} of shape {shape} and type {kind} has {size} bytes")
    if rank == 0 and kind in (1, 2, 3):
        return name, (int.from_bytes(file.read(size), "little"),)
    file.seek(size, 1)
    return name, shape


def _number(file: IO[bytes], kind: str) -> int:
    (value,) = struct.unpack(f"<{kind}", file.read(struct.calcsize(f"<{kind}")))
    return int(value)


def _count(file: IO[bytes]) -> int:
    count = _number(file, "I")
    if count > VARIABLES_MAX:
        raise ValueError(f"it claims {count} variables")
    return count


def _text(file: IO[bytes]) -> str:
    size = _number(file, "H")
    data = file.read(size)
    if not 0 < size <= NAME_BYTES_MAX or len(data) < size:
        raise ValueError("it ends early, or its headers are damaged")
    return data[:-1].decode()  # without the zero at its end


class CTranslate2Network:
    """A network of CTranslate2 with faster-whisper's tokenizer, spectrograms and alignment.

    precision: one of PRECISIONS, or 'auto': that of the stored weights as far as the device has it.
    words:     `align` will be called.
    """

    def __init__(self, folder: Path, shown: str, context: OpenContext, precision: str, words: bool) -> None:
        try:
            import ctranslate2
            from faster_whisper import WhisperModel
            from faster_whisper.feature_extractor import FeatureExtractor
            from faster_whisper.tokenizer import Tokenizer
            from faster_whisper.transcribe import get_suppressed_tokens
        except ImportError:
            raise MissingPackage("faster-whisper", "faster-whisper") from None
        sizes = check_folder(folder, shown, words)
        try_tokenizer(folder, shown)
        device, _, index = context.framework_device.partition(":")
        has = ctranslate2.get_supported_compute_types(device, int(index or 0))
        if precision not in ("auto", *has):
            one = ", ".join(["auto", *(name for name in PRECISIONS if name in has)])
            raise ModelError(f"precision: found {precision}, expected what CTranslate2 has on {device}: {one}")
        context.progress("reading weights", 0.2)
        try:
            self.model: Any = WhisperModel(
                str(folder),
                device=device,
                device_index=int(index or 0),
                compute_type="default" if precision == "auto" else precision,
                cpu_threads=max(context.threads, 1),
                local_files_only=True,
            )
        except Exception as error:  # RuntimeError, ValueError, and those of tokenizers
            raise ModelError(f"{shown}: {first_line(error)}") from None
        self._views, self._tokenizer = ctranslate2, Tokenizer
        self._spectrogram = FeatureExtractor(feature_size=sizes.bands)
        self._bands = sizes.bands
        self.multilingual = bool(self.model.model.is_multilingual)
        self.languages = int(self.model.model.num_languages)
        self.positions, self.text_context = sizes.positions, sizes.text_context
        self.model.max_length = sizes.text_context  # of prompts
        self._suppressed = list(get_suppressed_tokens(self.tokenizer(Recording(None, "en", "transcribe")), [-1]))

    def samples(self, recording: Any) -> np.ndarray:
        return recording if isinstance(recording, np.ndarray) else as_array(recording)

    def mels(self, pieces: Sequence[np.ndarray]) -> np.ndarray:
        window = 2 * self.positions * HOP
        return np.stack([self._mel(np.pad(piece, (0, window - len(piece)))) for piece in pieces])

    def own_mels(self, pieces: Sequence[np.ndarray]) -> list[np.ndarray]:
        reach = self._spectrogram.n_fft  # samples after a window into which the transform of its last frame reaches
        return [self._mel(np.pad(piece, (0, reach)))[:, : mel_frames(len(piece))] for piece in pieces]

    def padded(self, mels: Sequence[np.ndarray]) -> np.ndarray:
        made = np.zeros((len(mels), self._bands, 2 * self.positions), np.float32)
        for row, mel in zip(made, mels, strict=True):
            row[:, : mel.shape[1]] = mel
        return made

    def encode(self, mels: np.ndarray) -> Any:
        if self.model.model.device != "cpu":
            return self.model.encode(mels)
        # One window at a time: its activations stay in the processor's cache.
        states = [self._on_host(self.model.encode(mel[None])) for mel in mels]
        return self._views.StorageView.from_array(np.concatenate(states))

    def rows(self, states: Any) -> Sequence[Any]:
        return [self._views.StorageView.from_array(row[None]) for row in self._on_host(states)]

    def detect(self, states: Any, rows: Sequence[int]) -> list[str]:
        found = self.model.model.detect_language(states)
        return [found[row][0][0].strip("<|>") for row in rows]

    def search(self, states: Any, recordings: Sequence[Recording], search: Search) -> Sequence[Found]:
        prompts = [self._first_tokens(recording, search) for recording in recordings]
        known = max(map(len, prompts))
        most = max(2 * search.tokens_max, known - 1 + search.tokens_max)  # a half of it limits the answer too
        found = self.model.model.generate(
            states,
            prompts,
            beam_size=search.beams,
            max_length=min(most, self.text_context),
            suppress_tokens=self._suppressed,
            return_scores=True,
            return_no_speech_prob=True,
        )
        return [self._result(recording, one) for recording, one in zip(recordings, found, strict=True)]

    def tokenizer(self, recording: Recording) -> Any:
        return self._tokenizer(self.model.hf_tokenizer, self.multilingual, recording.task, recording.language)

    def align(
        self, row: Any, recording: Recording, segments: list[dict[str, Any]], frames: int, spoken_s: float
    ) -> None:
        tokenizer = self.tokenizer(recording)
        if not any(token < tokenizer.eot for segment in segments for token in segment["tokens"]):
            for segment in segments:
                segment["words"] = []
            return
        self.model.add_word_timestamps([segments], tokenizer, row, [frames], PREPENDED, APPENDED, spoken_s)

    def sleep(self) -> None:
        self.model.model.unload_model(to_cpu=True)

    def wake(self) -> None:
        self.model.model.load_model()

    def _on_host(self, states: Any) -> np.ndarray:
        return np.array(states.to_device(self._views.Device.cpu).to(self._views.DataType.float32))

    def _mel(self, samples: np.ndarray) -> np.ndarray:
        mel: np.ndarray = self._spectrogram(samples, padding=0)
        return mel.astype(np.float32, copy=False)

    def _first_tokens(self, recording: Recording, search: Search) -> list[int]:
        tokenizer = self.tokenizer(recording)
        before = tokenizer.encode(f" {search.prompt.strip()}") if search.prompt else []
        tokens: list[int] = self.model.get_prompt(tokenizer, before, without_timestamps=not search.timestamps)
        return tokens

    def _result(self, recording: Recording, found: Any) -> Found:
        tokens = found.sequences_ids[0]
        score = found.scores[0] * len(tokens) / (len(tokens) + 1)  # the end token counts, as in openai-whisper
        text = self.tokenizer(recording).decode(tokens).strip()
        return Found(tokens, text, found.no_speech_prob, score)
