"""The bundled chat model behind `weftline serve` and `transformers serve`: the answers of the step's own engine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine.fire import ask, together, wait_until
from weftline.engine.session import Session, load
from weftline.errors import InputError
from weftline.pipelines.spec.builder import Builder

pytestmark = pytest.mark.slow

MODEL = Path(__file__).parents[4] / "examples/models/shapes-chat"
SERVED = f"""\
weftline: 1
name: chat
inputs:
  messages: json
  sampling: {{type: json, optional: true}}
steps:
  answer:
    node: llm
    model: {MODEL}
    inputs: {{messages: messages, sampling: sampling}}
outputs: {{text: answer.text, usage: answer.usage, answers: answer.answers}}
"""
PROMPTS = [
    "The photo shows: a red circle and two blue squares. Question: what do you see?",
    "The photo shows: a green triangle. Question: how many triangles are there?",
    "The photo shows: nothing. Question: what color is the circle?",
    "What is a circle?",
]


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Yield the base URL of a server process."""
    file = folder / "chat.yaml"
    file.write_text(SERVED)
    command = [sys.executable, "-m", "weftline", "serve", str(file), "--port", "0", "--http-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            address = ""
            for line in process.stdout:
                address = line.split()[1] if line.startswith("http ") else address
                if "ready, version" in line:
                    break
            yield address
        finally:
            process.terminate()
            process.communicate(timeout=60)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("served")) as address:
        yield address


def answering(folder: Path, **options: Any) -> Session:
    p = Builder("ask", base_dir=folder)
    inputs = {"prompt": p.input("prompt", "text"), "sampling": p.input("sampling", "json", optional=True)}
    step = p.step("answer", "llm", inputs=inputs, **options)
    for name in ("text", "usage", "answers"):
        p.output(name, getattr(step, name))
    return load(p).open()


@pytest.fixture(scope="module")
def both(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Session, Session]]:
    """Yield a session with the step's own engine, and one with the server: options differ by the engine alone."""
    folder = tmp_path_factory.mktemp("both")
    external = {"engine": "openai", "server": "weftline", "url": f"{url}/v1", "probe": True}
    with answering(folder, model=str(MODEL)) as own, answering(folder, model="chat", **external) as other:
        yield own, other


@pytest.mark.parametrize(
    "sampling",
    [
        {"tokens_max": 24},
        {"tokens_max": 24, "temperature": 0.8, "seed": 7},
        {"tokens_max": 24, "temperature": 1.0, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 3},
        {"tokens_max": 24, "stop": ["circle", "square"]},
        {"tokens_max": 12, "n": 2, "temperature": 1.0, "seed": 11},
        {"tokens_max": 40, "json_schema": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"],
                                           "additionalProperties": False}},
    ],
)  # fmt: skip
def test_answers_are_those_of_our_own_engine(both: tuple[Session, Session], sampling: dict[str, Any]) -> None:
    own, other = both
    requests = [{"prompt": prompt, "sampling": sampling} for prompt in PROMPTS]
    wanted, found = together(own, requests), together(other, requests)
    assert [one["answers"] for one in found] == [one["answers"] for one in wanted]
    for one, two in zip(wanted, found, strict=True):
        for key in ("prompt_tokens", "completion_tokens", "finish_reason"):
            assert two["usage"][key] == one["usage"][key], key


def test_log_probabilities_are_those_of_our_own_engine(both: tuple[Session, Session]) -> None:
    own, other = both
    wanted, found = (one.run(prompt=PROMPTS[0], sampling={"tokens_max": 6, "logprobs": 3}) for one in (own, other))
    for one, two in zip(wanted["answers"][0]["logprobs"], found["answers"][0]["logprobs"], strict=True):
        assert two["token"] == one["token"]
        assert two["logprob"] == pytest.approx(one["logprob"], abs=1e-4)
        assert [top["token"] for top in two["top"]] == [top["token"] for top in one["top"]]


def test_an_answer_is_streamed_through_both_servers(both: tuple[Session, Session]) -> None:
    stream = both[1].stream(prompt=PROMPTS[0], sampling={"tokens_max": 24})
    came = [piece for piece in stream if piece.output == "text"]
    *pieces, whole = [piece.value for piece in came]
    assert len(pieces) > 3 and "".join(pieces) == whole and came[-1].last


def test_a_cancelled_request_ends_at_the_server(both: tuple[Session, Session], url: str) -> None:
    before = metric(url, 'finished_reason="abort"')
    stream = both[1].stream(prompt=PROMPTS[0], sampling={"tokens_max": 1000, "ignore_eos": True})
    next(iter(stream))
    assert metric(url, "weftline_requests_in_flight") == 1
    stream.close()
    wait_until(lambda: metric(url, "weftline_requests_in_flight") == 0, 10)
    wait_until(lambda: metric(url, 'finished_reason="abort"') == before + 1, 10)


def test_the_server_refuses_what_it_cannot_do_as_an_input_error(both: tuple[Session, Session]) -> None:
    failed = ask(both[1], prompt="hi " * 30_000)
    assert isinstance(failed, InputError) and "refused the request as invalid" in str(failed)


@contextmanager
def served_by_transformers() -> Iterator[str]:
    """Yield the base URL of transformers' own server, with the same model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["serve", str(MODEL), "--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)]
    command = [sys.executable, "-m", "transformers.cli.transformers", *words]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment) as process:
        try:
            wait_until(lambda: process.poll() is not None or answers(f"http://127.0.0.1:{port}/health"), 100)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def test_answers_of_another_projects_server_are_the_same(both: tuple[Session, Session], tmp_path: Path) -> None:
    requests = [{"prompt": prompt, "sampling": {"tokens_max": most}} for prompt in PROMPTS for most in (5, 24)]
    wanted = together(both[0], requests)
    with served_by_transformers() as url:
        external = {"engine": "openai", "url": f"{url}/v1", "sequences_max": 2}
        with answering(tmp_path, model=str(MODEL), **external) as session:
            found = together(session, requests)
    for one, two in zip(wanted, found, strict=True):
        assert two["text"] == one["text"]
        assert two["usage"] == {**one["usage"], "cached_tokens": None}


def metric(url: str, name: str) -> float:
    """Return the sum of the server's series with this name, or with this label."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answered:
        lines = answered.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if name in line and not line.startswith("#"))
