"""Control flow in real processes, written as people write it: YAML files that are loaded, opened and asked."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.fire import HERE, STEPS, Gate, ask, outputs, together, wait_until
from weftline.engine.request import RequestOptions
from weftline.engine.result import Result
from weftline.engine.session import Session, Source
from weftline.errors import DeadlineExceeded, InputError, StepError

Start = Callable[[Source], Session]
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a pipeline file beside the steps it names; words in capitals are filled in."""
    shutil.copy(HERE / STEPS, tmp_path)

    def write(text: str, name: str = "pipeline.yaml", **words: Any) -> Path:
        for word, value in words.items():
            text = text.replace(word, json.dumps(str(value)))
        path = tmp_path / name
        path.write_text("weftline: 1\nname: flow\nlimits: {arena_bytes: 4194304}\n" + text)
        return path

    return write


def steps_of(result: Result | Any, outcome: str = "ok") -> list[str]:
    return [timing.step for timing in result.timings if timing.outcome == outcome]


# conditions


WHEN = """
inputs: {text: text}
steps:
  kind: {node: function, function: "fire_steps.py:kind", inputs: {text: text}}
  loud: {node: function, function: "fire_steps.py:shout", inputs: {text: text}, when: "kind.output in ['shout', 'say']"}
  after: {node: function, function: "fire_steps.py:joined", inputs: {text: loud.output}}
outputs: {loud: loud.output, after: after.output, kind: kind.output}
"""


@pytest.mark.slow
def test_a_false_condition_skips_the_step_and_its_dependents(start: Start, write: Write) -> None:
    session = start(write(WHEN))
    said, quiet = session.run(text="shout it"), session.run(text="whisper it")
    assert dict(said) == {"loud": "SHOUT IT", "after": "SHOUT IT!", "kind": "shout"}
    assert dict(quiet) == {"loud": None, "after": None, "kind": "whisper"}
    assert steps_of(quiet) == ["kind"] and steps_of(quiet, "skipped") == ["loud", "after"]
    many = together(session, [{"text": f"{word} {at}"} for at in range(30) for word in ("say", "hush")])
    assert outputs(many, "loud") == [one for at in range(30) for one in (f"SAY {at}", None)]


SWITCH = """
inputs: {text: text}
steps:
  kind: {node: function, function: "fire_steps.py:kind", inputs: {text: text}}
  one: {node: "fire_steps.py:Gated", folder: ONE, inputs: {value: text}}
  two: {node: "fire_steps.py:Gated", folder: TWO, inputs: {value: text}}
  other: {node: "fire_steps.py:Gated", folder: OTHER, inputs: {value: text}}
  chosen: {node: switch, inputs: {by: kind.output, first: one.value, second: two.value, default: other.value}}
outputs: {y: chosen.value}
"""


@pytest.mark.slow
def test_only_the_chosen_case_of_a_switch_is_run(start: Start, write: Write, tmp_path: Path) -> None:
    one, two, other = (Gate(tmp_path / name) for name in ("one", "two", "other"))
    session = start(write(SWITCH, ONE=one.folder, TWO=two.folder, OTHER=other.folder))
    texts = ["first a", "second b", "third c", "first d"]
    assert outputs(together(session, [{"text": text} for text in texts])) == texts
    assert sorted(one.seen()) == ["first a", "first d"] and two.seen() == ["second b"] and other.seen() == ["third c"]
    assert "one" in steps_of(session.run(text="first e")) and "two" not in steps_of(session.run(text="first f"))


FIRST = """
inputs: {text: text, better: {type: text, optional: true}}
steps:
  made: {node: function, function: "fire_steps.py:shout", inputs: {text: better}}
  picked: {node: first, inputs: {a: made.output, b: text}}
  said: {node: function, function: "fire_steps.py:joined", inputs: {text: picked.value}}
outputs: {y: said.output}
"""


@pytest.mark.slow
def test_the_first_value_that_is_there_is_taken(start: Start, write: Write) -> None:
    session = start(write(FIRST))
    assert session.run(text="plain", better="best")["y"] == "BEST!"
    assert session.run(text="plain")["y"] == session.run(text="plain", better=None)["y"] == "plain!"


OPTIONAL = """
inputs:
  text: text
  ending: {type: text, default: "..."}
  more: {type: text, optional: true}
steps:
  s: {node: function, function: "fire_steps.py:joined", inputs: {text: text, ending: ending}}
  t: {node: function, function: "fire_steps.py:joined", inputs: {text: s.output, ending: more}}
  u: {node: function, function: "fire_steps.py:joined", inputs: {text: t.output, ending: {value: "?"}}}
outputs: {y: u.output}
"""


@pytest.mark.slow
def test_a_pipeline_that_only_chooses_opens_without_a_worker(start: Start, write: Write) -> None:
    session = start(
        write(
            "inputs: {best: {type: text, optional: true}, usual: text}\n"
            "steps: {pick: {node: first, inputs: {a: best, b: usual}}}\noutputs: {picked: pick.value}\n"
        )
    )
    assert session.pids() == {}
    assert [session.run(usual="u")["picked"], session.run(best="b", usual="u")["picked"]] == ["u", "b"]
    assert session.ready


@pytest.mark.slow
def test_inputs_that_are_left_out_have_defaults_or_are_absent(start: Start, write: Write) -> None:
    session = start(write(OPTIONAL))
    assert session.run(text="a")["y"] == "a...!?", "the function's own default stands in for what is absent"
    assert session.run(text="a", ending=".")["y"] == "a.!?"
    assert session.run(text="a", ending=".", more="-")["y"] == "a.-?"
    with pytest.raises(InputError, match="missing: text"):
        session.run(ending="a")


# stand-ins and further attempts


FALLBACK = """
inputs: {text: text}
steps:
  best: {node: fail, equals: bad, inputs: {value: text}, fallback: spare}
  spare: {node: "fire_steps.py:Gated", folder: SPARE, inputs: {value: text}}
  slow: {node: "fire_steps.py:Gated", folder: SLOW, inputs: {value: text}, timeout_ms: 300, fallback: quick}
  quick: {node: echo, inputs: {value: text}}
  said: {node: fail, equals: bad, inputs: {value: text}, fallback: {value: "sorry"}}
outputs: {best: best.value, slow: slow.value, said: said.value}
"""


@pytest.mark.slow
def test_a_stand_in_answers_on_an_error_on_a_time_out_and_with_a_constant(
    start: Start, write: Write, tmp_path: Path
) -> None:
    spare, slow = Gate(tmp_path / "spare"), Gate(tmp_path / "slow")
    session = start(write(FALLBACK, SPARE=spare.folder, SLOW=slow.folder))
    good, bad = session.run(text="good"), session.run(text="bad")
    assert dict(good) == {"best": "good", "slow": "good", "said": "good"}
    assert dict(bad) == {"best": "bad", "slow": "bad", "said": "sorry"}
    assert spare.seen() == ["bad"], "it runs for no other request"
    assert set(steps_of(bad, "failed")) == {"best", "said"} and "quick" not in steps_of(bad)
    slow.close()
    began = time.monotonic()
    late = session.run(text="late")
    took_ms = (time.monotonic() - began) * 1000
    slow.open()
    print(f"the stand-in answered after {took_ms:.0f} ms; timeout_ms is 300")
    assert late["slow"] == "late" and 295 < took_ms < 2000
    assert "quick" in steps_of(late) and "slow" in steps_of(late, "lost")


@pytest.mark.slow
def test_without_a_stand_in_a_time_out_is_the_end_and_names_the_step(start: Start, write: Write, gate: Gate) -> None:
    text = """
inputs: {text: text}
steps:
  s: {node: "fire_steps.py:Gated", folder: GATE, inputs: {value: text}, timeout_ms: 200}
outputs: {y: s.value}
"""
    session = start(write(text, GATE=gate.folder))
    gate.close()
    with pytest.raises(DeadlineExceeded, match="step s: it took longer than its timeout_ms, 200 ms"):
        session.run(text="a")
    gate.open()
    assert session.run(text="b")["y"] == "b"


@pytest.mark.slow
def test_a_failed_item_is_tried_again_as_often_as_the_step_says(start: Start, write: Write) -> None:
    text = """
inputs: {text: text}
steps:
  s: {node: fail, every: 2, inputs: {value: text}, batch: {items_max: 1}, retry: {attempts: 1, wait_ms: 50}}
outputs: {y: s.value}
"""
    session = start(write(text))
    assert session.run(text="a")["y"] == "a"
    began = time.monotonic()
    result = session.run(text="b")
    took_ms = (time.monotonic() - began) * 1000
    assert result["y"] == "b" and 45 < took_ms < 2000
    assert [(timing.outcome, timing.attempts) for timing in result.timings] == [("failed", 1), ("ok", 2)]


# lists


MAPPED = """
inputs: {photo: image}
steps:
  see: {node: function, function: "fire_steps.py:found", inputs: {photo: photo}}
  cut: {node: crop, inputs: {image: photo, detections: see.output}}
  each:
    node: function
    function: "fire_steps.py:brightness"
    inputs: {crop: cut.crops}
    map: crop
    batch: {items_max: 16, wait_max_ms: 300}
outputs: {levels: each.output, boxes: cut.boxes}
"""


def picture(levels: list[int]) -> np.ndarray:
    """A picture of one object for each level of grey, ten pixels high each."""
    return np.repeat(np.array(levels, np.uint8), 10)[:, None, None].repeat(10, 1).repeat(3, 2)


@pytest.mark.slow
def test_crops_of_two_requests_share_batches_and_keep_their_order(start: Start, write: Write) -> None:
    session = start(write(MAPPED))
    wanted = [[10, 20, 30, 40, 50], [60, 70, 80], []]
    pictures = [picture(levels) if levels else np.zeros((5, 10, 3), np.uint8) for levels in wanted]
    answers = together(session, [{"photo": one} for one in pictures])
    assert outputs(answers, "levels") == wanted
    assert [len(boxes) for boxes in outputs(answers, "boxes")] == [5, 3, 0]
    each = [t for answer in answers if isinstance(answer, Result) for t in answer.timings if t.step == "each"]
    assert sorted(timing.element for timing in each) == [0, 0, 1, 1, 2, 2, 3, 4]
    print(f"batches of the step for each crop: {[timing.batch for timing in each]}")
    assert max(timing.batch for timing in each) > 5, "crops of both photos were in one call"


@pytest.mark.slow
def test_one_bad_element_fails_its_request_and_no_other(start: Start, write: Write) -> None:
    text = """
inputs: {texts: "list[text]"}
steps:
  each: {node: function, function: "fire_steps.py:picky", inputs: {text: texts}, map: text, batch: {items_max: 8}}
outputs: {y: each.output}
"""
    session = start(write(text))
    answers = together(session, [{"texts": ["a", "b"]}, {"texts": ["c", "bad", "d"]}, {"texts": ["e"]}])
    assert outputs(answers) == [["A", "B"], "StepError", ["E"]]
    assert "this one is bad" in str(answers[1])


@pytest.mark.slow
def test_the_list_that_a_function_returns_is_mapped(start: Start, write: Write) -> None:
    text = """
inputs: {text: text}
steps:
  cut: {node: function, function: "listed.py:words", inputs: {text: text}}
  each: {node: function, function: "listed.py:size", inputs: {word: cut.words}, map: word}
  twice: {node: function, function: "listed.py:twice", inputs: {size: cut.sizes}, map: size}
outputs: {words: cut.words, sizes: each.output, twice: twice.output}
"""
    code = """
def words(text: str) -> {"words": list[str], "sizes": list[int]}:
    return {"words": text.split(), "sizes": [len(one) for one in text.split()]}
def size(word: str) -> int:
    return len(word)
def twice(size: int) -> int:
    return 2 * size
"""
    path = write(text)
    path.with_name("listed.py").write_text(code)
    found = dict(start(path).run(text="a bc def"))
    assert found == {"words": ["a", "bc", "def"], "sizes": [1, 2, 3], "twice": [2, 4, 6]}


# pipelines in pipelines, unwanted outputs


@pytest.mark.slow
def test_a_pipeline_is_run_as_a_step_of_another(start: Start, write: Write) -> None:
    inner = """
inputs: {text: text, ending: {type: text, default: "!!"}}
steps:
  loud: {node: function, function: "fire_steps.py:shout", inputs: {text: text}}
  end: {node: function, function: "fire_steps.py:joined", inputs: {text: loud.output, ending: ending}}
  unread: {node: fail, every: 1, inputs: {value: text}}
outputs: {said: end.output, never: unread.value}
"""
    outer = """
inputs: {text: text}
steps:
  twice: {pipeline: inner.yaml, inputs: {text: text}}
  again: {pipeline: inner.yaml, inputs: {text: twice.said, ending: {value: "?"}}, when: "text != 'once'"}
outputs: {once: twice.said, y: again.said}
"""
    write(inner, "inner.yaml")
    session = start(write(outer))
    result = session.run(text="hey")
    assert dict(result) == {"once": "HEY!!", "y": "HEY!!?"}
    assert set(steps_of(result)) == {"twice/loud", "twice/end", "again/loud", "again/end"}
    assert dict(session.run(text="once")) == {"once": "ONCE!!", "y": None}


@pytest.mark.slow
def test_steps_that_only_unwanted_outputs_need_are_not_run(start: Start, write: Write, gate: Gate) -> None:
    text = """
inputs: {text: text}
steps:
  cheap: {node: echo, inputs: {value: text}}
  dear: {node: "fire_steps.py:Gated", folder: GATE, inputs: {value: cheap.value}}
outputs: {cheap: cheap.value, dear: dear.value}
"""
    session = start(write(text, GATE=gate.folder))
    assert dict(session.run(RequestOptions(outputs=["cheap"]), text="a")) == {"cheap": "a"}
    assert gate.seen() == []
    assert dict(session.run(text="b")) == {"cheap": "b", "dear": "b"} and gate.seen() == ["b"]


# chains


CHAINED = """
inputs: {x: "float32[N]"}
steps:
  a: {node: function, function: "fire_steps.py:line", inputs: {x: x} WORKER, batch: {items_max: 4}}
  b: {node: function, function: "fire_steps.py:copied", inputs: {x: a.output} WORKER, batch: {items_max: 2}}
  c: {node: function, function: "fire_steps.py:halves", inputs: {x: b.output} WORKER}
outputs: {y: c.output, between: b.output}
"""


@pytest.mark.slow
def test_steps_in_one_worker_answer_as_in_three_and_keep_their_own_batches(start: Start, write: Write) -> None:
    fused = start(write(CHAINED.replace(" WORKER", ", worker: shared"), "fused.yaml"))
    apart = start(write(CHAINED.replace(" WORKER", ""), "apart.yaml"))
    assert len(fused.plan.chains) == 1 and list(fused.pids()) == ["shared"] and len(apart.pids()) == 3
    xs = [np.random.default_rng(size).normal(size=size).astype(np.float32) for size in (3, 100, 20_000, 50_000) * 3]
    one, other = (together(session, [{"x": x} for x in xs]) for session in (fused, apart))
    for left, right in zip(one, other, strict=True):
        assert isinstance(left, Result) and isinstance(right, Result)
        np.testing.assert_array_equal(left["y"], right["y"])
        np.testing.assert_array_equal(left["between"], right["between"])
    assert all(timing.batch <= 2 for answer in one if isinstance(answer, Result) for timing in answer.timings[1:2])
    bad = together(fused, [{"x": np.full(3, np.nan, np.float32)}, {"x": xs[0]}])
    assert isinstance(bad[0], StepError) and bad[0].step == "a" and isinstance(bad[1], Result)


@pytest.mark.slow
def test_a_chain_whose_worker_is_killed_is_tried_again_from_its_start(start: Start, write: Write) -> None:
    text = """
inputs: {text: text}
steps:
  a: {node: echo, inputs: {value: text}, worker: shared, delay_ms: 150}
  b: {node: echo, inputs: {value: a.value}, worker: shared, delay_ms: 150}
outputs: {y: b.value}
"""
    session = start(write(text))
    assert len(session.plan.chains) == 1

    def kill() -> None:
        wait_until(lambda: session.stats()["dispatches"] == 1)
        os.kill(session.pids()["shared"], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    answer = ask(session, text="kept")
    killer.join()
    assert outputs([answer]) == ["kept"] and session.stats()["retried"] == 1
