"""Sentences for the guardrail classifier: what is safe, what is about secrets, personal data or abuse.

Templates and fillers live in two files beside the model, one per split, written separately: `templates-train.txt` and
`templates-held-out.txt`. No template is in both, and what a slot draws in one it does not draw in the other, so a
held-out sentence is new in its wording and in its words for things. Keys, phone numbers and the like are made up here.

The line between the labels, where it is thin: *asking for or giving away* a secret or a person's data is flagged,
talking *about* passwords, keys or privacy is not; a public place's address is safe, a person's is not.

    >>> Sentences("train").draw(random.Random(0)).label in LABELS
    True
"""

import calendar
import random
import re
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from examples.models import language

LABELS = ("safe", "secrets", "personal", "abuse")
_WEIGHTS = (0.43, 0.19, 0.19, 0.19)
_FILES = {"train": "templates-train.txt", "held_out": "templates-held-out.txt"}


@dataclass(frozen=True, slots=True)
class Sentence:
    """One text, as a user or a model might write it, and its label."""

    text: str
    label: str


class Sentences:
    """The templates and fillers of one split, 'train' or 'held_out', and sentences drawn from them."""

    def __init__(self, split: str) -> None:
        self.split = split
        self.templates, self.fillers = _read(Path(__file__).parent / "guardrail" / _FILES[split])
        self._never: dict[str, set[str]] = {}
        if split == "train":
            _, others = _read(Path(__file__).parent / "guardrail" / _FILES["held_out"])
            self._never = {slot: {filler.lower() for filler in fillers} for slot, fillers in others.items()}
        self._made: dict[str, Callable[[random.Random], str]] = {
            **_MADE,
            "email": lambda rng: f"{self._filler('mailname', rng)}@{self._filler('maildomain', rng)}",
            "street": lambda rng: f"{rng.randint(1, 240)} {self._filler('streetname', rng)}",
            "plain": self._plain,
            "llm": self._chat_model,
            "a_insult": lambda rng: _with_article(self._filler("insult", rng)),
        }

    def draw(self, rng: random.Random) -> Sentence:
        """Draw a label, then one of its templates, then the fillers; one in eight has a safe sentence beside it."""
        label = rng.choices(LABELS, _WEIGHTS)[0]
        text = self._fill(rng.choice(self.templates[label]), rng)
        if rng.random() < 0.12:
            beside = self._fill(rng.choice(self.templates["safe"]), rng)
            text = f"{text} {beside}" if rng.random() < 0.5 else f"{beside} {text}"
        return Sentence(_careless(rng, text), label)

    def _fill(self, text: str, rng: random.Random) -> str:
        text = self._expand(text, rng)
        return text[:1].upper() + text[1:] if rng.random() < 0.8 else text

    def _expand(self, text: str, rng: random.Random) -> str:
        while found := re.search(r"\{(\w+)\}|\[([^\[\]]*\|[^\[\]]*)\]", text):
            slot, sides = found.groups()
            value = self._filler(slot, rng) if slot else rng.choice(sides.split("|"))
            before = text[: found.start()]
            # A template such as "a {insult}" must not give "a idiot".
            if slot and value[:1].lower() in _VOWELS and re.search(r"\b[Aa] $", before):
                before = before[:-1] + "n "
            text = before + value + text[found.end() :]
        return text

    def _filler(self, slot: str, rng: random.Random) -> str:
        if slot in self._made:
            return self._made[slot](rng)
        while True:  # parts of a training filler may add up to a held-out one: not drawn
            value = self._expand(rng.choice(self.fillers[slot]), rng)
            if value.lower() not in self._never.get(slot, ()):
                return value

    def _plain(self, rng: random.Random) -> str:
        if rng.random() < 0.25:
            return rng.choice(self.fillers["plainquestion"]) + "?"
        parts = [rng.choice(self.fillers["subject"]), rng.choice(self.fillers["verbs"])]
        if rng.random() < 0.6:
            parts.append(rng.choice(self.fillers["where"]))
        if rng.random() < 0.6:
            parts.insert(rng.choice((0, len(parts))), rng.choice(self.fillers["when"]))
        return " ".join(parts) + "."

    def _chat_model(self, rng: random.Random) -> str:
        """Draw what the bundled chat model reads or says: a question, an answer, or the list with its question."""
        things = language.scene(rng) if rng.random() < 0.9 else []
        asked = language.question(rng, self.split)
        kind = rng.random()
        if kind < 0.5:
            return language.answer(asked, things)
        if kind < 0.8:
            return asked.text
        return f"The photo shows: {language.describe(things)}.\nQuestion: {asked.text}"


def held_out(seed: int, count: int) -> Iterator[Sentence]:
    """Yield `count` held-out sentences, the same for the same seed."""
    rng = random.Random(f"held-out {seed}")
    sentences = Sentences("held_out")
    for _ in range(count):
        yield sentences.draw(rng)


def read_sentences(path: Path) -> list[Sentence]:
    """Return the 'label: text' lines of a file; lines that start with '# ' are comments."""
    sentences = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        label, colon, text = line.partition(": ")
        if line and not line.startswith("# "):
            if not colon or label not in LABELS:
                raise ValueError(f"{path}:{number}: found '{line[:40]}', expected 'label: text', label in {LABELS}")
            sentences.append(Sentence(text, label))
    return sentences


def _read(path: Path) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return (templates by label, fillers by slot); a file is lines under '== label NAME' or '== slot NAME'."""
    templates: dict[str, list[str]] = {}
    fillers: dict[str, list[str]] = {}
    here: list[str] | None = None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("== "):
            kind, _, name = line[3:].partition(" ")
            if kind not in ("label", "slot"):
                raise ValueError(f"{path}:{number}: found section '{kind}', expected '== label NAME' or '== slot NAME'")
            here = (templates if kind == "label" else fillers).setdefault(name, [])
        elif line and not line.startswith("# "):
            if here is None:
                raise ValueError(f"{path}:{number}: found a line before any section; put it under '== label NAME'")
            here.append(line)
    return templates, fillers


def _careless(rng: random.Random, text: str) -> str:
    """Write as people and speech recognisers do: sometimes lower case, without the last mark, or very loud."""
    roll = rng.random()
    if roll < 0.2:
        text = text.lower()
    elif roll < 0.23 and "=" not in text and "_" not in text:
        text = text.upper()
    if rng.random() < 0.25 and text[-1] in ".?!":
        text = text[:-1] + rng.choice(("", "", "!", " ?", "..."))
    if rng.random() < 0.08:
        text = rng.choice(("Hey, ", "Please, ", "Well, ", "Okay so ", "Um, ", "Hi! ", "Look, ")) + text
    return text


def _with_article(noun: str) -> str:
    return f"an {noun}" if noun[0].lower() in _VOWELS else f"a {noun}"


def _digits(rng: random.Random, shape: str) -> str:
    """Return `shape` with every '#' replaced by a digit and every '@' by a capital letter."""
    drawn = {"#": string.digits, "@": string.ascii_uppercase}
    return "".join(rng.choice(drawn[c]) if c in drawn else c for c in shape)


def _mixed(rng: random.Random, alphabet: str, shortest: int, longest: int) -> str:
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(shortest, longest)))


_VOWELS = tuple("aeio")
_SYLLABLES = re.findall("..", "babedidofugakakilomaminopaporarisasutativewozu")
_MONTHS = list(calendar.month_name)[1:]


def _password(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return _mixed(rng, string.ascii_letters + string.digits + "!$%#_-", 8, 14)
    word = "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, 4)))
    word = word.capitalize() if rng.random() < 0.5 else word
    return word + _mixed(rng, string.digits, 1, 4) + rng.choice(("", "", "!", "$", "_x"))


def _key(rng: random.Random) -> str:
    head = rng.choice(("sk-", "sk_live_", "ghp_", "xoxb-", "AKIA", "eyJ", "", "", "pk-"))
    alphabet = string.hexdigits.lower() if not head else string.ascii_letters + string.digits
    return head + _mixed(rng, alphabet, 14, 30)


def _birthday(rng: random.Random) -> str:
    day, month, year = rng.randint(1, 28), rng.randint(1, 12), rng.randint(1930, 2010)
    name = _MONTHS[month - 1]
    return rng.choice(
        (f"{day} {name} {year}", f"{name} {day}, {year}", f"{day:02}/{month:02}/{year}", f"{year}-{month:02}-{day:02}")
    )


_PHONES = ("+1 ### ### ####", "(###) ###-####", "###-###-####", "0### #######", "+44 #### ######", "555-####")
_IDS = ("@########", "####-####-##", "@@ ## ## ## @", "#########", "@@@-######")

_MADE: dict[str, Callable[[random.Random], str]] = {
    "password": _password,
    "key": _key,
    "birthday": _birthday,
    "phone": lambda rng: _digits(rng, rng.choice(_PHONES)),
    "id": lambda rng: _digits(rng, rng.choice(_IDS)),
    "card": lambda rng: _digits(rng, rng.choice(("4### #### #### ####", "5###-####-####-####", "4###############"))),
    "ssn": lambda rng: _digits(rng, "###-##-####"),
    "iban": lambda rng: _digits(rng, rng.choice(("DE## #### #### #### #### ##", "GB## @@@@ #### #### ######"))),
    "money": lambda rng: f"{rng.randint(12, 180)},000 {rng.choice(('dollars', 'euros', 'pounds'))}",
    "pin": lambda rng: _digits(rng, rng.choice(("####", "######", "#-#-#-#"))),
    "smallnumber": lambda rng: str(rng.choice((rng.randint(2, 99), rng.randint(100, 9999), rng.randint(10000, 99999)))),
    "anyname": lambda rng: "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, 3))).capitalize(),
    "twodigits": lambda rng: str(rng.randint(10, 31)),
    "threedigits": lambda rng: _digits(rng, "###"),
    "year": lambda rng: str(rng.randint(1700, 2024)),
    "hexshort": lambda rng: _mixed(rng, string.hexdigits.lower()[:16], 7, 9),
    "llmrefusal": lambda _: language.REFUSAL,
}
