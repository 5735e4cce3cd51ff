"""What an llm step counts: tokens once, each answer's end once, and the names that leave the worker."""

from __future__ import annotations

import pytest

from tests.engine.llm import tiny
from weftline.engine.llm.counters import TokenCounters
from weftline.engine.llm.node import Llm
from weftline.engine.llm.options import LlmConfig
from weftline.engine.llm.request import TokenUpdate
from weftline.engine.protocol.figures import take
from weftline.errors import InputError
from weftline.nodes.contract import OpenContext


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Llm:
    folder = tiny.save(tmp_path_factory.mktemp("models") / "tiny")
    made = Llm(LlmConfig(model=folder.name, sampling={"tokens_max": 8, "ignore_eos": True}))
    made.open(OpenContext(base_dir=folder.parent))
    made.warm_up()
    return made


def test_a_prompt_counts_once_and_each_answer_ends_once() -> None:
    totals = TokenCounters()
    totals.add(TokenUpdate(1, (5,), prompt_tokens=10), first=True)
    totals.add(TokenUpdate(1, (6, 7), finish="stop", prompt_tokens=10), first=False)
    totals.add(TokenUpdate(1, (8,), finish="length", prompt_tokens=10, index=1), first=False)
    totals.add(TokenUpdate(2, error=InputError("no")), first=True)
    assert totals == TokenCounters(prompt_tokens=10, completion_tokens=4, stopped=1, cut=1, failed=1)


def test_the_node_tells_of_its_engine_and_of_every_request(node: Llm) -> None:
    report = take(0, "answer", node)
    assert report is not None, "its names and numbers pass"
    assert report.values["prompt_tokens_total"] == 0, "warming up is no request"
    node.submit(1, {"prompt": "one"})
    node.submit(2, {"prompt": "two", "sampling": {"tokens_max": 3, "n": 2, "temperature": 1.0}})
    node.submit(3, {})  # refused
    node.submit(4, {"prompt": "four"})
    node.round()
    during = node.figures()
    assert during["running"] == 4 and during["pages_used"] > 0
    node.cancel(4)
    node.cancel(4)
    prompts = 0
    while node.busy:
        for piece in node.round():
            if piece.last and piece.error is None:
                prompts += piece.outputs["usage"]["prompt_tokens"]
    figures = node.figures()
    assert figures["completion_tokens_total"] in range(8 + 2 * 3, 8 + 2 * 3 + 9), "what was said to 4 counts too"
    assert figures["prompt_tokens_total"] >= prompts > 0
    assert figures["finished_length_total"] == 3
    assert (figures["finished_error_total"], figures["finished_abort_total"]) == (1, 1)
    assert figures["running"] == figures["waiting"] == figures["pages_used"] == 0
