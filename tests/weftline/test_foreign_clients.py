"""Programs that are not Python: a browser, a Node client, an HTTP/2 load generator (from `make setup-slow`)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.engine.serving.grpc.served import ECHO, served_in_thread
from tests.engine.serving.http.hosted import hosted
from weftline.cli.main import main
from weftline.engine.repository import Repository
from weftline.engine.serving.config import ServedPipeline
from weftline.engine.serving.local import LocalBackend

ROOT = Path(__file__).resolve().parents[2]
NODE_MODULES = ROOT / "build/npm/node_modules"
pytestmark = pytest.mark.slow

SHOUT = """weftline: 1
name: shout
inputs: {text: text}
steps:
  say: {node: echo, inputs: {value: text}}
outputs: {said: say.value}
"""
CHAT = f"""weftline: 1
name: chat
inputs:
  messages: {{type: json, optional: true}}
  sampling: {{type: json, optional: true}}
steps:
  answer:
    node: llm
    model: {ROOT / "examples/models/shapes-chat"}
    kv_bytes: 16777216
    sampling: {{tokens_max: 24, temperature: 0}}
    inputs: {{messages: messages, sampling: sampling}}
outputs: {{text: answer.text, usage: answer.usage, answers: answer.answers}}
"""
ASK = """
import OpenAI from "openai";
const client = new OpenAI({baseURL: process.argv[2], apiKey: "none", maxRetries: 0});
const content = "The photo shows: 2 red circles.\\nQuestion: How many red circles are there?";
const messages = [{role: "user", content}];
const whole = await client.chat.completions.create({model: "chat", messages});
let streamed = "", chunks = 0;
for await (const chunk of await client.chat.completions.create({model: "chat", messages, stream: true})) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  chunks += 1;
}
console.log(JSON.stringify({whole: whole.choices[0].message.content, streamed, chunks}));
"""


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed: make setup-slow")
    return path


def test_a_browser_shows_a_jobs_report(tmp_path: Path) -> None:
    chromium = tool("chromium")
    (tmp_path / "shout.yaml").write_text(SHOUT)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"text": "row <b>{n}</b>"}}\n' for n in range(20)))
    out = tmp_path / "out"
    job = ["batch", str(tmp_path / "shout.yaml"), "--data", str(tmp_path / "rows.jsonl"), "--out", str(out), "-q"]
    assert main(job) == 0
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--enable-logging=stderr", "--v=0", "--dump-dom", f"file://{out / '_report.html'}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "CONSOLE" not in ended.stderr
    text = re.sub(r"<[^>]+>", " ", ended.stdout)
    assert "shout" in text and "20" in text
    assert "row <b>" not in ended.stdout  # texts of rows are shown, not run


def test_the_node_client_chats_whole_and_streamed(tmp_path: Path) -> None:
    node = tool("node")
    if not (NODE_MODULES / "openai").is_dir():
        pytest.skip("the npm package openai is not installed: make setup-slow")
    (tmp_path / "node_modules").symlink_to(NODE_MODULES)
    (tmp_path / "ask.mjs").write_text(ASK)
    (tmp_path / "chat.yaml").write_text(CHAT)
    with Repository() as repository:

        async def open_backend() -> LocalBackend:
            backend = LocalBackend(repository, {"chat": ServedPipeline(tmp_path / "chat.yaml")})
            await backend.open()
            return backend

        with hosted(open_backend) as server:
            command = [node, str(tmp_path / "ask.mjs"), f"{server.url}/v1"]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    answer = json.loads(ended.stdout)
    assert answer["whole"] == answer["streamed"] == "There are 2 red circles."
    assert answer["chunks"] > 2


def test_an_http2_load_generator_gets_an_answer_to_every_call(tmp_path: Path) -> None:
    h2load = tool("h2load")
    (tmp_path / "empty").write_bytes(bytes(5))  # one empty gRPC message
    with served_in_thread({"echo": ECHO}) as server:
        url = f"http://{server.address}/inference.GRPCInferenceService/ServerLive"
        command = [h2load, "-n", "2000", "-c", "8", "-m", "16", "-d", str(tmp_path / "empty")]
        command += ["-H", "content-type: application/grpc", "-H", "te: trailers", url]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "2000 succeeded, 0 failed" in ended.stdout and "2000 2xx" in ended.stdout, ended.stdout
