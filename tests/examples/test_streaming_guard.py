"""The example of a guardrail that judges while it streams does what its guide says."""

from pathlib import Path

import weftline

EXAMPLE = Path(__file__).parents[2] / "examples" / "streaming_guard.yaml"


def test_the_text_turns_bad_and_only_its_beginning_is_seen() -> None:
    with weftline.load(EXAMPLE).open() as session:
        chunks = list(session.stream())
        seen = "".join(one.value for one in chunks if one.output == "answer" and not one.last)
        assert seen.endswith("her address is [the rest is withheld]") and seen.startswith("Thank you for writing")
        verdict = next(one.value for one in chunks if one.output == "verdict")
        assert verdict["action"] == "replace" and verdict["reasons"][0]["rule"] == "e-mail address"
        assert verdict["released_chars"] == len(seen) - len("[the rest is withheld]")
