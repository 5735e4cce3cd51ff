"""The guardrail as a step that is fed: items beside each other, one classifier call for all, and odd ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.nodes.test_text_models import write_onnx
from weftline.errors import StepError
from weftline.nodes.contract import ConfigError, OpenContext, Piece, StepContext
from weftline.nodes.guardrail import Guardrail, GuardrailConfig


def opened(base_dir: Path = Path(), **options: Any) -> Guardrail:
    node = Guardrail(GuardrailConfig(**options))
    node.open(OpenContext(base_dir))
    return node


def feed(node: Guardrail, item: int, *pieces: str, last: bool = False) -> None:
    for piece in pieces:
        node.feed(item, "text", piece, last)


def ends(pieces: Any) -> dict[int, Piece]:
    return {piece.item: piece for piece in pieces if piece.last}


def test_concurrent_items_are_kept_apart() -> None:
    node = opened(window_chars=1)
    for item in (1, 2):
        node.submit(item, {})
    feed(node, 1, "mail a.b@c.org ", "and so on " * 30)
    feed(node, 2, "a calm text " * 30)
    pieces = node.round()
    assert ends(pieces)[1].outputs["text"] == "mail I cannot share that." and 2 not in ends(pieces)
    assert not node.busy
    feed(node, 2, "a calm text " * 30, last=True)
    last = ends(node.round())[2].outputs
    assert last["text"] == "a calm text " * 30
    assert last["verdict"] == {"action": "allow", "reasons": [], "scores": {}, "released_chars": 360}
    assert not node._held and not node.busy


def test_a_paused_item_resumes_and_a_cancelled_one_ends_silently() -> None:
    node = opened(window_chars=1)
    node.submit(1, {})
    node.submit(2, {})
    feed(node, 1, "word " * 100)
    feed(node, 2, "word " * 100)
    node.pause(1)
    node.cancel(2)
    node.cancel(9)
    assert not node.busy and node.round() == []
    node.resume(1)
    assert node.busy and [piece.item for piece in node.round()] == [1]


def test_a_text_that_grows_too_long_fails() -> None:
    node = opened(chars_max=10)
    node.submit(1, {})
    feed(node, 1, "much too ", "long")
    (piece,) = node.round()
    assert piece.last and isinstance(piece.error, StepError) and "chars_max is 10" in str(piece.error)
    assert not node._held


def test_a_whole_that_is_not_what_its_pieces_were_is_judged_anew() -> None:
    node = opened(window_chars=1)
    node.submit(1, {})
    feed(node, 1, "one thing " * 30)
    assert node.round()
    feed(node, 1, "another, to a.b@c.org", last=True)
    (piece,) = node.round()
    assert piece.last and piece.outputs["text"] == "another, to I cannot share that."


def test_the_classifier_is_asked_once_for_all_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_onnx(tmp_path / "guard")
    node = opened(tmp_path, classifier="guard", threshold=0.7, policy={"block": ["abuse"]}, judge_every_chars=20)
    assert node._classifier is not None
    calls: list[int] = []
    asked = node._classifier.largest
    monkeypatch.setattr(node._classifier, "largest", lambda texts: calls.append(len(texts)) or asked(texts))
    for item, word in enumerate(["good ", "bad ", "good "]):
        node.submit(item, {})
        feed(node, item, word * 100)
    feed(node, 2, "good " * 100, last=True)
    found = ends(node.round())
    assert calls == [3] and set(found) == {1, 2}
    assert found[1].outputs["text"] == "I cannot share that." and found[1].outputs["verdict"]["released_chars"] == 0
    assert found[2].outputs["text"] == "good " * 100


@pytest.mark.parametrize("option", ["window_chars", "judge_every_chars"])
def test_a_window_is_at_least_one_character(option: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Guardrail.ports(GuardrailConfig(**{option: 0}), StepContext(Path()))
    assert caught.value.option == option
