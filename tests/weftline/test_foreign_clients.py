"""Programs that are not Python: a browser, a Node client, an HTTP/2 load generator (from `make setup-slow`)."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.engine.serving.grpc.requests import METHOD, request
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

CALL = """
import grpc from "@grpc/grpc-js";
const [address, file] = process.argv.slice(2);
const {request, large, path, stream} = JSON.parse((await import("fs")).readFileSync(file));
const bytes = (text) => Buffer.from(text, "base64");
const raw = [(value) => value, (value) => value];
const options = {"grpc.max_receive_message_length": -1};
const client = new grpc.Client(address, grpc.credentials.createInsecure(), options);
const call = (method, data, metadata = new grpc.Metadata(), timeout = 20) => new Promise((done) =>
  client.makeUnaryRequest(method, ...raw, data, metadata, {deadline: Date.now() + timeout * 1000},
    (error, answer) => done(error ? grpc.status[error.code] : answer.length)));
const metadata = new grpc.Metadata();
for (let n = 0; n < 20; n++) metadata.add(`key-${n}`, "v".repeat(20 * n));
const found = {
  many: await Promise.all(Array.from({length: 50}, () => call(path, bytes(request), metadata))),
  large: await call(path, bytes(large)),
  unknown: await call("/nothing/here", bytes(request)),
  broken: await call(path, Buffer.from([255])),
};
const both = client.makeBidiStreamRequest(stream, ...raw, new grpc.Metadata(), {deadline: Date.now() + 20000});
found.streamed = await new Promise((done) => {
  let count = 0;
  both.on("data", () => (count += 1));
  both.on("end", () => done(count));
  both.on("error", (error) => done(error.code));
  for (let n = 0; n < 10; n++) both.write(bytes(request));
  both.end();
});
console.log(JSON.stringify(found));
client.close();
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


def test_the_grpc_client_of_node_calls_and_streams(tmp_path: Path) -> None:
    node = tool("node")
    if not (NODE_MODULES / "@grpc/grpc-js").is_dir():
        pytest.skip("the npm package @grpc/grpc-js is not installed: make setup-slow")
    (tmp_path / "node_modules").symlink_to(NODE_MODULES)
    (tmp_path / "call.mjs").write_text(CALL)
    messages = {"request": request().SerializeToString(), "large": request(values=bytes(3 << 20)).SerializeToString()}
    texts = {name: base64.b64encode(data).decode() for name, data in messages.items()}
    texts |= {"path": METHOD + "ModelInfer", "stream": METHOD + "ModelStreamInfer"}
    (tmp_path / "call.json").write_text(json.dumps(texts))
    with served_in_thread({"echo": ECHO}) as server:
        command = [node, str(tmp_path / "call.mjs"), server.address, str(tmp_path / "call.json")]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert len(found["many"]) == 50 and all(isinstance(size, int) and size > 3 for size in found["many"])
    assert found["large"] > 3 << 20
    assert (found["unknown"], found["broken"], found["streamed"]) == ("UNIMPLEMENTED", "INVALID_ARGUMENT", 10)


@pytest.mark.parametrize("program", ["curl", "nghttp"])
def test_command_line_clients_see_the_answer_and_its_trailers(tmp_path: Path, program: str) -> None:
    message = request().SerializeToString()
    (tmp_path / "body").write_bytes(b"\0" + len(message).to_bytes(4, "big") + message)
    headers = ["-H", "content-type: application/grpc", "-H", "te: trailers"]
    with served_in_thread({"echo": ECHO}) as server:
        url = f"http://{server.address}{METHOD}ModelInfer"
        if program == "curl":
            command = [tool("curl"), "-sv", "--http2-prior-knowledge", "--data-binary", f"@{tmp_path / 'body'}"]
            command += [*headers, "--output", str(tmp_path / "answer"), url]
        else:
            headers = [word.replace(": ", ":", 1) for word in headers]
            command = [tool("nghttp"), "-v", "-d", str(tmp_path / "body"), *headers, url]
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "grpc-status: 0" in ended.stdout + ended.stderr
    if program == "curl":
        answer = (tmp_path / "answer").read_bytes()
        assert answer[0] == 0 and int.from_bytes(answer[1:5], "big") == len(answer) - 5
        assert b"\1\2\3" in answer
