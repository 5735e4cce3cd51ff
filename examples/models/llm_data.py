"""What the small chat model is trained and scored on: lists of shapes, questions about them, and everything else.

Two splits are made before any training, and neither looks at an answer:

- *lists*: the SHA-256 of the described multiset decides, one multiset in ten is held out (`list_split`);
- *wordings*: `language.phrasings` for questions, `_split_words` for the everyday sentences that get the refusal.

A `Case` is one list with several questions to it. Training reads the list once for all of them; the model still sees
exactly the message a pipeline would send, `case.prefix + turn.text`.

    >>> message([Thing("red", "circle")], "Is there a red circle?")
    'The photo shows: 1 red circle.\\nQuestion: Is there a red circle?'
"""

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from examples.models import language
from examples.models.language import REFUSAL, Question, Thing

SYSTEMS = (
    "You answer questions about a picture.",
    "You are a helpful assistant.",
    "Answer in one short sentence.",
    "You answer questions about the shapes in the picture.",
)
_HEADS = ("The picture shows: ", "The image shows: ", "I can see: ", "the photo shows: ", "Detections: ")
_MARKS = ("Q: ", "question: ", "The question: ", "Question:  ", "", "The user asks: ")


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and its right answer; `form` is one of `language.FORMS` or 'refuse'."""

    form: str
    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class Case:
    """A list as the model reads it, with a line break at its end ('' for none), and questions about it."""

    system: str
    prefix: str
    turns: tuple[Turn, ...]


def message(things: Sequence[Thing], text: str) -> str:
    """Return the user message that the example pipeline renders for a picture of `things` and a spoken `text`."""
    return f"The photo shows: {language.describe(things)}.\nQuestion: {text}"


def list_split(things: Sequence[Thing]) -> str:
    """Return 'train' or 'held_out'; the order of `things` does not matter, and the empty picture is for training."""
    described = language.describe(things)
    held_out = hashlib.sha256(described.encode()).digest()[0] % 10 == 0 and bool(things)
    return "held_out" if held_out else "train"


def draw_scene(rng: random.Random, split: str) -> list[Thing]:
    """Draw a picture of `split`; one training picture in forty is empty."""
    if split == "train" and rng.random() < 0.025:
        return []
    while True:
        things = language.scene(rng)
        if list_split(things) == split:
            return things


def training_case(rng: random.Random, turns: int = 6) -> Case:
    """Draw a training case: varied list wording, slips in the questions, some refusals, one in sixteen with no list."""
    system = rng.choice(SYSTEMS) if rng.random() < 0.04 else ""
    if rng.random() < 1 / 16:
        asked = [refused(rng, "train") if rng.random() < 0.7 else language.question(rng).text for _ in range(turns)]
        return Case(system, "", tuple(Turn("refuse", _marked(rng, t, plain=0.5), REFUSAL) for t in asked))
    things = draw_scene(rng, "train")
    drawn = []
    for _ in range(turns):
        if rng.random() < 0.12:
            drawn.append(Turn("refuse", _marked(rng, refused(rng, "train")), REFUSAL))
        else:
            drawn.append(_asked(rng, _question(rng), things))
    return Case(system, _listed(rng, things), tuple(drawn))


_FORM_WEIGHTS = {"count": 6, "exists": 3, "colour": 4, "which": 6, "colours": 1}
"""How often training asks each form: the long answers teach the most about reading a list."""


def _question(rng: random.Random) -> Question:
    (form,) = rng.choices(language.FORMS, [_FORM_WEIGHTS[form] for form in language.FORMS])
    while True:
        asked = language.question(rng)
        if asked.form == form:
            return asked


def held_out_pairs(seed: int, count: int) -> Iterator[tuple[str, Turn]]:
    """Yield `count` (user message, turn) pairs: held-out list, held-out wording, exactly as the pipeline renders it.

    One in ten is an everyday sentence that must be refused; half of the others have American spelling.
    """
    rng = random.Random(f"held-out {seed}")
    for _ in range(count):
        things = draw_scene(rng, "held_out")
        if rng.random() < 0.1:
            text = refused(rng, "held_out")
            yield message(things, text), Turn("refuse", text, REFUSAL)
            continue
        asked = language.question(rng, "held_out")
        text = language.american(asked.text) if rng.random() < 0.5 else asked.text
        yield message(things, text), Turn(asked.form, text, language.answer(asked, things))


def slip(rng: random.Random, text: str) -> str:
    """Return `text` as a hurried writer or a speech recogniser might give it; it still asks the same."""
    if rng.random() < 0.5:
        text = language.american(text)
    if rng.random() < 0.6:
        return text
    if rng.random() < 0.3:
        text = text.lower()
    if rng.random() < 0.3:
        text = text.rstrip("?") + rng.choice(("", ".", " ?", "??", "!"))
    if rng.random() < 0.15:
        text = re.sub(r"\b(an?|the|any) ", "", text, count=1)
    if rng.random() < 0.1:
        text = re.sub(r"\b(an?|any) ", "the ", text, count=1)
    if rng.random() < 0.15:
        text = re.sub(r"(circle|square|triangle|star|object|shape|thing)s\b", r"\1", text)
    elif rng.random() < 0.1:
        text = re.sub(r"(circle|square|triangle|star|object|shape|thing)\b", r"\1s", text)
    if rng.random() < 0.1:
        sound, written = rng.choice(_SOUND_ALIKE)
        text = re.sub(rf"\b{sound}\b", written, text)
    words = text.split(" ")
    if rng.random() < 0.12:
        spot = rng.randrange(len(words))
        words.insert(spot, words[spot])
    if rng.random() < 0.1:
        words.insert(rng.randrange(len(words)), "")
    if rng.random() < 0.08:
        words.insert(0, rng.choice(("Um", "Please,", "So", "Hey,", "Okay,", "And", "Tell me,")))
    return " ".join(words)


_SOUND_ALIKE = (
    ("blue", "blew"), ("red", "read"), ("see", "sea"), ("there", "their"), ("here", "hear"), ("circles", "circle's"),
    ("stars", "stares"), ("squares", "squire's"), ("the", "a"), ("green", "grean"), ("yellow", "yello"), ("are", "our"),
)  # fmt: skip


def _asked(rng: random.Random, asked: Question, things: Sequence[Thing]) -> Turn:
    return Turn(asked.form, _marked(rng, slip(rng, asked.text)), language.answer(asked, things))


def _marked(rng: random.Random, text: str, plain: float = 0.1) -> str:
    if rng.random() < plain:
        return rng.choice(_MARKS) + text
    return "Question: " + text


def _listed(rng: random.Random, things: Sequence[Thing]) -> str:
    items = language.describe(things).split(", ")
    if rng.random() < 0.08:
        rng.shuffle(items)
    if rng.random() < 0.04:
        items = [re.sub(r"^\d", lambda m: _WORDS[int(m[0])], item) for item in items]
    joined = ", ".join(items)
    if len(items) > 1 and rng.random() < 0.04:
        joined = f"{', '.join(items[:-1])} and {items[-1]}"
    head = rng.choice(_HEADS) if rng.random() < 0.06 else "The photo shows: "
    return f"{head}{joined}.\n"


_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def refused(rng: random.Random, split: str) -> str:
    """Draw an everyday sentence or a near miss ('How many dogs are there?') of `split`; the answer is the refusal."""
    sentences, words = _split_words(split)
    text = rng.choice(sentences)
    for slot in re.findall(r"\{(\w)\}", text):
        filler = rng.choice(language.SHAPES) if slot == "s" else rng.choice(words[slot])
        text = text.replace("{" + slot + "}", filler, 1)
    if split == "train":
        text = language.american(text) if rng.random() < 0.5 else text
        text = text.lower() if rng.random() < 0.15 else text
        text = text.rstrip("?.!") if rng.random() < 0.15 else text
    return text


@cache
def _split_words(split: str) -> tuple[list[str], dict[str, list[str]]]:
    """Return sentences and their fillers: every fifth sentence and every fourth filler of each kind is held out."""

    def keep(position: int, period: int) -> bool:
        return (position % period == period - 1) == (split == "held_out")

    text = (Path(__file__).parent / "shapes-chat" / "everyday.txt").read_text(encoding="utf-8")
    (_, sentences), *kinds = (part.split("\n", 1) for part in text.split("== ")[1:])
    fillers = {slot: [w for i, w in enumerate(words.split()) if keep(i, 4)] for slot, words in kinds}
    return [s for i, s in enumerate(sentences.strip().split("\n")) if keep(i, 5)], fillers
