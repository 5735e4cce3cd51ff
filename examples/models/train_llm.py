"""Train the small chat model that answers questions about a list of shapes, and write it in Hugging Face form.

Run from the repository root:

    python -m examples.models.train_llm train --steps 4000 --decay 1000 --work build/shapes-chat
    python -m examples.models.train_llm score --model examples/models/shapes-chat --pairs 2500

Every step draws its own data from (seed, step), so a run is the same however often it was interrupted; `train` goes on
from the last checkpoint in --work. The learning rate stays flat and falls over the last --decay steps.

A batch is a few lists with several questions each. List and questions share one row and an attention mask keeps the
questions apart; positions restart after the list, so that each question sees what it would see alone:

    tokens     <|bos|><|user|> list | question 1 <|end|><|assistant|> answer 1 <|end|> | question 2 ...
    positions  0 ............. P-1  | P .............................................. | P .............
    loss                                                        ^^^^^^^^^^^^^^^^^
"""

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.models import llm_data
from examples.models.llm_data import Case

SHIPPED = Path(__file__).parent / "shapes-chat"
SPECIAL = ("<|pad|>", "<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
TEMPLATE = (
    "{{ '<|bos|>' }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# A word or a punctuation run takes its leading space along; a digit stands alone, so that numbers are never merged.
# A colour and its shape are one piece: the model then looks things up by one token instead of binding two first.
_PIECES = (
    r" ?(?:red|green|blue|yellow) (?:circle|square|triangle|star)s?(?!\p{L})"
    r"| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of the model; the defaults are those of the shipped one."""

    vocabulary: int = 1024
    width: int = 256
    inner: int = 640
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    tokens_max: int = 1024


def build_tokenizer(size: Size, seed: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on generated cases: any text encodes, and words of the grammar are one token each."""
    rng = random.Random(f"tokenizer {seed}")
    texts = []
    for _ in range(4000):
        case = llm_data.training_case(rng)
        texts += [case.system, case.prefix, *(t.text for t in case.turns), *(t.answer for t in case.turns)]
        texts += [llm_data.refused(rng, "train") for _ in range(4)]
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_PIECES), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size.vocabulary, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|end|>", pad_token="<|pad|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        clean_up_tokenization_spaces=False, model_max_length=size.tokens_max, padding_side="left",
    )  # fmt: skip
    fast.chat_template = TEMPLATE
    return fast


def build_model(size: Size, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return an untrained model, float32, with its generation settings (greedy, stops at the end of a turn)."""
    special = {
        "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=size.width, intermediate_size=size.inner,
            num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=size.kv_heads,
            max_position_embeddings=size.tokens_max, tie_word_embeddings=True, **special,
        )
    )  # fmt: skip
    model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=64, **special)
    return model


@dataclass(frozen=True, slots=True)
class Batch:
    """ids, positions int64 [N, T]; mask bool [N, 1, T, T], true where a query may look; labels int64 [N, T], -100 off.

    labels[n, t] is the token that position t must predict, so no shift is left to do.
    """

    ids: Tensor
    positions: Tensor
    mask: Tensor
    labels: Tensor


def collate(tokenizer: PreTrainedTokenizerFast, cases: Sequence[Case]) -> Batch:
    """Lay each case out as one row, right-padded to the longest."""
    bos, user, assistant, end = tokenizer.convert_tokens_to_ids(["<|bos|>", "<|user|>", "<|assistant|>", "<|end|>"])

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    rows: list[list[tuple[int, int, int, int]]] = []  # (token, position, segment, label); segment 0 is the list
    for case in cases:
        system = encode(f"<|system|>{case.system}<|end|>") if case.system else []
        head = [bos, *system, user, *encode(case.prefix)]
        row = [(token, place, 0, -100) for place, token in enumerate(head)]
        for segment, turn in enumerate(case.turns, start=1):
            asked, reply = [*encode(turn.text), end, assistant], [*encode(turn.answer), end]
            labels = [-100] * (len(asked) - 1) + reply + [-100]
            tokens = asked + reply
            row += [(t, len(head) + i, segment, label) for i, (t, label) in enumerate(zip(tokens, labels, strict=True))]
        rows.append(row)
    longest = max(map(len, rows))
    filled = torch.tensor([row + [(tokenizer.pad_token_id, 0, -1, -100)] * (longest - len(row)) for row in rows])
    ids, positions, segments, labels_ = filled.unbind(-1)
    causal = torch.ones(longest, longest, dtype=torch.bool).tril()
    same = segments[:, :, None] == segments[:, None, :]
    mask = causal & (same | (segments[:, None, :] == 0))
    return Batch(ids.contiguous(), positions.contiguous(), mask[:, None], labels_.contiguous())


def build_optimizers(model: LlamaForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the weight matrices and AdamW for embeddings and norms; each group keeps its 'peak' rate.

    Looking things up in a list is what this model must learn, and Muon learns it in far fewer steps than AdamW.
    """
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    match = "match_rms_adamw"
    return [
        torch.optim.Muon([{"params": matrices, "peak": rate}], lr=rate, weight_decay=0.05, adjust_lr_fn=match),
        torch.optim.AdamW([{"params": others, "peak": 2e-3}], betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


def train(work: Path, steps: int, decay: int, seed: int, lists: int, rate: float) -> None:
    """Train to `steps`, writing a checkpoint every 250 steps, and leave the finished model in work/model."""
    torch.manual_seed(seed)
    size = Size()
    if not (work / "tokenizer").exists():
        build_tokenizer(size, seed).save_pretrained(work / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer", local_files_only=True)
    model = build_model(size, tokenizer)
    model.train()
    optimizers = build_optimizers(model, rate)
    work.mkdir(parents=True, exist_ok=True)
    saved = work / "checkpoint.pt"
    first = 0
    if saved.exists():
        kept = torch.load(saved, weights_only=True)
        model.load_state_dict(kept["model"])
        for optimizer, state in zip(optimizers, kept["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        first = int(kept["step"])
    body = torch.compile(model.model, dynamic=True)  # a third faster on one core; a minute to compile
    started, seen = time.monotonic(), 0.0
    for step in range(first, steps):
        pace = min(1.0, (step + 1) / 200, max(0.01, (steps - step) / decay))
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = group["peak"] * pace
        rng = random.Random(f"{seed}/{step}")
        batch = collate(tokenizer, [llm_data.training_case(rng) for _ in range(lists)])
        labelled = batch.labels >= 0
        with torch.autocast("cpu", torch.bfloat16):
            hidden = body(
                input_ids=batch.ids, position_ids=batch.positions, attention_mask=batch.mask, use_cache=False
            ).last_hidden_state
            logits = model.lm_head(hidden[labelled])
        loss = F.cross_entropy(logits.float(), batch.labels[labelled])
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        seen += loss.item()
        if (step + 1) % 50 == 0:
            per_step = (time.monotonic() - started) / (step + 1 - first)
            print(f"step {step + 1}  loss {seen / 50:.4f}  {per_step:.2f} s/step", flush=True)
            seen = 0.0
        if (step + 1) % 250 == 0 or step + 1 == steps:
            states = [optimizer.state_dict() for optimizer in optimizers]
            torch.save({"model": model.state_dict(), "optimizers": states, "step": step + 1}, saved)
    save(model, tokenizer, work / "model")


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights as float16 safetensors (half the size; training ends well inside its range) with the tokenizer."""
    model.half().save_pretrained(folder)
    for where_from in ("is_local", "local_files_only"):  # how it was loaded here says nothing to a reader
        tokenizer.init_kwargs.pop(where_from, None)
    tokenizer.save_pretrained(folder)


@torch.inference_mode()
def score(folder: Path, pairs: int, seed: int, wrong_max: int = 20) -> dict[str, tuple[int, int]]:
    """Return (right, all) per form for the model in `folder`: float32 compute, greedy `generate`, exact match."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = LlamaForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
    drawn = list(llm_data.held_out_pairs(seed, pairs))
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for start in range(0, len(drawn), 64):
        part = drawn[start : start + 64]
        chats = [[{"role": "user", "content": text}] for text, _ in part]
        fed = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        made = model.generate(**fed, max_new_tokens=64, do_sample=False)[:, fed["input_ids"].shape[1] :]
        said = tokenizer.batch_decode(made, skip_special_tokens=True)
        for (text, turn), reply in zip(part, said, strict=True):
            total[turn.form] += 1
            right[turn.form] += reply == turn.answer
            if reply != turn.answer and total.total() - right.total() <= wrong_max:
                print(json.dumps({"form": turn.form, "message": text, "said": reply, "wanted": turn.answer}))
    return {form: (right[form], total[form]) for form in sorted(total)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("train", help="train, going on from --work/checkpoint.pt when there is one")
    one.add_argument("--work", type=Path, required=True, help="folder for the checkpoint and the finished model")
    one.add_argument("--steps", type=int, default=4000, help="optimiser steps in all")
    one.add_argument("--decay", type=int, default=1000, help="the last steps, over which the learning rate falls")
    one.add_argument("--lists", type=int, default=12, help="lists in a batch, with 6 questions each")
    one.add_argument("--rate", type=float, default=2e-3, help="peak learning rate of the matrices")
    one.add_argument("--seed", type=int, default=7)
    two = verbs.add_parser("score", help="exact match on held-out lists asked about in held-out wordings")
    two.add_argument("--model", type=Path, default=SHIPPED)
    two.add_argument("--pairs", type=int, default=2500)
    two.add_argument("--seed", type=int, default=1)
    for verb in (one, two):
        verb.add_argument("--threads", type=int, default=1, help="torch threads")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    if asked.verb == "train":
        train(asked.work, asked.steps, asked.decay, asked.seed, asked.lists, asked.rate)
        return
    table = score(asked.model, asked.pairs, asked.seed)
    for form, (right, count) in [*table.items(), ("all", (sum(r for r, _ in table.values()), asked.pairs))]:
        print(f"| {form} | {right} / {count} | {100 * right / count:.2f} % |")


if __name__ == "__main__":
    main()
