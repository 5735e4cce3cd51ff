"""Train the guardrail text classifier and export it to ONNX, or score an exported one with onnxruntime.

Run from the repository root:

    python -m examples.models.train_guardrail train --out build/guardrail
    python -m examples.models.train_guardrail score --model examples/models/guardrail

The net is small on purpose (a fifth of a millisecond for a short sentence on one core): token embeddings, two
convolutions over neighbouring tokens, then the mean and the maximum over the sentence. The maximum lets one bad phrase
in a long answer be seen.
"""

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.nn import functional as F

from examples.models.guardrail_data import LABELS, Sentence, Sentences, held_out, read_sentences
from examples.models.onnx_clean import without_notes

SHIPPED = Path(__file__).parent / "guardrail"
TOKENS_MAX = 128
PAD, START, HIDDEN_WORD = 0, 1, 2  # ids of the special tokens below
SPECIAL = ("<pad>", "<start>", "<hidden>")


class Net(nn.Module):
    """Text classifier: input_ids and attention_mask int64 [N, T] to logits float32 [N, labels]."""

    def __init__(self, vocabulary: int, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, padding_idx=PAD)
        self.dropout = nn.Dropout(0.25)
        self.near = nn.Conv1d(width, width, 3, padding=1)
        self.wide = nn.Conv1d(width, width, 5, padding=2)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.label = nn.Linear(2 * width, len(LABELS))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        kept = attention_mask.unsqueeze(-1).to(torch.float32)
        hidden = self.dropout(self.embed(input_ids)) * kept
        for conv, norm in zip((self.near, self.wide), self.norms, strict=True):
            mixed = F.gelu(conv(hidden.transpose(1, 2)).transpose(1, 2))
            # Padding is put back to zero after each layer, so that a sentence scores the same in any batch.
            hidden = norm(hidden + self.dropout(mixed)) * kept
        mean = hidden.sum(1) / kept.sum(1).clamp(min=1.0)
        peak = (hidden + (kept - 1.0) * 1e4).amax(1)
        logits: Tensor = self.label(self.dropout(torch.cat([mean, peak], -1)))
        return logits


def build_tokenizer(seed: int, vocabulary: int = 4000) -> Tokenizer:
    """Train a lower-casing byte-level BPE on training sentences; any text encodes, unseen words as known pieces."""
    rng = random.Random(f"tokenizer {seed}")
    sentences = Sentences("train")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=True)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=list(SPECIAL), show_progress=False, min_frequency=8,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator((sentences.draw(rng).text for _ in range(40_000)), trainer)
    # A start token keeps the empty text from becoming an empty tensor.
    tokenizer.post_processor = processors.TemplateProcessing(single="<start> $A", special_tokens=[("<start>", START)])
    return tokenizer


def tensors(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return input_ids and attention_mask, int64 [N, T], right-padded to the longest of at most TOKENS_MAX."""
    rows = [encoded.ids[:TOKENS_MAX] for encoded in tokenizer.encode_batch(list(texts))]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return ids, mask


def misspell(rng: random.Random, text: str) -> str:
    """Return `text` with a letter dropped, doubled or exchanged with the next in about one word of five."""
    words = text.split(" ")
    for at, word in enumerate(words):
        if len(word) > 3 and rng.random() < 0.2:
            i = rng.randrange(len(word) - 1)
            words[at] = rng.choice(
                (word[:i] + word[i + 1 :], word[: i + 1] + word[i:], word[:i] + word[i + 1] + word[i] + word[i + 2 :])
            )
    return " ".join(words)


def train(out: Path, steps: int, batch: int, rate: float, seed: int) -> None:
    """Train on fresh sentences, seeded by step, and write model.onnx, tokenizer.json and config.json to `out`."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer(seed)
    net = Net(tokenizer.get_vocab_size())
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    sentences = Sentences("train")
    started, seen = time.monotonic(), 0.0
    net.train()
    for step in range(steps):
        rng = random.Random(f"{seed}/{step}")
        drawn = [sentences.draw(rng) for _ in range(batch)]
        # Misspelt words are cut into small pieces, so that the pieces of words never seen come to mean something.
        ids, mask = tensors(tokenizer, [misspell(rng, s.text) if rng.random() < 0.5 else s.text for s in drawn])
        hide = (torch.rand(ids.shape) < 0.1) & (mask == 1)
        logits = net(ids.masked_fill(hide, HIDDEN_WORD), mask)
        wanted = torch.tensor([LABELS.index(s.label) for s in drawn])
        loss = F.cross_entropy(logits, wanted, label_smoothing=0.03)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        seen += loss.item()
        if (step + 1) % 200 == 0:
            print(f"step {step + 1}  loss {seen / 200:.4f}  {time.monotonic() - started:.0f} s", flush=True)
            seen = 0.0
    export(net.eval(), tokenizer, out)


def export(net: Net, tokenizer: Tokenizer, out: Path) -> None:
    """Write `net` as one ONNX file with dynamic batch and length, beside its tokenizer and labels."""
    out.mkdir(parents=True, exist_ok=True)
    ids, mask = tensors(tokenizer, ["How many circles are there?", "No."])
    n, t = torch.export.Dim("n", min=1, max=4096), torch.export.Dim("t", min=1, max=TOKENS_MAX)
    torch.onnx.export(
        net, (ids, mask), str(out / "model.onnx"), input_names=["input_ids", "attention_mask"],
        output_names=["logits"], dynamic_shapes=({0: n, 1: t}, {0: n, 1: t}), dynamo=True, external_data=False,
    )  # fmt: skip
    without_notes(out / "model.onnx")
    onnx.checker.check_model(str(out / "model.onnx"), full_check=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "architecture": "token embeddings, two convolutions, mean and max pooling",
        "id2label": {str(i): label for i, label in enumerate(LABELS)},
        "label2id": {label: i for i, label in enumerate(LABELS)},
        "pad_token_id": PAD,
        "tokens_max": TOKENS_MAX,
        "vocab_size": tokenizer.get_vocab_size(),
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def classify(folder: Path, texts: Sequence[str]) -> list[str]:
    """Return the label of each text by the exported model in `folder`, through onnxruntime on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    said: list[str] = []
    for start in range(0, len(texts), 64):
        ids, mask = tensors(tokenizer, texts[start : start + 64])
        (logits,) = session.run(["logits"], {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
        said += [LABELS[i] for i in np.asarray(logits).argmax(-1)]
    return said


def table(sentences: Sequence[Sentence], said: Sequence[str]) -> list[tuple[str, int, float, float, float]]:
    """Return (label, sentences, precision, recall, F1) per label, then 'bad, any kind' against safe and 'macro'."""
    pairs = Counter((s.label, got) for s, got in zip(sentences, said, strict=True))

    def row(name: str, members: Sequence[str]) -> tuple[str, int, float, float, float]:
        true = sum(n for (want, _), n in pairs.items() if want in members)
        flagged = sum(n for (_, got), n in pairs.items() if got in members)
        hit = sum(n for (want, got), n in pairs.items() if want in members and got in members)
        precision, recall = hit / max(flagged, 1), hit / max(true, 1)
        return name, true, precision, recall, 2 * hit / max(flagged + true, 1)

    rows = [row(label, [label]) for label in LABELS]
    bad = rows[1:]
    macro = ("macro of the three", sum(r[1] for r in bad), *(sum(r[i] for r in bad) / 3 for i in (2, 3, 4)))
    return [*rows, macro, row("bad, any kind", LABELS[1:])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("train", help="train and export")
    one.add_argument("--out", type=Path, required=True, help="folder for model.onnx, tokenizer.json and config.json")
    one.add_argument("--steps", type=int, default=2600)
    one.add_argument("--batch", type=int, default=128, help="sentences in a step")
    one.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    one.add_argument("--seed", type=int, default=7)
    one.add_argument("--threads", type=int, default=1, help="torch threads")
    two = verbs.add_parser("score", help="precision, recall and F1 on held-out sentences")
    two.add_argument("--model", type=Path, default=SHIPPED)
    two.add_argument("--sentences", type=int, default=2000)
    two.add_argument("--seed", type=int, default=1)
    two.add_argument("--file", type=Path, help="score the 'label: text' lines of this file instead")
    two.add_argument("--wrong", type=int, default=0, help="print this many wrong ones")
    asked = parser.parse_args()
    if asked.verb == "train":
        torch.set_num_threads(asked.threads)
        train(asked.out, asked.steps, asked.batch, asked.rate, asked.seed)
        return
    sentences = read_sentences(asked.file) if asked.file else list(held_out(asked.seed, asked.sentences))
    said = classify(asked.model, [s.text for s in sentences])
    wrong = [(s.label, got, s.text) for s, got in zip(sentences, said, strict=True) if s.label != got]
    for label, got, text in wrong[: asked.wrong]:
        print(f"{label} taken for {got}: {text}")
    for name, count, precision, recall, f1 in table(sentences, said):
        print(f"| {name} | {count} | {precision:.3f} | {recall:.3f} | {f1:.3f} |")


if __name__ == "__main__":
    main()
