"""Pipelines that share a node and differ in its request options: each answer is that of the pipeline alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.fire import wait_until
from weftline.engine.repository import Repository
from weftline.engine.session import load
from weftline.pipelines.spec.builder import Builder

ROOT = Path(__file__).parents[2]
NODES = '''
import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from weftline.node import REQUEST, BatchNode, Piece, Ports, StreamNode, port


@dataclass(frozen=True)
class Options:
    mark: Annotated[str, REQUEST] = "a"


class Marks(BatchNode):
    """Answer with the option and with the number of items of the call."""

    Config = Options
    batch_default = (8, 20.0)

    @classmethod
    def ports(cls, config, step):
        return Ports((port("text", "text"),), (port("text", "text"),))

    def run(self, batch):
        if "die" in batch["text"] and self.config.mark == "b":
            import os
            os._exit(1)
        return {"text": [f"{self.config.mark} {text} {len(batch)}" for text in batch["text"]]}


class Mixes(Marks):
    mixed_options = True

    def run(self, batch):
        return {"text": [f"{one.mark} {text}" for one, text in zip(self.configs(batch), batch["text"])]}


class Numbers(BatchNode):
    batch_default = (8, 20.0)

    @classmethod
    def ports(cls, config, step):
        return Ports((port("text", "text"),), (port("number", "json"),))

    def run(self, batch):
        return {"number": [math.inf for _ in batch["text"]]}


class Seeds(BatchNode):
    Config = Options

    @classmethod
    def ports(cls, config, step):
        return Ports((port("text", "text"),), (port("text", "text"),))

    def run(self, batch):
        return {"text": [f"{self.config.mark} {batch.urgency(at).seed}" for at in range(len(batch))]}
'''


@pytest.fixture
def repository() -> Iterator[Repository]:
    with Repository() as found:
        yield found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder / "nodes.py").write_text(NODES)
    shutil.copy(ROOT / "examples/own_nodes/keywords.py", folder)
    return folder


@pytest.fixture(scope="module")
def llm(models: Path) -> Path:
    from tests.engine.llm import tiny

    return tiny.save(models / "llm")


@pytest.fixture(scope="module")
def embedder(models: Path) -> Path:
    import torch
    from transformers import BertConfig, BertModel

    from tests.engine.llm import tiny

    torch.manual_seed(0)
    words = tiny.tokenizer()
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=len(words), max_position_embeddings=64, **sizes)).save_pretrained(models / "near")
    words.save_pretrained(models / "near")
    return models / "near"


@pytest.fixture(scope="module")
def whisper(models: Path) -> Path:
    import torch

    openai_whisper = pytest.importorskip("whisper")
    from tests.nodes.test_whisper import DIMS

    torch.manual_seed(0)
    network = openai_whisper.model.Whisper(multilingual := replace(DIMS, n_vocab=51_865))
    with torch.no_grad():
        network.decoder.positional_embedding.normal_()
    torch.save({"dims": asdict(multilingual), "model_state_dict": network.state_dict()}, models / "whisper.pt")
    return models / "whisper.pt"


def one_step(
    name: str, base: Path, node: str, output: str, input: tuple[str, str], share: bool = True, **options: Any
) -> Builder:
    p = Builder(name, base_dir=base, limits={"arena_bytes": 1 << 20})
    given = {input[0]: p.input("x", input[1])}
    p.output("y", getattr(p.step(f"step_{name}", node, share=share, **given, **options), output))
    return p


def check_alike(
    repository: Repository, steps: Mapping[str, Builder], inputs: Sequence[Any], differ: bool = True
) -> list[list[Any]]:
    """Check that pipelines share all processes, and that each answers as it does alone; return the answers."""
    alone = []
    for one in steps.values():
        with load(one).open() as session:
            alone.append([session.run(x=given)["y"] for given in inputs])
    assert [version for _, version in repository.load_together(steps)] == [1] * len(steps)
    sessions = [repository.get(name) for name in steps]
    assert len({tuple(session.pids().values()) for session in sessions}) == 1
    with ThreadPoolExecutor(16) as callers:
        asked = [[callers.submit(session.run, x=given) for given in inputs] for session in sessions]
        shared = [[one.result(60)["y"] for one in own] for own in asked]
    for mine, others in zip(alone, shared, strict=True):
        for a, b in zip(mine, others, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5) if isinstance(a, np.ndarray) else _same(a, b)
    if differ:
        assert len({str(own) for own in alone}) == len(steps), "the options make a difference"
    return shared


def _same(one: Any, other: Any) -> None:
    assert one == other


def test_templates_render_their_own_text_in_one_call(repository: Repository, tmp_path: Path) -> None:
    def say(name: str, template: str, **more: Any) -> Builder:
        return one_step(name, tmp_path, "template", "text", ("x", "text"), template=template, **more)

    steps = {"a": say("a", "A {{ x }}"), "b": say("b", "B {{ x }}"), "c": say("c", "C {{ x }}")}
    check_alike(repository, steps, [str(at) for at in range(8)])
    assert repository.get("b").reload(say("b", "D {{ x }}")) == 2
    assert repository.get("b").run(x="1")["y"] == "D 1" and repository.get("a").run(x="1")["y"] == "A 1"


def test_stages_of_a_chain_have_the_options_of_their_program(repository: Repository, tmp_path: Path) -> None:
    def two(name: str, first: str, second: str) -> Builder:
        p = Builder(name, base_dir=tmp_path, limits={"arena_bytes": 1 << 20})
        one = p.step(f"{name}1", "template", x=p.input("x", "text"), template=first, worker="w")
        p.output("y", p.step(f"{name}2", "template", x=one.text, template=second, worker="w").text)
        return p

    steps = {"a": two("a", "a {{ x }}", "b {{ x }}"), "c": two("c", "c {{ x }}", "d {{ x }}")}
    check_alike(repository, steps, ["1", "2"])
    assert repository.get("c").run(x="1")["y"] == "d c 1"


def test_a_seed_is_that_of_the_steps_own_name(repository: Repository, models: Path) -> None:
    steps = {
        name: one_step(name, models, "nodes.py:Seeds", "text", ("text", "text"), mark=mark)
        for name, mark in (("a", "same"), ("b", "same"), ("c", "other"))
    }
    assert {version for _, version in repository.load_together(steps)} == {1}
    for name, one in steps.items():
        with load(one).open() as session:
            alone = session.map([{"x": "t"}], seed=5)
            assert [*repository.get(name).map([{"x": "t"}], seed=5)] == [*alone]


def test_two_steps_of_the_guides_node_share_it(models: Path) -> None:
    p = Builder("article", base_dir=models)
    text = p.input("article", "text")
    for name, words in (("title", 1), ("tags", 3)):
        p.output(name, p.step(name, "keywords.py:Keywords", share=True, words_max=words, text=text).words)
    with load(p).open() as session:
        assert len(session.pids()) == 1
        article = "threads meet threads meet threads looms"
        assert session.run(article=article) == {"title": ["threads"], "tags": ["threads", "meet", "looms"]}


def test_calls_have_equal_options_unless_the_node_mixes(repository: Repository, models: Path) -> None:
    for node in ("Marks", "Mixes"):
        steps = {
            f"{node}{at}": one_step(f"{node}{at}", models, f"nodes.py:{node}", "text", ("text", "text"), mark=mark)
            for at, mark in enumerate("abc")
        }
        assert {version for _, version in repository.load_together(steps)} == {1}
        with ThreadPoolExecutor(24) as callers:
            asked = [(name, callers.submit(repository.get(name).run, x="t")) for name in steps for _ in range(8)]
            found = {name: {one.result(20)["y"].split()[0] for n, one in asked if n == name} for name in steps}
        assert list(found.values()) == [{"a"}, {"b"}, {"c"}]


def test_options_are_there_after_a_worker_died(repository: Repository, models: Path) -> None:
    steps = {name: one_step(name, models, "nodes.py:Marks", "text", ("text", "text"), mark=name) for name in ("a", "b")}
    assert {version for _, version in repository.load_together(steps)} == {1}
    a, b = repository.get("a"), repository.get("b")
    with pytest.raises(Exception, match="died"):
        b.run(x="die")
    wait_until(lambda: a.run(x="t")["y"].startswith("a t"), 30)
    assert b.run(x="t")["y"].startswith("b t")
    assert a.run(x="die")["y"].startswith("a die"), "the quarantined item is that of the other options"
    with pytest.raises(Exception, match="killed its worker before"):
        b.run(x="die")


def test_a_step_that_checks_its_outputs_shares_with_one_that_does_not(repository: Repository, models: Path) -> None:
    steps = {
        name: one_step(name, models, "nodes.py:Numbers", "number", ("text", "text"), finite=name == "strict")
        for name in ("loose", "strict")
    }
    assert {version for _, version in repository.load_together(steps)} == {1}
    loose, strict = repository.get("loose"), repository.get("strict")
    assert loose.pids() == strict.pids() and loose.run(x="a")["y"] == float("inf")
    with pytest.raises(Exception, match="finite: true"):
        strict.run(x="a")


@pytest.mark.slow
def test_prompts_and_sampling_of_one_llm_are_those_of_each_pipeline(repository: Repository, llm: Path) -> None:
    def ask(name: str, **options: Any) -> Builder:
        fixed = {"model": llm.name, "round_tokens_max": 32, "kv_bytes": 4 << 20, **options}
        return one_step(name, llm.parent, "llm", "text", ("prompt", "text"), **fixed)

    few = {"tokens_max": 6, "ignore_eos": True}
    steps = {
        "brief": ask("brief", system="be brief", sampling=few),
        "kind": ask("kind", system="be kind and say why", sampling={**few, "tokens_max": 9}),
        "drawn": ask("drawn", sampling={**few, "temperature": 1.0, "seed": 7}),
        "raw": ask("raw", sampling={**few, "stop": ["a"]}, reasoning="none", tool_format="none"),
    }
    check_alike(repository, steps, ["the user asks", "and again", "the assistant answers", "again"])


@pytest.mark.slow
def test_embeddings_have_the_prefix_of_their_own_step(repository: Repository, embedder: Path) -> None:
    steps = {
        name: one_step(name, embedder.parent, "embed", "embedding", ("text", "text"), model="near", **options)
        for name, options in (("query", {"prefix": "query: "}), ("passage", {"prefix": "passage: "}), ("plain", {}))
    }
    check_alike(repository, steps, ["the user asks", "again", "and again"])


@pytest.mark.slow
def test_recordings_have_the_language_and_task_of_their_step(repository: Repository, whisper: Path) -> None:
    rate = 16_000
    times = np.arange(rate // 2) / rate
    recordings = [np.sin(2 * np.pi * hertz * times).astype(np.float32) for hertz in (300, 500)]

    def hear(name: str, output: str = "text", **options: Any) -> Builder:
        return one_step(name, whisper.parent, "whisper", output, ("audio", "audio"), model=whisper.name, **options)

    steps = {
        "de": hear("de", language="de"), "en": hear("en", language="en"),
        "to_en": hear("to_en", language="de", task="translate"),
    }  # fmt: skip
    check_alike(repository, steps, recordings, differ=False)
    assert repository.get("de").reload(hear("de", "language", language="fr")) == 2
    assert repository.get("de").run(x=recordings[0])["y"] == "fr"
