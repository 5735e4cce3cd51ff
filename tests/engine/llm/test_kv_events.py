"""The log of cached pages reproduces the content of the cache."""

from __future__ import annotations

import random

from tests.engine.llm import tiny
from weftline.engine.llm.engine import Engine
from weftline.engine.llm.kv_events import KvLog
from weftline.engine.llm.params import SamplingParams
from weftline.engine.llm.schedule import RoundLimits


def test_a_follower_of_the_events_knows_exactly_the_pages_that_are_cached():
    engine = Engine(tiny.runner("llama", 24), None, RoundLimits(48, 4))
    rng, known, after = random.Random(2), {}, 0
    for at, prompt in enumerate(tiny.prompts(30, seed=8)):
        engine.add(at, prompt, SamplingParams(tokens_max=rng.randint(1, 12), ignore_eos=True))
        while engine.busy:
            engine.step()
        pulled = engine.kv_events(after)
        assert pulled.missed == 0
        for event in pulled.events:
            assert event.number == after + 1
            after = event.number
            if event.type == "BlockStored":
                (key,) = event.fields["block_hashes"]
                parent = event.fields["parent_block_hash"]
                assert parent is None or parent in known
                assert len(event.fields["token_ids"]) == event.fields["block_size"] == 8
                known[key] = event.fields["token_ids"]
            elif event.type == "BlockRemoved":
                for key in event.fields["block_hashes"]:
                    del known[key]
        assert set(known) == set(engine._cache._pages)
    assert any(e.type == "BlockRemoved" for e in engine.kv_events().events)
    engine.clear_prefixes()
    assert engine.kv_events(after).events[-1].type == "AllBlocksCleared"


def test_a_late_reader_gets_the_number_of_missed_events():
    log = KvLog(kept=3)
    for at in range(5):
        log.removed(bytes([at]))
    pulled = log.pull(1)
    assert [event.number for event in pulled.events] == [3, 4, 5]
    assert pulled.missed == 1
    assert log.pull(5).events == ()
    assert [event.number for event in log.pull(2, most=2).events] == [3, 4]
