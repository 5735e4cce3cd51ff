"""Frameworks as they come from their registries, each a script in `frameworks/`, against real pipelines.

`make setup-slow` installs them into an environment of their own, in the versions of frameworks/requirements.txt, and
into build/npm. The models are the bundled one and a random one, whose calls and objects are forced by grammars.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AddedToken

from tests.engine.llm import tiny
from tests.engine.serving.http.hosted import Hosted, hosted
from tests.engine.serving.openai.test_tool_calls import CHAT, TEMPLATE
from weftline.engine.repository import Repository
from weftline.engine.serving.auth.gate import Gate
from weftline.engine.serving.auth.tokens import TokenFile, digest
from weftline.engine.serving.config import ServedPipeline, ServeLimits
from weftline.engine.serving.local import LocalBackend

ROOT = Path(__file__).resolve().parents[4]
SCRIPTS = Path(__file__).parent / "frameworks"
PYTHON = ROOT / "build/frameworks/bin/python"
NODE_MODULES = ROOT / "build/npm/node_modules"
EMBED = f"""
weftline: 1
name: embed
inputs: {{text: text, tokens: {{type: json, optional: true}}}}
steps:
  embed:
    node: embed
    model: {ROOT / "examples/models/shapes-chat"}
    pooling: mean
    inputs: {{text: text, tokens: tokens}}
outputs: {{embedding: embed.embedding, usage: embed.usage}}
"""
PYTHON_SCRIPTS = ("litellm", "langchain", "instructor", "pydantic_ai")
COMPLETE = """
weftline: 1
name: complete
inputs: {prompt: text, template: {type: json, optional: true}, sampling: {type: json, optional: true}}
steps:
  answer: {node: llm, model: chat, kv_bytes: 16777216, inputs: {prompt: prompt, template: template, sampling: sampling}}
outputs: {text: answer.text, usage: answer.usage, answers: answer.answers}
"""
TOKENS = {"any": ""} | {f"limited-{name}": ", requests_per_s: 0.001, burst: 1" for name in PYTHON_SCRIPTS}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosted]:
    folder = tmp_path_factory.mktemp("pipelines")
    words = tiny.tokenizer(added=())
    words.add_tokens([AddedToken(name) for name in ("<tool_call>", "</tool_call>", "<think>", "</think>")])
    words.chat_template = TEMPLATE
    tiny.save(folder / "calls", words, tokens_max=8192)
    (folder / "calls.yaml").write_text(CHAT.format(name="calls"))
    (folder / "chat").symlink_to(ROOT / "examples/models/shapes-chat")
    (folder / "chat.yaml").write_text(CHAT.format(name="chat"))
    (folder / "complete.yaml").write_text(COMPLETE)
    (folder / "embed.yaml").write_text(EMBED)
    with Repository() as repository:

        async def open_backend() -> LocalBackend:
            served = {name: ServedPipeline(folder / f"{name}.yaml") for name in ("calls", "chat", "complete", "embed")}
            backend = LocalBackend(repository, served)
            await backend.open()
            return backend

        with hosted(open_backend, gate(folder)) as endpoint:
            yield endpoint


def gate(folder: Path) -> Gate:
    """Return a gate with the token `any` and one for each script that admits one request."""
    file = folder / "tokens.yaml"
    file.touch(mode=0o600)
    lines = [f"  - {{name: {name}, sha256: '{digest(name)}'{more}}}\n" for name, more in TOKENS.items()]
    file.write_text("tokens:\n" + "".join(lines))
    return Gate(TokenFile(file), ServeLimits())


@pytest.mark.parametrize("name", PYTHON_SCRIPTS)
def test_a_framework_of_python_works(endpoint: Hosted, name: str) -> None:
    if not PYTHON.exists():
        pytest.skip("build/frameworks is not installed: make setup-slow")
    run(str(PYTHON), str(SCRIPTS / f"with_{name}.py"), endpoint.url, "any", f"limited-{name}")


def test_the_ai_sdk_works(endpoint: Hosted, tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None or not (NODE_MODULES / "ai").is_dir():
        pytest.skip("node or its package ai is not installed: make setup-slow")
    (tmp_path / "node_modules").symlink_to(NODE_MODULES)
    script = shutil.copy(SCRIPTS / "with_ai_sdk.mjs", tmp_path)
    run(node, script, endpoint.url, "any")


def run(*command: str) -> None:
    """Run a script with the address and tokens; it fails at the first check that does not hold."""
    [packages] = [*(ROOT / "build/frameworks/lib").glob("python*/site-packages"), Path()][:1]
    settings = {
        "TIKTOKEN_CACHE_DIR": str(packages / "litellm/litellm_core_utils/tokenizers"),  # else tiktoken downloads them
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LANGSMITH_TRACING": "false",
    }
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110, env=os.environ | settings)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-6000:]
