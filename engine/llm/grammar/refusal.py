"""Error messages for invalid structured-output constraints.

The parser's messages name its own parts, limits and lines of code. Here they are put into words for whoever wrote the
constraint: what is wrong with it and what to do, nothing of how the parser is made.
"""

from __future__ import annotations

WHERE = "sampling: the constraint:"
SIMPLER = "make it simpler, or less ambiguous"


def told(error: str) -> str:
    """Return the parser's complaint as the caller may read it: what is wrong, without how the parser is made."""
    lines = error.partition("\n<non-verbose/>")[0].splitlines() or [""]
    reason = next((meaning for sign, meaning in _MEANINGS.items() if sign in lines[0]), "")
    if not reason:  # of a wrong pattern, only one of the lines says what is wrong
        reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
        reason = reason.partition(" in regex /")[0].replace("json-schema://", "")
    return f"{WHERE} {reason.strip() or 'it cannot be used':.300}"


_MEANINGS = {
    "too many states:": f"needs too many states; {SIMPLER}",
    "too many expressions constructed": f"is too large once its repeats are written out; {SIMPLER}",
    "Too many items (limit": f"can go on in too many ways at once; {SIMPLER}",
    "Current row has": f"can go on in too many ways at once; {SIMPLER}",
    "too big (limit for this grammar": f"is too large once its repeats are written out; {SIMPLER}",
    "schema too large": f"is too large once its alternatives are written out; {SIMPLER}",
    "fuel exhausted": f"takes too long to prepare; {SIMPLER}",
    "lexer precomputation failed": f"takes too long to prepare; {SIMPLER}",
    "special token": "it names a control token, which is no text; write the text itself",
    "rollback not supported": "tokens cannot be taken back; leave out max_tokens and stop",
    "NoExtension": "no text satisfies it",
    "InternalError": f"is too complex; {SIMPLER}",
    "panic:": "it cannot be used",
}
"""What the parser says (a part of its first line), and what that means to whoever wrote the constraint."""
