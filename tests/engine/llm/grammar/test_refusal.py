"""Parser errors are translated for the author of a constraint, without internals of the parser."""

import pytest

from weftline.engine.llm.grammar.matcher import explain


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("", "sampling: the constraint: it cannot be used"),
        ("\n<non-verbose/>", "sampling: the constraint: it cannot be used"),
        ("lexer error: too many states: 250000 >= 250000\n<non-verbose/>", "needs too many states"),
        (
            'at 1(8): invalid regex "(a" (in regex): regex parse error:\n    (a\n    ^\nerror: unclosed group\n',
            "unclosed",
        ),
        ("panic: src/parser.rs:17 0xdeadbeef\n  at /srv/x.rs", "it cannot be used"),
        ("circular references are not supported: json-schema:///#/$defs/a", "not supported: /#/$defs/a"),
        ("x" * 5000, "xxx"),
    ],
)
def test_the_parsers_complaints_are_put_into_words(said: str, meant: str) -> None:
    assert meant in explain(said)
    assert "\n" not in explain(said) and ".rs" not in explain(said)
    assert len(explain(said)) < 350
