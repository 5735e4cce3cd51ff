"""The guardrail's sentences: the splits share neither templates nor fillers, and the shipped model tells them apart."""

import random
import re
from pathlib import Path

import pytest

from examples.models import guardrail_data
from examples.models.guardrail_data import LABELS, Sentences

SHIPPED = Path(__file__).parents[2] / "examples" / "models" / "guardrail"
needs_weights = pytest.mark.skipif(not (SHIPPED / "model.onnx").exists(), reason="the weights are not here")


def test_no_template_and_no_filler_is_in_both_splits() -> None:
    train, held_out = Sentences("train"), Sentences("held_out")
    for label in LABELS:
        # {llm}, {plain} and {llmrefusal} stand for generators that are given the split themselves.
        both = {t.lower() for t in train.templates[label]} & {t.lower() for t in held_out.templates[label]}
        assert all(t.startswith("{") and t.endswith("}") for t in both), (label, both)
    for slot, fillers in held_out.fillers.items():
        assert not {f.lower() for f in fillers} & {f.lower() for f in train.fillers.get(slot, [])}, slot


def test_no_training_sentence_has_the_wording_of_a_held_out_template() -> None:
    rng = random.Random(8)
    train, held_out = Sentences("train"), Sentences("held_out")
    worded = {label: [w for t in held_out.templates[label] if (w := _wording(t))] for label in LABELS}
    assert sum(map(len, worded.values())) > 180
    for _ in range(4000):
        drawn = train.draw(rng)
        for wording in worded[drawn.label]:
            assert not wording.fullmatch(_plain(drawn.text)), (wording.pattern, drawn.text)


def test_every_label_has_many_held_out_templates() -> None:
    held_out = Sentences("held_out")
    assert all(len(held_out.templates[label]) >= 40 for label in LABELS)


def test_no_held_out_sentence_is_drawn_in_training() -> None:
    rng = random.Random(1)
    train = Sentences("train")
    drawn = {_plain(train.draw(rng).text) for _ in range(20_000)}
    held_out = {_plain(s.text) for s in guardrail_data.held_out(1, 1000) if s.label != "safe"}
    assert not drawn & held_out


def test_every_template_of_both_splits_can_be_filled() -> None:
    for split in ("train", "held_out"):
        rng = random.Random(2)
        sentences = Sentences(split)
        seen = {sentences.draw(rng).label for _ in range(3000)}
        assert seen == set(LABELS)
        assert not any(mark in sentences.draw(rng).text for mark in ("{", "}") for _ in range(1000))


def test_the_same_seed_draws_the_same_sentences() -> None:
    assert list(guardrail_data.held_out(3, 50)) == list(guardrail_data.held_out(3, 50))
    assert list(guardrail_data.held_out(3, 50)) != list(guardrail_data.held_out(4, 50))


@needs_weights
def test_the_shipped_model_labels_held_out_sentences() -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("torch")
    from examples.models import train_guardrail

    sentences = list(guardrail_data.held_out(5, 200))
    said = train_guardrail.classify(SHIPPED, [s.text for s in sentences])
    right = sum(s.label == got for s, got in zip(sentences, said, strict=True))
    assert right >= 190, f"{right} of 200"


@needs_weights
def test_a_sentence_gets_the_same_label_alone_and_beside_a_long_one() -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("torch")
    from examples.models import train_guardrail

    texts = [s.text for s in guardrail_data.held_out(6, 20)]
    alone = [train_guardrail.classify(SHIPPED, [text])[0] for text in texts]
    assert train_guardrail.classify(SHIPPED, [*texts, "a long road " * 60])[:-1] == alone
    assert train_guardrail.classify(SHIPPED, [""]) == ["safe"]


def _plain(text: str) -> str:
    return text.lower().strip(" .?!")


def _wording(template: str) -> re.Pattern[str] | None:
    """Return a pattern of `template` with its slots open, or None where the slots leave too few words to compare."""
    words = re.sub(r"\{\w+\}|\[[^\]]*\]", "", template)
    if len(words) < 8 * template.count("{") + 4:
        return None
    parts = re.split(r"(\{\w+\}|\[[^\]]*\])", _plain(template))
    return re.compile("".join(r"[^.?!]{1,45}" if part[:1] in ("{", "[") else re.escape(part) for part in parts))


def test_the_shipped_file_names_no_folder_of_the_machine_that_made_it() -> None:
    held = (Path(guardrail_data.__file__).parent / "guardrail/model.onnx").read_bytes()
    assert b"site-packages" not in held and b".py" not in held
