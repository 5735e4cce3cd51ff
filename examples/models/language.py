"""What can be asked about a picture of coloured shapes, and the right answer to each question.

One vocabulary serves the speech recogniser, the language model, the detector and the evaluation: 4 colours, 4 shapes,
1 to 9 objects. A question is a *form* (what is asked) said in one of several *phrasings* (how it is asked), about a
*target* (any object, a colour, a shape, or a colour and a shape). `answer` is the one truth all of them are scored by.

Phrasings are split before any model is trained: `phrasings("train")` and `phrasings("held_out")` share no wording, but
every word of a held-out phrasing occurs in some training phrasing.

    >>> scene = [Thing("red", "circle"), Thing("red", "circle"), Thing("blue", "star")]
    >>> describe(scene)
    '2 red circles, 1 blue star'
    >>> answer(Question("count", Target("red", "circle"), ""), scene)
    'There are 2 red circles.'
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

COLOURS = ("red", "green", "blue", "yellow")
SHAPES = ("circle", "square", "triangle", "star")
ANY = ("object", "shape", "thing")
"""Three words for an object of any kind; all mean the same."""

FORMS = ("count", "exists", "colour", "which", "colours")

REFUSAL = "I can only answer questions about the shapes in the picture."
"""What the language model says to anything that is not one of the forms."""


@dataclass(frozen=True, slots=True)
class Thing:
    """One object in a picture."""

    colour: str
    shape: str

    @property
    def name(self) -> str:
        """The detector's class name, such as 'red circle'."""
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True, slots=True)
class Target:
    """What a question is about: `colour` and `shape` may each be absent; with both absent, `noun` names any object."""

    colour: str | None = None
    shape: str | None = None
    noun: str = "object"

    @property
    def singular(self) -> str:
        return " ".join(w for w in (self.colour, self.shape or self.noun) if w)

    @property
    def plural(self) -> str:
        return self.singular + "s"

    def matches(self, thing: Thing) -> bool:
        return self.colour in (None, thing.colour) and self.shape in (None, thing.shape)


@dataclass(frozen=True, slots=True)
class Question:
    """A form, its target, and the words it is asked in (British spelling; see `american`)."""

    form: str
    target: Target
    text: str


# {p} is the plural of the target, {a} the singular with its article, {s} the singular alone.
_PLACES = ("", " in the picture", " in the image", " in the photo", " here")
_COUNT = ("How many {p} are there", "How many {p} do you see", "How many {p} can you see", "How many {p} are")
_EXISTS = (
    "Is there {a}",
    "Do you see {a}",
    "Can you see {a}",
    "Are there any {p}",
    "Do you see any {p}",
    "Can you see any {p}",
    "Are there {p}",
    "Do you see {p}",
    "Can you see {p}",
)
_COLOUR = ("What colour is the {s}", "Which colour is the {s}", "What colour are the {p}", "Which colour are the {p}")
_WHICH = (
    "Which {p} are there",
    "Which {p} do you see",
    "Which {p} can you see",
    "What {p} are there",
    "What {p} do you see",
    "What {p} can you see",
)
_COLOURS = (
    "Which colours are there",
    "Which colours do you see",
    "Which colours can you see",
    "What colours are there",
    "What colours do you see",
    "What colours can you see",
)

_OPENINGS = {"count": _COUNT, "exists": _EXISTS, "colour": _COLOUR, "which": _WHICH, "colours": _COLOURS}

# Held out whole: the opening together with its place. Each word still occurs in training.
_HELD_OUT = {
    "How many {p} can you see in the image",
    "How many {p} do you see here",
    "How many {p} are in the photo",
    "Is there {a} in the image",
    "Do you see {a} in the photo",
    "Can you see any {p} in the picture",
    "Are there any {p} here",
    "Are there {p} in the photo",
    "What colour are the {p} in the image",
    "What colour is the {s} in the photo",
    "Which colour is the {s} here",
    "Which {p} do you see in the image",
    "What {p} can you see in the photo",
    "Which colours can you see in the picture",
    "What colours are there in the photo",
}


def phrasings(split: str) -> list[tuple[str, str]]:
    """Return (form, wording) pairs of `split`, one of 'train', 'held_out' or 'all', in a fixed order."""
    pairs = []
    for form, openings in _OPENINGS.items():
        for opening in openings:
            for place in _PLACES:
                if opening == "How many {p} are" and not place:
                    continue
                wording = opening + place
                if split == "all" or (wording in _HELD_OUT) == (split == "held_out"):
                    pairs.append((form, wording))
    return pairs


def targets(form: str) -> list[Target]:
    """Return every target that `form` can ask about."""
    anything = [Target(noun=noun) for noun in ANY]
    coloured = [Target(colour=c, noun=noun) for c in COLOURS for noun in ANY]
    shaped = [Target(shape=s) for s in SHAPES]
    both = [Target(colour=c, shape=s) for c in COLOURS for s in SHAPES]
    if form == "colours":
        return [Target()]
    if form == "colour":
        return shaped
    return (
        {"count": anything, "exists": [], "which": anything}[form]
        + coloured
        + shaped
        + (both if form != "which" else [])
    )


def say(form: str, wording: str, target: Target) -> Question:
    """Return `wording` about `target` as a question that ends in a question mark."""
    text = wording.format(p=target.plural, s=target.singular, a=_with_article(target.singular)) + "?"
    return Question(form, target, text)


def question(rng: random.Random, split: str = "train") -> Question:
    """Draw a question: form first, then target class, then wording, so that rare forms are not drowned."""
    form = rng.choices(FORMS, weights=(5, 5, 3, 3, 1))[0]
    wording = rng.choice([w for f, w in phrasings(split) if f == form])
    kinds: dict[tuple[bool, bool], list[Target]] = {}
    for target in targets(form):
        kinds.setdefault((target.colour is None, target.shape is None), []).append(target)
    return say(form, wording, rng.choice(kinds[rng.choice(sorted(kinds))]))


def scene(rng: random.Random) -> list[Thing]:
    """Draw 1 to 9 objects; a third of scenes repeat themselves, so that large counts of one kind occur."""
    count = rng.randint(1, 9)
    colours = COLOURS if rng.random() < 0.66 else rng.sample(COLOURS, rng.randint(1, 2))
    shapes = SHAPES if rng.random() < 0.66 else rng.sample(SHAPES, rng.randint(1, 2))
    return [Thing(rng.choice(colours), rng.choice(shapes)) for _ in range(count)]


def american(text: str) -> str:
    """Return `text` with American spelling: the two spellings sound alike and mean the same."""
    return text.replace("colour", "color").replace("Colour", "Color")


def describe(things: Sequence[Thing]) -> str:
    """Return the list the language model reads, most numerous first, then by name; 'nothing' when it is empty.

    The template filter `describe` gives the same text for the same detections; a test compares them.
    """
    counts = Counter(thing.name for thing in things)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{n} {name}{'s' if n != 1 else ''}" for name, n in ordered) or "nothing"


def answer(asked: Question, things: Sequence[Thing]) -> str:
    """Return the one right answer to `asked` about a picture of `things`."""
    target = asked.target
    found = [thing for thing in things if target.matches(thing)]
    if asked.form == "count":
        return f"There is 1 {target.singular}." if len(found) == 1 else f"There are {len(found)} {target.plural}."
    if asked.form == "exists":
        return f"Yes, there is {_with_article(target.singular)}." if found else f"No, there is no {target.singular}."
    if not found:
        return f"There are no {target.plural}."
    colours = _join([c for c in COLOURS if any(t.colour == c for t in found)])
    if asked.form == "colours":
        return f"The colours are {colours}." if " " in colours else f"The colour is {colours}."
    if asked.form == "colour":
        return f"The {target.singular} is {colours}." if len(found) == 1 else f"The {target.plural} are {colours}."
    return f"I see {_join(_listed(found))}."


def _listed(things: Sequence[Thing]) -> list[str]:
    counts = Counter(things)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0].name))
    return [_with_article(t.name) if n == 1 else f"{_WORDS[n]} {t.name}s" for t, n in ordered]


_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def _with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _join(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
