"""The chat model's data: what is held out stays out of training, and the shipped model answers it."""

import random
from pathlib import Path

import pytest

from examples.models import language, llm_data
from examples.models.language import Thing

SHIPPED = Path(__file__).parents[2] / "examples" / "models" / "shapes-chat"
needs_weights = pytest.mark.skipif(not (SHIPPED / "model.safetensors").exists(), reason="the weights are not here")


def test_a_message_is_what_the_pipeline_renders() -> None:
    things = [Thing("red", "circle"), Thing("red", "circle"), Thing("blue", "star")]
    prompt = llm_data.message(things, "How many red circles are there?")
    assert prompt == "The photo shows: 2 red circles, 1 blue star.\nQuestion: How many red circles are there?"
    assert llm_data.message([], "Is there a star?") == "The photo shows: nothing.\nQuestion: Is there a star?"


def test_the_order_of_a_list_does_not_change_its_split() -> None:
    rng = random.Random(1)
    splits = set()
    for _ in range(300):
        things = language.scene(rng)
        before = llm_data.list_split(things)
        rng.shuffle(things)
        assert llm_data.list_split(things) == before
        splits.add(before)
    assert splits == {"train", "held_out"}


def test_no_drawn_list_is_of_the_other_split() -> None:
    rng = random.Random(2)
    drawn = {split: {language.describe(llm_data.draw_scene(rng, split)) for _ in range(400)} for split in _SPLITS}
    assert not drawn["train"] & drawn["held_out"]
    assert min(map(len, drawn.values())) > 200


def test_no_wording_is_in_both_splits() -> None:
    assert not set(language.phrasings("train")) & set(language.phrasings("held_out"))
    rng = random.Random(3)
    refused = {split: {llm_data.refused(rng, split).lower().rstrip("?.!") for _ in range(2000)} for split in _SPLITS}
    refused["train"] = {language.american(text) for text in refused["train"]}
    refused["held_out"] = {language.american(text) for text in refused["held_out"]}
    assert not refused["train"] & refused["held_out"]


def test_the_same_seed_draws_the_same_cases() -> None:
    first = [llm_data.training_case(random.Random("7/3")) for _ in range(2)]
    assert first[0] == first[1]
    assert list(llm_data.held_out_pairs(5, 30)) == list(llm_data.held_out_pairs(5, 30))
    assert list(llm_data.held_out_pairs(5, 30)) != list(llm_data.held_out_pairs(6, 30))


def test_the_answer_depends_on_the_list() -> None:
    text = "How many circles do you see here?"
    asked = language.Question("count", language.Target(shape="circle"), text)
    answers = {language.answer(asked, [Thing("red", "circle")] * n + [Thing("blue", "star")]) for n in range(9)}
    assert len(answers) == 9


def test_a_slip_never_turns_one_shape_or_colour_into_another() -> None:
    rng = random.Random(4)
    for _ in range(2000):
        asked = language.question(rng)
        slipped = llm_data.slip(rng, asked.text).lower().replace("blew", "blue")
        for word in (*language.SHAPES, *language.COLOURS):
            assert word in asked.text.lower() or word not in slipped, (asked.text, slipped)


@pytest.mark.slow
@needs_weights
def test_the_shipped_model_answers_held_out_questions_about_held_out_lists() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from examples.models import train_llm

    torch.set_num_threads(1)
    table = train_llm.score(SHIPPED, pairs=40, seed=11)
    right = sum(r for r, _ in table.values())
    assert right >= 38, table


@needs_weights
def test_questions_packed_behind_one_list_see_what_they_would_see_alone() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from examples.models import train_llm

    tokenizer = transformers.AutoTokenizer.from_pretrained(SHIPPED, local_files_only=True)
    model = train_llm.build_model(train_llm.Size(width=32, inner=32, layers=2), tokenizer).eval()
    case = llm_data.training_case(random.Random(5), turns=3)
    batch = train_llm.collate(tokenizer, [case])
    packed = model(
        input_ids=batch.ids, position_ids=batch.positions, attention_mask=batch.mask, use_cache=False
    ).logits[batch.labels >= 0]
    alone = []
    for turn in case.turns:
        chat = [{"role": "user", "content": case.prefix + turn.text}]
        asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        reply = tokenizer.encode(turn.answer, add_special_tokens=False)
        alone.append(model(input_ids=torch.tensor([[*asked, *reply]])).logits[0, len(asked) - 1 :])
    assert case.system == "", "pick a seed whose case has no system message"
    assert torch.allclose(packed, torch.cat(alone), atol=1e-5)


@needs_weights
def test_the_tokenizer_gives_back_any_text() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(SHIPPED, local_files_only=True)
    for text in ("2 red circles, 12 stars.\nQuestion:  Wie viele?", "Ünïcode 日本 😀\t<html>"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert len(tokenizer.encode(" 2024", add_special_tokens=False)) == 4


_SPLITS = ("train", "held_out")
