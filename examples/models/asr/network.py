"""A small network of openai-whisper's own classes, trained over the few tokens its sentences use.

Whisper's vocabulary has 51 864 tokens, the sentences here use about a hundred. So the network is trained with a
`Vocabulary` of the used tokens and one shared row that stands for all others: that row's logit counts as many times as
there are unused tokens (log(count) is added to it), which is exactly the softmax that the exported model computes, in
which every unused token gets a copy of the row. `export` writes the format that `whisper.load_model` reads.

While it trains, a second head reads letters off the encoder by CTC (Graves et al. 2006); it is not exported.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from whisper.audio import HOP_LENGTH, N_FFT, mel_filters
from whisper.model import ModelDimensions, Whisper
from whisper.tokenizer import Tokenizer, get_tokenizer

DIMS = ModelDimensions(
    n_mels=80, n_audio_ctx=400, n_audio_state=128, n_audio_head=4, n_audio_layer=3,
    n_vocab=51864, n_text_ctx=64, n_text_state=128, n_text_head=4, n_text_layer=2,
)  # fmt: skip
"""Hears 8 seconds: two spectrogram frames of 10 ms make one audio position."""

SAMPLES_PER_POSITION = 2 * HOP_LENGTH
LONGEST = DIMS.n_audio_ctx * SAMPLES_PER_POSITION
"""Most samples the model hears, at 16 kHz."""

LETTERS = " abcdefghijklmnopqrstuvwxyz"
"""What the CTC head spells; its blank is class 0, letter i of this string is class i + 1."""


def english_tokenizer() -> Tokenizer:
    """Return the stock tokenizer of English-only Whisper models; it comes with the package."""
    return get_tokenizer(multilingual=False, num_languages=99)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The used tokens' ids in ascending order; a token's compact id is its place, the shared row comes last."""

    used: tuple[int, ...]

    @classmethod
    def of(cls, texts: Sequence[str]) -> "Vocabulary":
        """Collect the tokens of `texts`, with Whisper's leading space, and the special ones around them."""
        tokenizer = english_tokenizer()
        ids = {tokenizer.sot, tokenizer.no_timestamps, tokenizer.eot, tokenizer.no_speech}
        return cls(tuple(sorted(ids.union(*(tokenizer.encode(" " + text) for text in set(texts))))))

    @property
    def unused_count(self) -> int:
        return int(DIMS.n_vocab) - len(self.used)

    def compact(self, ids: Sequence[int]) -> list[int]:
        """Return compact ids; KeyError for a token that is not among the used."""
        place = {token: index for index, token in enumerate(self.used)}
        return [place[token] for token in ids]


@dataclass(frozen=True, slots=True)
class Batch:
    """B training items of one padded length.

    mel:       float32[B, 80, 2 * T].
    positions: int64[B], audio positions that hold sound; the rest of T is padding.
    given:     int64[B, L], compact ids the decoder reads, from the start token on.
    wanted:    int64[B, L], compact ids it should say next; -1 where nothing is asked.
    letters:   per item the classes to spell, int64[<= positions].
    """

    mel: Tensor
    positions: Tensor
    given: Tensor
    wanted: Tensor
    letters: list[Tensor]


class Recogniser(nn.Module):
    """Whisper with a compact vocabulary, plus the CTC head."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.whisper = Whisper(ModelDimensions(**{**asdict(DIMS), "n_vocab": len(vocabulary.used) + 1}))
        self.spell = nn.Linear(DIMS.n_audio_state, len(LETTERS) + 1)
        # The embedding is also the output layer: unit variance would start it with logits of +-30.
        nn.init.normal_(self.whisper.decoder.token_embedding.weight, std=0.05)
        nn.init.normal_(self.whisper.decoder.positional_embedding, std=0.02)

    def encode(self, mel: Tensor) -> Tensor:
        """Return float[B, T, state] for mel[B, 80, 2 * T]; T may be below n_audio_ctx, which makes training cheaper."""
        encoder = self.whisper.encoder
        x = F.gelu(encoder.conv2(F.gelu(encoder.conv1(mel)))).permute(0, 2, 1)
        x = x + encoder.positional_embedding[: x.shape[1]]
        for block in encoder.blocks:
            x = block(x)
        return encoder.ln_post(x)  # type: ignore[no-any-return]

    def losses(self, batch: "Batch") -> tuple[Tensor, Tensor]:
        """Return (decoder loss, CTC loss), each a mean in nats."""
        encoded = self.encode(batch.mel)
        logits = self.whisper.decoder(batch.given, encoded).float()
        spread = torch.zeros(logits.shape[-1])
        spread[-1] = math.log(self.vocabulary.unused_count)
        said = F.cross_entropy(
            (logits + spread).flatten(0, 1), batch.wanted.flatten(), ignore_index=-1, label_smoothing=0.05
        )
        log_probs = self.spell(encoded).float().log_softmax(-1).transpose(0, 1)
        lengths = torch.tensor([len(item) for item in batch.letters])
        spelled = F.ctc_loss(log_probs, torch.cat(batch.letters), batch.positions, lengths, zero_infinity=True)
        return said, spelled

    def adopt(self, path: Path) -> None:
        """Take over the weights of an exported model that used the same tokens; the CTC head starts anew."""
        state = torch.load(path, map_location="cpu", weights_only=True)["model_state_dict"]
        full = state["decoder.token_embedding.weight"]
        unused = next(token for token in range(DIMS.n_vocab) if token not in self.vocabulary.used)
        state["decoder.token_embedding.weight"] = full[[*self.vocabulary.used, unused]]
        self.whisper.load_state_dict({name: tensor.float() for name, tensor in state.items()})

    def export(self, path: Path) -> None:
        """Write the model for `whisper.load_model`: half precision, plain dictionaries of tensors and integers."""
        state = {name: tensor.detach() for name, tensor in self.whisper.state_dict().items()}
        compact = state["decoder.token_embedding.weight"]
        full = compact[-1].repeat(DIMS.n_vocab, 1)
        full[list(self.vocabulary.used)] = compact[:-1]
        state["decoder.token_embedding.weight"] = full
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"dims": asdict(DIMS), "model_state_dict": {k: v.half() for k, v in state.items()}}, path)


def log_mel(audio: Tensor) -> Tensor:
    """Return float32[B, 80, N / 160] for float32[B, N], each item as whisper.log_mel_spectrogram gives it alone.

    Whisper's own function, given a batch, lets the loudest item set the floor of all others.
    """
    spectrum = torch.stft(audio, N_FFT, HOP_LENGTH, window=torch.hann_window(N_FFT), return_complex=True)
    power = mel_filters(audio.device, DIMS.n_mels) @ torch.view_as_real(spectrum[..., :-1]).square().sum(-1)
    log_power = power.clamp(min=1e-10).log10()
    floor = log_power.amax(dim=(-2, -1), keepdim=True) - 8.0
    return (torch.maximum(log_power, floor) + 4.0) / 4.0


def letter_classes(text: str) -> Tensor:
    """Return the CTC classes of `text`: lower case, letters and spaces only."""
    return torch.tensor([LETTERS.index(c) + 1 for c in text.lower() if c in LETTERS], dtype=torch.int64)
