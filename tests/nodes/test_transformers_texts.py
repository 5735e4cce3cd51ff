"""Tasks of node transformers on texts give the answers of transformers' own pipelines, or of the model by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.nodes import random_models
from tests.nodes.random_models import assert_same_scores, names, opened, pipeline, refused
from weftline.errors import InputError
from weftline.nodes.contract import Batch
from weftline.nodes.transformers_tasks import texts

SENTENCES = [
    "Anna lives in Paris.", "good", "badly under this day is bad keys unders Anna Paris", "Anna Anna  in\nParis?", "",
]  # fmt: skip
LABELS = names("good", "bad", "neither")


@pytest.mark.parametrize("kind", [None, "multi_label_classification", "regression"])
def test_labels_of_texts_have_the_pipelines_scores(tmp_path: Path, kind: str | None) -> None:
    random_models.save_bert("BertForSequenceClassification", tmp_path / "m", problem_type=kind, **LABELS)
    node = opened(tmp_path, "text-classification")
    own = pipeline(tmp_path, "text-classification")
    whole = node.run(Batch({"text": SENTENCES}))
    for place, sentence in enumerate(SENTENCES):
        wanted = own(sentence, top_k=None)
        if kind == "regression":
            wanted.sort(key=lambda one: list(LABELS["label2id"]).index(one["label"]))
            assert set(whole) == {"scores"}
        else:
            assert whole["label"][place] == wanted[0]["label"]
        for found in (whole["scores"][place], node.run(Batch({"text": [sentence]}))["scores"][0]):
            assert_same_scores(found, wanted)


def test_a_regression_of_one_value_has_its_score(tmp_path: Path) -> None:
    random_models.save_bert(
        "BertForSequenceClassification", tmp_path / "m", problem_type="regression", **names("stars")
    )
    (found,) = opened(tmp_path, "text-classification").run(Batch({"text": ["good day"]}))["scores"]
    assert_same_scores(found, pipeline(tmp_path, "text-classification")(["good day"]))
    assert refused(tmp_path, "text-classification", top_k=1).option == "top_k"


def test_a_model_with_one_label_and_no_regression_is_refused(tmp_path: Path) -> None:
    random_models.save_bert("BertForSequenceClassification", tmp_path / "m", **names("LABEL_0"))
    error = refused(tmp_path, "text-classification")
    assert "has one label" in error.found and "use node rerank" in error.fix


def test_the_likeliest_labels_are_as_many_as_top_k(tmp_path: Path) -> None:
    random_models.save_bert("BertForSequenceClassification", tmp_path / "m", **LABELS)
    found = opened(tmp_path, "text-classification", top_k=2).run(Batch({"text": SENTENCES[:2]}))["scores"]
    assert [len(one) for one in found] == [2, 2]
    assert refused(tmp_path, "text-classification", top_k=0).option == "top_k"


@pytest.mark.parametrize("kind", ["BertModel", "BertForMaskedLM"])
def test_features_are_those_of_the_pipeline(tmp_path: Path, kind: str) -> None:
    random_models.save_bert(kind, tmp_path / "m")
    node = opened(tmp_path, "feature-extraction")
    own = transformers.pipeline(
        "feature-extraction",
        model=transformers.AutoModel.from_pretrained(tmp_path / "m"),
        tokenizer=transformers.AutoTokenizer.from_pretrained(tmp_path / "m"),
        device="cpu",
    )
    whole = node.run(Batch({"text": SENTENCES}))["features"]
    for place, sentence in enumerate(SENTENCES):
        wanted = np.array(own(sentence)[0], np.float32)
        for found in (whole[place], node.run(Batch({"text": [sentence]}))["features"][0]):
            assert found.dtype == np.float32 and found.shape == wanted.shape == (len(wanted), 16)
            np.testing.assert_allclose(found, wanted, atol=1e-4)


ENTITIES = names("O", "B-PER", "I-PER", "B-LOC", "I-LOC")


@pytest.mark.parametrize("aggregation", [None, *texts.AGGREGATIONS])
def test_entities_are_those_of_the_pipeline(tmp_path: Path, aggregation: str | None) -> None:
    random_models.save_bert("BertForTokenClassification", tmp_path / "m", **ENTITIES)
    node = opened(tmp_path, "token-classification", aggregation=aggregation)
    own = pipeline(tmp_path, "token-classification", aggregation_strategy=aggregation or "none")
    whole, seen = node.run(Batch({"text": SENTENCES}))["entities"], 0
    for place, sentence in enumerate(SENTENCES):
        wanted = own(sentence)
        seen += len(wanted)
        for found in (whole[place], node.run(Batch({"text": [sentence]}))["entities"][0]):
            assert [{**one, "score": None} for one in found] == [{**one, "score": None} for one in wanted]
            assert [one["score"] for one in found] == pytest.approx([one["score"] for one in wanted], abs=1e-4)
            assert all(type(one["score"]) is float and type(one["start"]) is int for one in found)
    assert seen > 5


def without_context(folder: Path) -> None:
    """Make a BERT label each token by the token alone, so that windows do not matter."""
    network = transformers.AutoModelForTokenClassification.from_pretrained(folder)
    with torch.no_grad():
        network.bert.embeddings.position_embeddings.weight.zero_()
        for layer in network.bert.encoder.layer:
            layer.attention.output.dense.weight.zero_()
            layer.attention.output.dense.bias.zero_()
    network.save_pretrained(folder)


@pytest.mark.parametrize("aggregation", [None, *texts.AGGREGATIONS])
def test_a_long_text_has_its_entities_once(tmp_path: Path, aggregation: str | None) -> None:
    random_models.save_bert("BertForTokenClassification", tmp_path / "m", {"model_max_length": 32}, **ENTITIES)
    without_context(tmp_path / "m")
    node = opened(tmp_path, "token-classification", aggregation=aggregation)
    items = ["Anna lives in Paris. " * 30, "good", "this day is bad keys unders Anna Paris " * 7, ""]
    whole = node.run(Batch({"text": items}))["entities"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m", model_max_length=64)
    own = transformers.pipeline(
        "token-classification", model=transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "m"),
        tokenizer=tokenizer, device="cpu", aggregation_strategy=aggregation or "none",
    )  # fmt: skip
    for found, text in zip(whole, items, strict=True):
        part = text[:120]  # more than one window, and less than the pipeline reads
        starts = [one["start"] for one in found]
        assert starts == sorted(set(starts)) and all(text[one["start"] : one["end"]] for one in found)
        wanted = [one for one in own(part) if one["end"] < len(part)]
        assert [{**one, "score": None} for one in found][: len(wanted)] == [{**one, "score": None} for one in wanted]
    assert whole[0][-1]["end"] > 600 and whole[2][-1]["end"] > 250
    alone = node.run(Batch({"text": [items[0]]}))["entities"][0]
    assert [{**one, "score": None} for one in alone] == [{**one, "score": None} for one in whole[0]]


def test_a_token_in_two_windows_counts_where_it_has_more_context() -> None:
    windows = [np.full((size, 1), place, np.float32) for place, size in enumerate((10, 10, 6))]
    row = texts.whole_row(windows, overlap=4)[:, 0].tolist()
    assert row == [0] * 8 + [1] * 6 + [2] * 4


@pytest.mark.parametrize("kind", [None, "multi_label_classification", "regression"])
def test_windows_of_a_long_text_are_joined(tmp_path: Path, kind: str | None) -> None:
    random_models.save_bert(
        "BertForSequenceClassification", tmp_path / "m", {"model_max_length": 16}, problem_type=kind, **LABELS
    )
    node = opened(tmp_path, "text-classification", overflow="windows")
    words = ["good", "bad", "this", "day"] * 8
    parts = [" ".join(words[start : start + 14]) for start in (0, 10, 20)]  # 16 less two special tokens, 4 shared
    found, *alone = node.run(Batch({"text": [" ".join(words), *parts]}))["scores"]
    scores = [{one["label"]: one["score"] for one in own} for own in alone]
    join = max if kind == "multi_label_classification" else lambda values: sum(values) / 3
    for one in found:
        assert one["score"] == pytest.approx(join([own[one["label"]] for own in scores]), abs=1e-5)


@pytest.mark.parametrize(
    ("task", "kind", "output"),
    [
        ("text-classification", "BertForSequenceClassification", "scores"),
        ("feature-extraction", "BertModel", "features"),
    ],
)
def test_a_text_that_is_too_long_fails_alone(tmp_path: Path, task: str, kind: str, output: str) -> None:
    random_models.save_bert(kind, tmp_path / "m", {"model_max_length": 16}, **LABELS)
    long = "good bad " * 20 + "day"
    found = opened(tmp_path, task).run(Batch({"text": ["good", long]}))
    for values in found.values():
        assert str(values[1]).startswith("the text has 43 tokens, and the model reads at most 16\n    fix: ")
        assert "`overflow: end` to cut it, or for classifications `windows` to read all" in str(values[1])
        assert not isinstance(values[0], InputError)
    end, start = "good bad " * 7, "bad " + "good bad " * 6 + "day"
    for overflow, wanted in {"end": end, "start": start}.items():
        cut, whole = opened(tmp_path, task, overflow=overflow).run(Batch({"text": [long, wanted]}))[output]
        if output == "features":
            np.testing.assert_allclose(cut, whole, atol=1e-4)
        else:
            assert_same_scores(cut, whole)
    assert refused(tmp_path, task, overflow="cut").option == "overflow"


def test_an_unknown_aggregation_is_refused(tmp_path: Path) -> None:
    random_models.save_bert("BertForTokenClassification", tmp_path / "m", **ENTITIES)
    error = refused(tmp_path, "token-classification", aggregation="last")
    assert error.option == "aggregation" and "average" in error.expected


QUESTIONS = [
    ("Anna lives in?", "Anna lives in Paris. this is good"),
    ("is this a bad day?", "good day under keys. Anna lives"),
    ("good?", "this"),
]


def answer_by_hand(folder: Path, question: str, context: str, window: int = 384) -> dict[str, Any]:
    """Return the answer of the model and tokenizer, called for one window after the other."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    network = transformers.AutoModelForQuestionAnswering.from_pretrained(folder).eval()
    before = [2, *tokenizer(question, add_special_tokens=False)["input_ids"], 3]
    tokens = tokenizer(context, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets, best = tokens["input_ids"], tokens["offset_mapping"], {"score": -1.0}
    size = window - len(before) - 1
    step = size - min(texts.WINDOW_OVERLAP, window // 4)
    for at in range(0, len(ids), step):
        part = ids[at : at + size]
        row, types = [*before, *part, 3], [0] * len(before) + [1] * (len(part) + 1)
        with torch.inference_mode():
            output = network(torch.tensor([row]), token_type_ids=torch.tensor([types]))
        inside = slice(len(before), len(before) + len(part))
        starts, ends = output.start_logits[0, inside].softmax(0), output.end_logits[0, inside].softmax(0)
        for first in range(len(part)):
            for last in range(first, min(first + 15, len(part))):
                score = float(starts[first] * ends[last])
                if score > best["score"]:
                    start, end = offsets[at + first][0], offsets[at + last][1]
                    best = {"answer": context[start:end], "score": score, "start": start, "end": end}
        if at + size >= len(ids):
            break
    return best


def assert_same_answer(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert {**found, "score": None} == {**wanted, "score": None}
    assert found["score"] == pytest.approx(wanted["score"], abs=1e-4)


def test_answers_are_the_best_spans_of_their_contexts(tmp_path: Path) -> None:
    folder = random_models.save_bert("BertForQuestionAnswering", tmp_path / "m")
    node = opened(tmp_path, "question-answering")
    questions, contexts = zip(*QUESTIONS, strict=True)
    whole = node.run(Batch({"question": questions, "context": contexts}))["answer"]
    for place, (question, context) in enumerate(QUESTIONS):
        wanted = answer_by_hand(folder, question, context)
        assert_same_answer(whole[place], wanted)
        assert_same_answer(node.run(Batch({"question": [question], "context": [context]}))["answer"][0], wanted)


def test_an_answer_is_found_in_any_window_of_a_long_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = random_models.save_bert("BertForQuestionAnswering", tmp_path / "m", {"model_max_length": 24})
    monkeypatch.setattr(texts, "ROWS_MAX", 5)
    node = opened(tmp_path, "question-answering")
    contexts = ["good day is this " * 20 + "Anna lives in Paris ? " + "bad key . " * 20, "Anna in Paris"]
    found = node.run(Batch({"question": ["Anna?", "good?"], "context": contexts}))["answer"]
    for one, question, context in zip(found, ["Anna?", "good?"], contexts, strict=True):
        assert_same_answer(one, answer_by_hand(folder, question, context, 24))
    assert found[0]["start"] > 17 * 10  # in none of the first windows


def test_a_question_that_fills_the_window_fails_alone(tmp_path: Path) -> None:
    folder = random_models.save_bert("BertForQuestionAnswering", tmp_path / "m", {"model_max_length": 24})
    node = opened(tmp_path, "question-answering")
    found = node.run(Batch({"question": ["good " * 40, "good?", "good?"], "context": ["Anna", "Paris day", ""]}))
    assert isinstance(found["answer"][0], InputError)
    assert_same_answer(found["answer"][1], answer_by_hand(folder, "good?", "Paris day", 24))
    assert found["answer"][2] == {"answer": "", "score": 0.0, "start": 0, "end": 0}


NLI = names("contradiction", "neutral", "entailment")
TOPICS = ("good day", "bad", "paris is in")


@pytest.mark.parametrize("multi_label", [None, True])
@pytest.mark.parametrize("labels", [TOPICS, TOPICS[:1]])
@pytest.mark.parametrize("options", [NLI, names("ENTAILMENT", "not")])
def test_zero_shot_labels_have_the_pipelines_scores(
    tmp_path: Path, options: Any, labels: tuple[str, ...], multi_label: bool | None
) -> None:
    random_models.save_bert("BertForSequenceClassification", tmp_path / "m", **options)
    template = "is this {} ?"
    node = opened(tmp_path, "zero-shot-classification", labels=labels, hypothesis=template, multi_label=multi_label)
    own = pipeline(tmp_path, "zero-shot-classification")
    sentences = SENTENCES[:4]
    whole = node.run(Batch({"text": sentences}))
    for place, sentence in enumerate(sentences):
        answer = own(sentence, list(labels), hypothesis_template=template, multi_label=bool(multi_label))
        wanted = [{"label": one, "score": score} for one, score in zip(answer["labels"], answer["scores"])]
        assert whole["label"][place] == wanted[0]["label"]
        for found in (whole["scores"][place], node.run(Batch({"text": [sentence]}))["scores"][0]):
            assert_same_scores(found, wanted)


def test_candidate_labels_come_from_the_input_and_wrong_ones_fail_alone(tmp_path: Path) -> None:
    random_models.save_bert("BertForSequenceClassification", tmp_path / "m", **NLI)
    node = opened(tmp_path, "zero-shot-classification", ("text", "labels"))
    own = pipeline(tmp_path, "zero-shot-classification")
    labels: list[Any] = [["good", "bad"], ["paris", "anna", "day"], [], "good", [1], None]
    found = node.run(Batch({"text": ["Anna lives in Paris"] * len(labels), "labels": labels}))
    for place in (0, 1):
        answer = own("Anna lives in Paris", labels[place])
        wanted = [{"label": one, "score": score} for one, score in zip(answer["labels"], answer["scores"])]
        assert_same_scores(found["scores"][place], wanted)
    for place in range(2, len(labels)):
        assert isinstance(found["scores"][place], InputError) and isinstance(found["label"][place], InputError)


@pytest.mark.parametrize("multi_label", [False, True])
def test_a_label_counts_in_the_window_that_entails_it_most(tmp_path: Path, multi_label: bool) -> None:
    random_models.save_bert("BertForSequenceClassification", tmp_path / "m", {"model_max_length": 16}, **NLI)
    node = opened(tmp_path, "zero-shot-classification", labels=TOPICS[:2], hypothesis="{} ?", multi_label=True)
    words = ["good", "bad", "this", "day", "anna"] * 6
    rooms = {"good day": 10, "bad": 11}  # beside the label, "?" and three special tokens; windows share 2
    best = {}
    for label, room in rooms.items():
        parts = [" ".join(words[start : start + room]) for start in range(0, len(words) - 2, room - 2)]
        scores = node.run(Batch({"text": parts}))["scores"]
        best[label] = max(one["score"] for own in scores for one in own if one["label"] == label)
    (found,) = node.run(Batch({"text": [" ".join(words)]}))["scores"]
    assert {one["label"]: one["score"] for one in found} == pytest.approx(best, abs=1e-5)
    single = opened(tmp_path, "zero-shot-classification", labels=TOPICS[:2], hypothesis="{} ?", multi_label=multi_label)
    answer = single.run(Batch({"text": [" ".join(words)]}))
    assert answer["confidence"][0] == answer["scores"][0][0]["score"]
    assert multi_label or sum(one["score"] for one in answer["scores"][0]) == pytest.approx(1, abs=1e-5)


def test_a_label_that_leaves_no_room_for_the_text_is_refused(tmp_path: Path) -> None:
    random_models.save_bert("BertForSequenceClassification", tmp_path / "m", {"model_max_length": 16}, **NLI)
    node = opened(tmp_path, "zero-shot-classification", ("text", "labels"), hypothesis="{}")
    found = node.run(Batch({"text": ["good"] * 2, "labels": [["bad", "good " * 7], ["bad", "good"]]}))
    assert "has 9 tokens and leaves no room for a text in 16" in str(found["label"][0])
    assert found["label"][1] in ("bad", "good")


def test_wrong_options_of_zero_shot_classification_are_refused(tmp_path: Path) -> None:
    random_models.save_bert("BertForSequenceClassification", tmp_path / "m", **NLI)
    task = "zero-shot-classification"
    assert refused(tmp_path, task).fix == "write labels, or wire input labels"
    assert "wired too" in refused(tmp_path, task, ("labels",), labels=("good",)).found
    assert refused(tmp_path, task, labels=()).option == "labels"
    assert refused(tmp_path, task, labels=("good",), hypothesis="this is it").option == "hypothesis"
    random_models.save_bert("BertForSequenceClassification", tmp_path / "m", **names("good", "bad"))
    assert "use node classify" in refused(tmp_path, task, labels=("good",)).fix


def generated_by_hand(folder: Path, text: str, tokens_max: int) -> str:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    network = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    tokens = network.generate(torch.tensor([tokenizer(text)["input_ids"]]), max_new_tokens=tokens_max)
    return str(tokenizer.decode(tokens[0], skip_special_tokens=True))


PARAMS = {"summarization": {"prefix": "good day "}, "translation": {"max_length": 3}}


@pytest.mark.parametrize(
    ("task", "prefix", "used"),
    [
        ("summarization", None, "good day "),
        ("summarization", "", ""),
        ("translation", None, ""),
        ("translation", "key ", "key "),
    ],
)
def test_texts_are_generated_as_by_the_model_alone(tmp_path: Path, task: str, prefix: str | None, used: str) -> None:
    folder = random_models.save_t5(tmp_path / "m", task_specific_params=PARAMS)
    node = opened(tmp_path, task, prefix=prefix, tokens_max=12)
    sentences = SENTENCES[:4]
    wanted = [generated_by_hand(folder, used + sentence, 12) for sentence in sentences]
    assert node.run(Batch({"text": sentences}))["text"] == wanted and len(set(wanted)) > 2
    assert [node.run(Batch({"text": [sentence]}))["text"][0] for sentence in sentences] == wanted


def test_a_text_that_is_too_long_to_translate_fails_alone(tmp_path: Path) -> None:
    folder = random_models.save_t5(tmp_path / "m")
    long = "good bad " * 300
    found = opened(tmp_path, "translation", tokens_max=4).run(Batch({"text": ["good day", long]}))["text"]
    assert found[0] == generated_by_hand(folder, "good day", 4)
    assert str(found[1]).startswith("the text has 601 tokens, and the model reads at most 512")
    (cut,) = opened(tmp_path, "translation", tokens_max=4, overflow="end").run(Batch({"text": [long]}))["text"]
    assert cut == generated_by_hand(folder, ("good bad " * 256)[:-4], 4)
    assert refused(tmp_path, "translation", overflow="windows").option == "overflow"


def test_only_t5_summarizes_and_the_length_is_limited(tmp_path: Path) -> None:
    folder = random_models.save_t5(tmp_path / "m")
    assert refused(tmp_path, "summarization", tokens_max=0).option == "tokens_max"
    node = opened(tmp_path, "translation", tokens_max=2)
    assert node.run(Batch({"text": ["good day"]}))["text"] == [generated_by_hand(folder, "good day", 2)]
    assert "`task: summarization`" in refused(tmp_path, "token-classification").fix
    random_models.save_bert("BertForMaskedLM", tmp_path / "m")
    assert "a T5 model" in refused(tmp_path, "summarization").expected


def test_a_span_is_at_most_fifteen_tokens_and_ends_after_it_starts() -> None:
    starts, ends = np.zeros(40, np.float32), np.zeros(40, np.float32)
    starts[5] = ends[20] = 9  # 16 tokens
    _, first, last = texts._best_span(starts, ends)
    assert first <= last < first + 15
    ends[19] = 8
    assert texts._best_span(starts, ends)[1:] == (5, 19)
    starts[30] = 12
    assert texts._best_span(starts, ends)[1:] != (30, 19)
