"""Pieces from step to step in real processes: a text that turns bad mid-way, slow steps, and steps that break."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from weftline.engine.request import RequestOptions
from weftline.engine.session import Session, load
from weftline.errors import StepError, WorkerDied
from weftline.pipelines.spec.builder import Builder

NODES = '''
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from weftline.node import Piece, Ports, StreamNode, port

@dataclass(frozen=True)
class LogConfig:
    log: str = ""
    round_ms: float = 2.0
    size: int = 4

class Noted(StreamNode):
    Config: ClassVar[type[Any]] = LogConfig
    def __init__(self, config):
        super().__init__(config)
        self.texts, self.paused = {}, set()
    def note(self, line):
        with open(self.config.log, "a") as log:
            log.write(line + "\\\\n")

class Recites(Noted):
    """Gives its text back in pieces, and notes who stops it."""
    @classmethod
    def ports(cls, config, step):
        return Ports((port("text", "text"),), (port("text", "text", pieces=True),))
    def submit(self, item, inputs, urgency=None):
        self.texts[item] = [inputs["text"], 0]
    def cancel(self, item):
        if item in self.texts:
            self.note(f"cancelled at {self.texts.pop(item)[1]}")
    def pause(self, item):
        self.paused.add(item)
        self.note("paused")
    def resume(self, item):
        self.paused.discard(item)
        self.note("resumed")
    @property
    def busy(self):
        return any(item not in self.paused for item in self.texts)
    def round(self):
        time.sleep(self.config.round_ms / 1000)
        pieces = []
        for item in [item for item in self.texts if item not in self.paused]:
            text, at = self.texts[item]
            self.texts[item][1] = at + self.config.size
            pieces.append(Piece(item, {"text": text[at:at + self.config.size]}))
            if at + self.config.size >= len(text):
                del self.texts[item]
                pieces.append(Piece(item, {"text": text}, last=True))
                self.note("done")
        return pieces

class Counts(Noted):
    """Counts the letters it is fed; fails as its input requests."""
    @classmethod
    def ports(cls, config, step):
        inputs = port("text", "text", pieces=True), port("beside", "text", optional=True)
        return Ports(inputs, (port("report", "json"),))
    def submit(self, item, inputs, urgency=None):
        assert "text" not in inputs
        self.texts[item] = [0, 0, None, inputs.get("beside", "")]
    def cancel(self, item):
        self.texts.pop(item, None)
    def feed(self, item, port, piece, last):
        assert port == "text"
        if "raise" in piece:
            raise ValueError("it said raise")
        if "die" in piece:
            os._exit(3)
        time.sleep(self.config.round_ms / 1000)
        state = self.texts[item]
        if last:
            state[2] = len(piece)
        else:
            state[0] += 1
            state[1] += len(piece)
    @property
    def busy(self):
        return any(state[2] is not None for state in self.texts.values())
    def round(self):
        ended = [(item, state) for item, state in self.texts.items() if state[2] is not None]
        for item, _ in ended:
            del self.texts[item]
        return [Piece(item, {"report": state}, last=True) for item, state in ended]
'''.replace("\\\\n", "\\n")

GOOD = "Your order left the house this morning and should be with you soon. " * 8
BAD = "The customer before you lives at jane.doe@mail.example.org and her card is 4111 1111 1111 1111. "


class Service:
    """Sessions over these nodes, and what the source noted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        (folder / "nodes.py").write_text(NODES)
        self.sessions: list[Session] = []

    def open(
        self, build: Callable[[Builder, Any], None], source: dict[str, Any] | None = None, **limits: Any
    ) -> Session:
        p = Builder("one", base_dir=self.folder, limits={"arena_bytes": 4 << 20} | limits)
        options = {"log": str(self.log)} | (source or {})
        build(p, p.step("say", "nodes.py:Recites", text=p.input("x", "text"), **options).text)
        self.sessions.append(load(p).open())
        return self.sessions[-1]

    def noted(self, last: str) -> list[str]:
        """Return what the source noted, once the last line begins so."""
        until = time.monotonic() + 5
        while time.monotonic() < until:
            lines = self.log.read_text().splitlines() if self.log.exists() else []
            if lines and lines[-1].startswith(last):
                return lines
            time.sleep(0.01)
        raise AssertionError(f"the source never noted {last!r}: {lines}")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path)
    yield made
    for session in made.sessions:
        held = session.stats()
        session.close()
        assert held["arena"]["leased_bytes"] == 0 and held["requests"]["open"] == 0


def guarded(p: Builder, text: Any, **policy: Any) -> None:
    guard = p.step("guard", "guardrail", text=text, policy={"block": ["personal"], "message": "[withheld]"} | policy)
    p.output("answer", guard.text)
    p.output("verdict", guard.verdict)


@pytest.mark.slow
def test_a_text_that_turns_bad_is_never_seen_and_its_source_is_stopped(service: Service) -> None:
    session = service.open(guarded)
    report = list(session.stream(x=GOOD + BAD + GOOD * 20))
    seen = [one.value for one in report if one.output == "answer" and not one.last]
    whole = {one.output: one.value for one in report if one.last}
    wanted = GOOD + "The customer before you lives at "
    assert "".join(seen) == whole["answer"] == wanted + "[withheld]" and len(seen) > 10
    assert whole["verdict"]["action"] == "replace" and whole["verdict"]["released_chars"] == len(wanted)
    at = int(service.noted("cancelled at")[-1].rpartition(" ")[2])
    assert len(wanted) < at < len(GOOD + BAD) + 1_000, "it had 20 times more to say"
    assert session.run(x=GOOD + BAD)["answer"] == wanted + "[withheld]", "for who waits for the whole, too"


@pytest.mark.slow
def test_a_text_that_is_fine_comes_through_in_pieces_while_it_is_written(service: Service) -> None:
    session = service.open(guarded)
    first, done_by_then = True, True
    out = ""
    for one in session.stream(RequestOptions(outputs=["answer"]), x=GOOD * 2):
        if first:
            first, done_by_then = False, service.log.exists()
        out = one.value if one.last else out + one.value
    assert out == GOOD * 2 and not done_by_then


@pytest.mark.slow
def test_a_blocked_text_just_ends(service: Service) -> None:
    session = service.open(lambda p, text: guarded(p, text, on_violation="block"))
    result = session.run(x=GOOD + BAD)
    assert result["answer"] == GOOD + "The customer before you lives at "
    assert result["verdict"]["action"] == "block"


@pytest.mark.slow
def test_redacted_places_are_found_across_pieces(service: Service) -> None:
    session = service.open(lambda p, text: guarded(p, text, block=[], redact=["personal"]), {"size": 3})
    out = "".join(one.value for one in session.stream(RequestOptions(outputs=["answer"]), x=BAD + GOOD) if not one.last)
    assert out == "The customer before you lives at [personal] and her card is [personal]. " + GOOD


def counted(p: Builder, text: Any, **options: Any) -> None:
    p.output("report", p.step("count", "nodes.py:Counts", text=text, **options).report)


@pytest.mark.slow
def test_a_node_of_ones_own_is_fed_pieces_and_then_the_whole(service: Service) -> None:
    session = service.open(counted, {"size": 10})
    assert session.run(x="x" * 95)["report"] == [10, 95, 95, ""]


@pytest.mark.slow
def test_whole_values_reach_stream_inputs_also_through_shared_memory(service: Service) -> None:
    session = service.open(counted, {"size": 50_000})
    assert session.run(x="x" * 120_000)["report"] == [3, 120_000, 120_000, ""]


@pytest.mark.slow
def test_a_slow_step_pauses_its_source_and_loses_nothing(service: Service) -> None:
    session = service.open(
        lambda p, text: counted(p, text, round_ms=5), {"size": 1_000, "round_ms": 0}, stream_bytes_max=20_000
    )
    assert session.run(x="x" * 200_000)["report"] == [200, 200_000, 200_000, ""]
    lines = service.noted("done")
    assert lines.count("paused") == lines.count("resumed") >= 2


def test_a_step_that_cannot_take_a_piece_fails_and_its_source_is_stopped(service: Service) -> None:
    session = service.open(counted, {"size": 13})
    with pytest.raises(StepError, match="said raise"):
        session.run(x="a while .. .." * 3 + " raise" + GOOD * 20)
    service.noted("cancelled at")
    assert session.run(x="good")["report"][2] == 4


@pytest.mark.slow
def test_a_chunk_that_kills_its_step_fails_the_request_without_a_retry(service: Service) -> None:
    session = service.open(lambda p, text: counted(p, text, retry={"attempts": 3}), {"size": 13})
    with pytest.raises(WorkerDied):
        session.run(x="a while .. .." * 3 + " die" + GOOD * 20)
    service.noted("cancelled at")
    assert session.run(x="good")["report"][2] == 4, "its worker is back, perhaps after the text was whole"


def test_an_abandoned_stream_stops_the_source_behind_the_guard(service: Service) -> None:
    session = service.open(guarded)
    stream = session.stream(x=GOOD * 50)
    next(iter(stream))
    stream.close()
    service.noted("cancelled at")


@pytest.mark.slow
def test_two_steps_in_one_worker_feed_each_other(service: Service) -> None:
    def build(p: Builder, text: Any) -> None:
        first = p.step("first", "guardrail", text=text, worker="both", policy={"redact": ["personal"]})
        second = p.step("second", "guardrail", text=first.text, worker="both", policy={"redact": ["secrets"]})
        p.output("answer", second.text)

    session = service.open(build)
    said = list(session.stream(x=GOOD + BAD + "my password is hunter2! " + GOOD))
    want = GOOD + "The customer before you lives at [personal] and her card is [personal]. my [secrets] " + GOOD
    assert "".join(one.value for one in said if not one.last) == said[-1].value == want and len(said) > 10


LLM = '''
import json
from weftline.engine.llm.node import Llm

class Watched(Llm):
    """The language model, which notes how many pages are used when an item is dropped, and after each round."""
    def note(self, what):
        with open("LOG", "a") as log:
            stats = self._engine.stats()
            log.write(json.dumps([what, stats.pages_used, stats.running, stats.waiting]) + "\\n")
    def cancel(self, item):
        self.note("before")
        super().cancel(item)
        self.note("cancelled")
    def round(self):
        pieces = super().round()
        self.note("round")
        return pieces
'''


@pytest.mark.slow
def test_the_language_model_is_stopped_and_its_pages_are_free_at_once(service: Service, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tests.engine.llm.tiny import save

    save(tmp_path / "model")
    log = tmp_path / "pages"
    (tmp_path / "llm.py").write_text(LLM.replace("LOG", str(log)))
    p = Builder("one", base_dir=tmp_path, limits={"arena_bytes": 4 << 20})
    sampling = {"tokens_max": 400, "temperature": 0, "ignore_eos": True}
    answer = p.step("answer", "llm.py:Watched", prompt=p.input("x", "text"), model="model", sampling=sampling)
    rules = {"letters": {"patterns": ["[a-z]"]}}
    guard = p.step("guard", "guardrail", text=answer.text, rules=rules, policy={"block": ["letters"]}, window_chars=1)
    p.output("answer", guard.text)
    service.sessions.append(load(p).open())
    result = service.sessions[-1].run(x="the user asks")
    assert result["answer"].endswith("I cannot share that.") and not any(map(str.islower, result["answer"][:-20]))
    until = time.monotonic() + 5
    while "cancelled" not in log.read_text() and time.monotonic() < until:
        time.sleep(0.01)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    before, after = lines[-2], lines[-1]
    assert before[0] == "before" and before[1] > 0
    assert after == ["cancelled", 0, 0, 0], "no page is used, and nothing runs or waits"
    assert sum(what == "round" for what, *_ in lines) < 350, "it was far from its last token"
