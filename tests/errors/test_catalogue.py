"""Every mistake of the catalogue has the message that its page shows, with an address and a remedy."""

import json
import re
from collections.abc import Iterator

import pytest

from tests.errors.catalogue import Mistake, Runner, open_runner, pages, read_page

MISTAKES = [one for page in pages() for one in read_page(page)]
REWRITE = "if the new text is as good: python -m tests.errors.catalogue"

ADDRESS = re.compile(r"^(\S+(:\d+)?|the command line|weftline serve)  \S")
ENDING = re.compile(r"^\[(exit|status) (\d+)\]\n", re.MULTILINE)
REMEDY = re.compile(
    r"expected|fix: |[Dd]id you mean|exclude each other|leave .* out|(wants|needs?|requires|rename|write) |only with"
    r"|one is needed|missing; name|(inputs|outputs) are |the pipeline's inputs: |such output; it has|types are|known: "
    r"|Input should be|is not one of|stands? alone|Missing argument|No such option|a row is one json object"
)
"""Words of a message that say what to write instead."""

PLAIN = (
    "there is no file",
    "there is no such file or folder",
    "No such file or directory",
    "not valid JSON at character",
    "no model has that name",
    "it has no input `messages`",
    "limits.batch_max is 8",
    "dimensions are integers from 0",
    "No filter named",
    "at character 1: invalid syntax",
    "at character 1: nothing can be called",
    "listed with this one",
)
"""Messages whose finding is their remedy; the list may only get shorter."""


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with open_runner() as runner:
        yield runner


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_a_mistake_has_the_message_of_its_page(runner: Runner, mistake: Mistake) -> None:
    assert runner.run(mistake) == mistake.printed, REWRITE


def test_the_catalogue_is_large_and_its_titles_differ() -> None:
    assert len(MISTAKES) >= 60
    assert len({str(one) for one in MISTAKES}) == len(MISTAKES)


def answers(mistake: Mistake) -> Iterator[tuple[str, int, str]]:
    """Yield each command with its exit code or status, and what it printed."""
    pieces = re.split(r"^\$ ", mistake.printed, flags=re.MULTILINE)[1:]
    for piece in pieces:
        command, _, rest = piece.partition("\n")
        ending = ENDING.search(rest)
        assert ending is not None
        yield command, int(ending[2]), rest[: ending.start()]


def problems(printed: str) -> Iterator[str]:
    """Yield the problems of a PipelineError, each with its indented lines."""
    text = re.sub(r"^PipelineError: |^\d+ problems? in .*; nothing was started\n", "", printed, flags=re.MULTILINE)
    yield from re.findall(r"^\S.*\n(?:    .*\n)*", text, flags=re.MULTILINE)


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
def test_each_problem_has_an_address_and_a_remedy(mistake: Mistake) -> None:
    for command, code, printed in answers(mistake):
        if command.startswith("post "):
            assert code >= 400
            error = json.loads(printed)["error"]
            found = [error if isinstance(error, str) else error["message"]]
        elif "nothing was started" in printed:
            found = list(problems(printed))
            assert [one for one in found if not ADDRESS.match(one)] == []
        elif printed.startswith("Usage: "):
            found = [printed]
        else:
            found = printed.splitlines() if "error: " not in printed else [printed]
            assert [one for one in found if ": " not in one and not one.startswith("  ")] == []
        assert code or command.startswith("python "), "no mistake"
        assert [one for one in found if not REMEDY.search(one) and not any(each in one for each in PLAIN)] == []


def test_every_plain_message_is_in_the_catalogue() -> None:
    printed = "".join(one.printed for one in MISTAKES)
    assert [one for one in PLAIN if one not in printed] == []
