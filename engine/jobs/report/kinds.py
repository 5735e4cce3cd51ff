"""Grouping of error rows by similarity.

Reasons that differ only in numbers and quoted parts are one kind. Memory is bounded, whatever the reasons are: of many
kinds the most frequent are told, and the rest is counted together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from weftline.engine.jobs.progress import ErrorKind
from weftline.engine.jobs.report.words import counted
from weftline.engine.jobs.rows import RowError

KINDS_MAX = 50
SPARE = 8
"""So many times the kinds that are told are counted, for the frequent ones may come late."""

IDS_MAX = 5
REASON_CHARS_MAX = 300
ID_CHARS_MAX = 200

OTHER = "other"
"""The error of the kind that holds the rest."""

_QUOTED = re.compile(r"""(?<!\w)'[^'\n]*'(?!\w)|"[^"\n]*"|`[^`\n]*`""")
_NUMBER = re.compile(r"0[xX][0-9a-fA-F]+|\d+(?:[.,_]\d+)*(?:[eE][+-]?\d+)?")


def common(reason: str) -> str:
    """Return what a reason has in common with its like: quoted parts as '…', numbers as N.

    Of names with numbers in them, such as `float32`, nothing is kept but the letters and an N.
    """
    return _NUMBER.sub("N", _QUOTED.sub("'…'", reason[:REASON_CHARS_MAX]))


@dataclass(slots=True)
class _Counted:
    reason: str
    count: int = 0
    ids: list[str] = field(default_factory=list)

    def add(self, id: str) -> None:
        self.count += 1
        if len(self.ids) < IDS_MAX:
            self.ids.append(_cut(id, ID_CHARS_MAX))


class ErrorKinds:
    """Counts error rows by kind."""

    def __init__(self, most: int = KINDS_MAX) -> None:
        """most: kinds that are told, without the rest."""
        self._most = most
        self._kinds: dict[tuple[str, str, str], _Counted] = {}
        self._rest = _Counted("")

    def add(self, id: str, error: RowError) -> None:
        """Count an error row."""
        key = (_cut(error.step, ID_CHARS_MAX), _cut(error.error, ID_CHARS_MAX), common(error.reason))
        reason = _cut(error.reason, REASON_CHARS_MAX)
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= self._most * SPARE:
                self._rest.add(id)
                return
            kind = self._kinds[key] = _Counted(reason)
        elif kind.reason != reason:
            kind.reason = key[2]
        kind.add(id)

    def kinds(self) -> list[ErrorKind]:
        """Return the most frequent kinds, most rows first, and last the rest as one of error `other`, if there is any.

        The reason is the rows' own where it is the same in all of them, and what they have in common otherwise.
        """
        ranked = sorted(self._kinds.items(), key=lambda item: (-item[1].count, item[0]))
        told = [
            ErrorKind(step, error, kind.reason, kind.count, tuple(kind.ids))
            for (step, error, _), kind in ranked[: self._most]
        ]
        left = [kind for _, kind in ranked[self._most :]]
        count = self._rest.count + sum(kind.count for kind in left)
        if count:
            ids = [id for kind in (*left, self._rest) for id in kind.ids][:IDS_MAX]
            told.append(ErrorKind("", OTHER, f"{counted(count, 'row')} with rarer reasons", count, tuple(ids)))
        return told


def _cut(text: str, chars_max: int) -> str:
    return text if len(text) <= chars_max else text[:chars_max] + "…"
