"""The typed description of /run, a client generated from it, and the page at /docs."""

from __future__ import annotations

import base64
import hashlib
import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.engine.serving.http.backends import Functions, info
from tests.engine.serving.http.hosted import Hosted, hosted
from tests.engine.serving.http.test_run import ASKED, MORE, OUTPUTS, TOKEN, backend, png
from weftline.engine.serving.auth.gate import Gate
from weftline.engine.serving.auth.tokens import TokenFile, digest
from weftline.engine.serving.http.openapi import document

GENERATOR = Path(__file__).parents[4] / "build/generator"


@pytest.fixture(scope="module")
def server() -> Iterator[Hosted]:
    with hosted(backend()) as endpoint:
        yield endpoint


def schema(found: dict[str, Any], model: str, kind: str = "application/json") -> dict[str, Any]:
    operation = found["paths"][f"/run/{model}"]["post"]
    return {**operation["requestBody"]["content"][kind]["schema"], "components": found["components"]}


def answer_schema(found: dict[str, Any], model: str) -> dict[str, Any]:
    operation = found["paths"][f"/run/{model}"]["post"]
    return {**operation["responses"]["200"]["content"]["application/json"]["schema"], "components": found["components"]}


def test_bodies_and_answers_of_a_model_are_typed(server: Hosted) -> None:
    found = httpx.get(f"{server.url}/openapi.json").json()
    body = schema(found, "ask")
    assert body["properties"].keys() == ASKED.keys() | MORE.keys() and body["required"] == ["question"]
    photo = {"b64": base64.b64encode(png()).decode()}
    given = {
        "question": "q",
        "photo": photo,
        "x": [1, 2],
        "passages": ["a"],
        "photos": [photo, "data:image/png;base64,"],
    }
    jsonschema.validate(given, body)
    for wrong in ({"question": 1}, {"x": [1]}, {"question": "q", "photo": "x.png"}, {"question": "q", "other": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, body)
    answer = httpx.post(f"{server.url}/run/every", json={}).json()
    jsonschema.validate(answer, answer_schema(found, "every"))
    types = found["paths"]["/run/every"]["post"]["responses"]["200"]["content"]
    assert {"image/png", "audio/wav", "text/event-stream", "application/x-npy"} <= types.keys()
    assert "image/*" in found["paths"]["/run/look"]["post"]["requestBody"]["content"]
    assert schema(found, "look", "multipart/form-data")["properties"]["photo"]["format"] == "binary"


def test_only_models_of_the_caller_are_described(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    path.touch(mode=0o600)
    path.write_text(f"tokens:\n  - {{name: one, sha256: {digest(TOKEN)!r}, models: [ask]}}\n")
    with hosted(backend(), Gate(TokenFile(path))) as server:
        right = {"authorization": f"Bearer {TOKEN}"}
        found = httpx.get(f"{server.url}/openapi.json", headers=right).json()["paths"]
        assert [one for one in found if one.startswith("/run/")] == ["/run/{model}", "/run/ask"]
        assert "every" not in httpx.get(f"{server.url}/docs", headers=right).text
        assert httpx.get(f"{server.url}/docs").status_code == 401


@pytest.mark.slow
def test_a_generated_client_runs_a_model(server: Hosted, tmp_path: Path) -> None:
    if not (GENERATOR / "openapi_python_client").is_dir():
        pytest.skip("openapi-python-client is not installed: make setup-slow")
    (tmp_path / "openapi.json").write_text(httpx.get(f"{server.url}/openapi.json").text)
    command = "-m openapi_python_client generate --path openapi.json --meta none --output-path made_client"
    paths = os.environ | {"PYTHONPATH": str(GENERATOR)}
    made = subprocess.run(
        [sys.executable, *shlex.split(command)], cwd=tmp_path, env=paths, capture_output=True, text=True, timeout=240
    )
    assert made.returncode == 0, made.stdout + made.stderr
    sys.path.insert(0, str(tmp_path))
    try:
        package = importlib.import_module("made_client")
        models, types = importlib.import_module("made_client.models"), importlib.import_module("made_client.types")
        every = importlib.import_module("made_client.api.run.run_every")
        ask = importlib.import_module("made_client.api.run.run_ask")
        look = importlib.import_module("made_client.api.run.run_look")
    finally:
        sys.path.remove(str(tmp_path))
    client = package.Client(base_url=server.url)
    found = every.sync(client=client, body=models.RunEveryJsonBody())
    assert found.said == "hello" and found.labels == ["a", "b"] and found.scores == [[1.5, 2.5]]
    assert found.found[0].name == "cat" and found.photo.content_type == "image/png" and found.left is None
    body = models.RunAskJsonBody(question="q", x=[1.0, 2.0], passages=["a"])
    assert ask.sync(client=client, body=body).received["passages"] == ["a"]
    form = models.RunLookFilesBody(photo=types.File(io.BytesIO(png()), "x.png", "image/png"))
    assert look.sync(client=client, body=form).received == {"photo": f"{len(png())} bytes"}


class Page(HTMLParser):
    """Collects elements with their attributes, and the style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.style = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] == "style":
            self.style += data


def test_the_page_needs_no_other_host_and_no_script(server: Hosted) -> None:
    answer = httpx.get(f"{server.url}/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy, page = answer.headers["content-security-policy"], Page(answer.text)
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy and "http" not in policy
    assert f"'sha256-{base64.b64encode(hashlib.sha256(page.style.encode()).digest()).decode()}'" in policy
    for tag, attributes in page.elements:
        assert tag not in ("script", "link", "img", "iframe", "object", "form")
        assert not {name for name in attributes if name.startswith("on") or name in ("style", "src")}
        assert attributes.get("href") in (None, "openapi.json")
    for name in (*ASKED, *OUTPUTS, "/v2/health/live", "/run/{model}"):
        assert f"<code>{name}</code>" in answer.text


def test_the_page_escapes_what_pipelines_say() -> None:
    model = info("x", {"q": "text"}, {"a": "text"})
    model = type(model)(
        **{**{f: getattr(model, f) for f in model.__struct_fields__}, "about": "<script>alert(1)</script>"}
    )
    with hosted(Functions({"x": (model, lambda ask: {"a": "b"})})) as server:
        text = httpx.get(f"{server.url}/docs").text
        assert "<script>" not in text and "&lt;script&gt;" in text


def test_commands_of_the_page_get_an_answer(server: Hosted) -> None:
    text = httpx.get(f"{server.url}/docs").text.replace("&#39;", "'").replace("&#34;", '"')
    found = dict(re.findall(r"<pre>curl \S+/run/(\w+) -d '(.*?)'</pre>", text))
    assert found.keys() == {"ask", "every", "say", "flat", "broken"}
    for name in ("ask", "every", "say", "flat"):
        assert httpx.post(f"{server.url}/run/{name}", json=json.loads(found[name])).status_code == 200, name
    assert "curl " + server.url + "/run/look -F photo=@picture.png" in text


def test_the_document_without_models_has_no_typed_operations() -> None:
    assert [path for path in document()["paths"] if path.startswith("/run/")] == ["/run/{model}"]
