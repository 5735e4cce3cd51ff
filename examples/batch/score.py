"""How many answers of the example job are right: its results against the right answers that were kept beside them.

    python -m examples.batch.score RESULTS

An answer is right when it is the expected one word for word, *seen right* when the objects found are those of the
picture. Rows with an error have no answer and are counted apart.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.dataset

from examples.models.language import FORMS

WRONG_SHOWN = 10
COLUMNS = ("id", "form", "question", "shows", "expected", "answer", "detections")


@dataclass(frozen=True, slots=True)
class Scored:
    """One answered row.

    form: what kind of question it is; seen, right: see above.
    line: the row in a sentence.
    """

    form: str
    seen: bool
    right: bool
    line: str


def words(text: str) -> list[str]:
    """Return a text without case and punctuation, which do not make an answer wrong."""
    return re.findall(r"[a-z0-9]+", text.lower())


def things(shows: str) -> Counter[str]:
    """Return how many there are of each: '2 red circles, 1 blue star' has 2 of 'red circle'."""
    counts = (one.split(" ", 1) for one in shows.split(", ")) if shows != "nothing" else ()
    return Counter({name.removesuffix("s") if count != "1" else name: int(count) for count, name in counts})


def judge(row: Mapping[str, Any]) -> Scored:
    """Score a row of the results that has an answer."""
    found = Counter(one["label"] for one in row["detections"])
    saw = ", ".join(f"{count} {name}" for name, count in sorted(found.items())) or "nothing"
    return Scored(
        form=row["form"],
        seen=found == things(row["shows"]),
        right=words(row["answer"]) == words(row["expected"]),
        line=f"{row['id']} “{row['question']}” of {row['shows']}: saw {saw}, "
        f"said “{row['answer']}”, right: “{row['expected']}”",
    )


def read(results: Path) -> list[Scored]:
    """Return the answered rows of a results folder or file, scored, in the order of the data set."""
    files = sorted(map(str, results.glob("*.parquet"))) if results.is_dir() else [str(results)]
    table = pyarrow.dataset.dataset(files, format="parquet").to_table(columns=list(COLUMNS))
    return [judge(row) for row in table.to_pylist()]


def table(scored: Sequence[Scored]) -> str:
    """Return the shares by form as lines."""
    lines = [f"{'form':10} {'answered':>8} {'seen right':>11} {'answered right':>15}"]
    for form in (*FORMS, "all"):
        rows = [one for one in scored if form in (one.form, "all")]
        if rows:
            seen, right = (
                100 * sum(flags) / len(rows) for flags in zip(*((r.seen, r.right) for r in rows), strict=True)
            )
            lines.append(f"{form:10} {len(rows):8} {seen:9.1f} % {right:13.1f} %")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", metavar="RESULTS", type=Path, help="the folder, or the parquet file, of --out")
    options = parser.parse_args()
    if not (any(options.results.glob("*.parquet")) or options.results.is_file()):
        parser.error(f"{options.results} has no results; run the job first, as examples/README.md shows")
    scored = read(options.results)
    print(table(scored))
    wrong = [one.line for one in scored if not one.right]
    for line in wrong[:WRONG_SHOWN]:
        print(line, file=sys.stderr)
    if len(wrong) > WRONG_SHOWN:
        print(f"and {len(wrong) - WRONG_SHOWN} more that are wrong", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
