"""Plain requests: JSON objects, forms and single values in, JSON, single outputs and events out."""

from __future__ import annotations

import base64
import io
import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.engine.serving.http.backends import Functions, info
from tests.engine.serving.http.hosted import Hosted, hosted
from weftline.engine.protocol.packed import Packed
from weftline.engine.serving.auth.gate import Gate
from weftline.engine.serving.auth.tokens import TokenFile, digest
from weftline.engine.serving.backend import Ask
from weftline.engine.serving.config import ServeLimits
from weftline.engine.serving.http.run import FORM
from weftline.errors import StepError
from weftline.nodes.detections import Detections
from weftline.nodes.json_value import encode_json

TOKEN = "wl-a-token-of-some-length"
FOUND = Detections(np.array([[1, 2, 3, 4]], np.float32), np.array([0.5], np.float32), np.array([0], np.int32), ("cat",))


def png(width: int = 3, height: int = 2) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (255, 0, 0)).save(file, "PNG")
    return file.getvalue()


def received(ask: Ask) -> dict[str, Any]:
    """Return what arrived, as JSON."""
    return {"received": {name: shown(value) for name, value in ask.inputs.items()}}


def shown(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{len(value)} bytes"
    if isinstance(value, list | tuple):
        return [shown(one) for one in value]
    if isinstance(value, Packed):
        return f"{value.size_bytes} bytes"
    return value.to_json() if isinstance(value, Detections) else value


def failing(ask: Ask) -> dict[str, Any]:
    return {"said": "h", "more": StepError("it broke")}


EVERY = {
    "said": "hello",
    "labels": ["a", "b"],
    "figures": {"n": 1},
    "found": FOUND,
    "scores": np.array([[1.5, 2.5]], np.float32),
    "photo": np.zeros((2, 3, 3), np.uint8),
    "sound": np.zeros(160, np.float32),
    "blob": b"\x00\x01",
    "left": None,
}
OUTPUTS = {
    "said": "text", "labels": "list[text]", "figures": "json", "found": "detections", "scores": "float32[N, 2]",
    "photo": "image", "sound": "audio", "blob": "bytes", "left": "bytes?",
}  # fmt: skip
ASKED = {"question": "text", "settings": "json?", "photo": "image?", "clip": "audio?", "blob": "bytes?"}
MORE = {
    "x": "float32[2]?",
    "boxes": "detections?",
    "passages": "list[text]?",
    "photos": "list[image]?",
    "extra": "any?",
}


def backend() -> Functions:
    return Functions(
        {
            "ask": (info("ask", ASKED | MORE, {"received": "json"}), received),
            "every": (info("every", {"q": "text?"}, OUTPUTS, "said"), lambda ask: dict(EVERY)),
            "look": (info("look", {"photo": "image", "hint": "text?"}, {"received": "json"}), received),
            "say": (info("say", {"words": "text"}, {"received": "json"}), received),
            "flat": (info("flat", {"x": "float32[6]"}, {"y": "float32[N]"}), lambda ask: {"y": ask.inputs["x"] * 2}),
            "broken": (info("broken", {"q": "text?"}, {"said": "text", "more": "text"}, "said"), failing),
        }
    )


@pytest.fixture(scope="module")
def server() -> Iterator[Hosted]:
    with hosted(backend(), limits=ServeLimits(message_bytes_max=1 << 20)) as endpoint:
        yield endpoint


def run(server: Hosted, model: str, **request: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/run/{model}", timeout=20, **request)


def curl(server: Hosted, path: str, *arguments: str) -> str:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    done = subprocess.run(["curl", "-sS", server.url + path, *arguments], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    return done.stdout


# JSON objects


def test_a_json_object_has_a_member_for_each_input(server: Hosted) -> None:
    body = {
        "question": "why?",
        "settings": {"top_k": 3, "deep": [1, {"a": None}]},
        "x": [1, 2.5],
        "boxes": FOUND.to_json(),
        "passages": ["a", "b"],
        "extra": {"z": 1},
    }
    found = run(server, "ask", json=body).json()["received"]
    assert found == body | {"x": ["float32", [1.0, 2.5]]}


def test_pictures_come_as_data_urls_and_as_base64_objects(server: Hosted) -> None:
    text = base64.b64encode(png()).decode()
    for photo in (f"data:image/png;base64,{text}", {"b64": text}, {"b64": text, "content_type": "image/png"}):
        body = {"question": "?", "photo": photo, "blob": photo, "photos": [photo, photo]}
        found = run(server, "ask", json=body).json()["received"]
        size = f"{len(png())} bytes"
        assert found == {"question": "?", "photo": size, "blob": size, "photos": [size, size]}


@pytest.mark.parametrize("value", ["/etc/passwd", "file:///etc/passwd", "http://127.0.0.1/x.png", "", "data:,x"])
def test_a_text_is_never_a_path_or_a_fetched_url(server: Hosted, value: str) -> None:
    answer = run(server, "look", json={"photo": value})
    assert answer.status_code == 400
    assert "input photo: found" in answer.json()["error"] and "data URL" in answer.json()["error"]


def test_all_wrong_members_are_listed_at_once(server: Hosted) -> None:
    answer = run(server, "ask", json={"x": [1, 2, 3], "photo": 7, "passages": "a", "unknown": 1})
    assert answer.status_code == 400
    error = answer.json()["error"]
    for part in ("unknown inputs: 'unknown'", "input x: wants float32[2]", "input photo: found a whole number",
                 "input passages: found text, expected a list", "missing inputs: question"):  # fmt: skip
        assert part in error


def test_null_leaves_an_input_out(server: Hosted) -> None:
    assert run(server, "ask", json={"question": "q", "photo": None}).json() == {"received": {"question": "q"}}
    assert "missing inputs: question" in run(server, "ask", json={"question": None}).json()["error"]


def test_a_plain_request_is_one_item(server: Hosted) -> None:
    assert run(server, "flat", json={"x": [1, 2, 3, 4, 5, 6]}).json() == {"y": [2, 4, 6, 8, 10, 12]}
    assert run(server, "flat", json={"x": [[1, 2, 3, 4, 5, 6]] * 2}).status_code == 400


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"7", b"{", b'{"question": "a", "question": "b"}', b'{"question": "\xff"}', b'{"question": 1e999}',
        b'{"question": "\\ud800"}', b'{"question": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"settings": ' + b'{"a":' * 90 + b"1" + b"}" * 90 + b', "question": "q"}', b'\xef\xbb\xbf{"question": "q"}',
        b'{"question": "q", "photo": {"b64": "!!"}}', b'{"question": "q", "photo": {"b64": "aGk=", "path": "/etc"}}',
    ],
    ids=range(13),
)  # fmt: skip
def test_wrong_json_is_refused(server: Hosted, body: bytes) -> None:
    answer = run(server, "ask", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]


def test_large_objects_are_read_in_a_json_process(server: Hosted) -> None:
    text = "x" * 200_000
    found = run(server, "ask", json={"question": text, "settings": [text], "x": [1, 2]}).json()["received"]
    assert found["question"] == text and found["settings"] == f"{len(encode_json([text]))} bytes"
    assert found["x"] == ["float32", [1.0, 2.0]]


def test_v2_infer_takes_and_answers_plain_objects(server: Hosted) -> None:
    url = f"{server.url}/v2/models/ask/infer"
    assert httpx.post(url, json={"question": "q"}).json() == {"received": {"question": "q"}}
    files = {"photo": ("x.png", png(), "image/png")}
    assert "bytes" in httpx.post(url, data={"question": "q"}, files=files).json()["received"]["photo"]
    tensor = {"name": "question", "datatype": "BYTES", "shape": [1], "data": ["q"]}
    assert httpx.post(url, json={"inputs": [tensor]}).json()["outputs"][0]["name"] == "received"
    assert httpx.post(f"{server.url}/v2/models/ask/versions/7/infer", json={"question": "q"}).status_code == 404


# forms


def test_curl_sends_files_and_texts_in_a_form(server: Hosted, tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(png())
    form = ["-F", f"photo=@{tmp_path}/x.png", "-F", "question=why?", "-F", 'settings={"k": 1}', "-F", "x=[1, 2]"]
    found = json.loads(curl(server, "/run/ask", *form))["received"]
    size = f"{len(png())} bytes"
    assert found == {"photo": size, "question": "why?", "settings": {"k": 1}, "x": ["float32", [1.0, 2.0]]}


def test_curl_sends_json_and_fields_without_headers(server: Hosted) -> None:
    assert json.loads(curl(server, "/run/ask", "-d", '{"question": "q"}')) == {"received": {"question": "q"}}
    fields = ["-d", "question=a+b%20c", "-d", "passages=1", "-d", "passages=2"]
    found = {"question": "a b c", "passages": ["1", "2"]}
    assert json.loads(curl(server, "/run/ask", *fields)) == {"received": found}
    assert json.loads(curl(server, "/run/say", "-d", "hello there")) == {"received": {"words": "hello there"}}


def test_repeated_parts_and_json_parts_make_lists(server: Hosted) -> None:
    found = run(
        server, "ask", files=[("question", (None, b"q")), ("passages", (None, b"a")), ("passages", (None, b"b"))]
    )
    assert found.json()["received"]["passages"] == ["a", "b"]
    found = run(server, "ask", files=[("question", (None, b"q")), ("passages", (None, b"a"))])
    assert found.json()["received"]["passages"] == ["a"]
    files = [("question", (None, b"q")), ("passages", (None, b'["a","b"]', "application/json"))]
    assert run(server, "ask", files=files).json()["received"]["passages"] == ["a", "b"]


def test_a_tensor_comes_as_an_npy_file(server: Hosted) -> None:
    file = io.BytesIO()
    np.save(file, np.arange(6, dtype=np.float32))
    assert run(server, "flat", files={"x": ("x.npy", file.getvalue())}).json()["y"][5] == 10
    assert (
        run(server, "flat", content=file.getvalue(), headers={"content-type": "application/x-npy"}).json()["y"][1] == 2
    )


def test_file_names_are_ignored(server: Hosted) -> None:
    for name in ("../../etc/passwd", "/etc/passwd", "x" * 3000, "\u2603.png", 'a"b;c.png'):
        found = run(server, "look", files={"photo": (name, png())})
        assert found.json() == {"received": {"photo": f"{len(png())} bytes"}}, name


def multipart(*parts: bytes, boundary: bytes = b"XX", end: bytes = b"--XX--\r\n") -> bytes:
    return b"".join(b"--" + boundary + b"\r\n" + one + b"\r\n" for one in parts) + end


def part(name: str, data: bytes, more: bytes = b"") -> bytes:
    return b'content-disposition: form-data; name="' + name.encode() + b'"\r\n' + more + b"\r\n" + data


WRONG_FORMS = {
    "no boundary": (b"multipart/form-data", multipart(part("question", b"q"))),
    "another boundary": (b"multipart/form-data; boundary=YY", multipart(part("question", b"q"))),
    "a long boundary": (b"multipart/form-data; boundary=" + b"Y" * 500, multipart(part("question", b"q"))),
    "cut off": (b"multipart/form-data; boundary=XX", multipart(part("question", b"q"), end=b"")),
    "cut off in a header": (b"multipart/form-data; boundary=XX", b"--XX\r\ncontent-dispo"),
    "empty": (b"multipart/form-data; boundary=XX", b""),
    "not a form": (b"multipart/form-data; boundary=XX", b'{"question": "q"}'),
    "no name": (b"multipart/form-data; boundary=XX", multipart(b"content-type: text/plain\r\n\r\nq")),
    "no headers": (b"multipart/form-data; boundary=XX", multipart(b"\r\nq")),
    "unknown name": (b"multipart/form-data; boundary=XX", multipart(part("other", b"q"))),
    "a long name": (b"multipart/form-data; boundary=XX", multipart(part("n" * 5000, b"q"))),
    "a huge header": (
        b"multipart/form-data; boundary=XX", multipart(part("question", b"q", b"x: " + b"y" * 100_000 + b"\r\n"))
    ),
    "thousands of headers": (
        b"multipart/form-data; boundary=XX", multipart(part("question", b"q", b"a: b\r\n" * 20_000))
    ),
    "thousands of parts": (b"multipart/form-data; boundary=XX", multipart(*[part("passages", b"q")] * 5000)),
    "one input twice": (b"multipart/form-data; boundary=XX", multipart(part("question", b"q"), part("question", b"r"))),
    "base64": (
        b"multipart/form-data; boundary=XX",
        multipart(part("question", b"cQ==", b"content-transfer-encoding: base64\r\n")),
    ),
    "not UTF-8": (b"multipart/form-data; boundary=XX", multipart(part("question", b"\xff\xfe"))),
    "much JSON": (
        b"multipart/form-data; boundary=XX",
        multipart(part("question", b"q"), part("x", b"[" + b"1," * 50_000 + b"1]")),
    ),
    "carriage returns": (b"multipart/form-data; boundary=XX", b"\r\n" * 200_000),
    "almost boundaries": (
        b"multipart/form-data; boundary=XX", multipart(part("question", b"\r\n--X" * 100_000), end=b"")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_FORMS)
def test_wrong_forms_are_refused(server: Hosted, name: str) -> None:
    type, body = WRONG_FORMS[name]
    answer = run(server, "ask", content=body, headers={"content-type": type.decode()})
    assert answer.status_code == 400, answer.text
    assert 0 < len(answer.json()["error"]) < 600
    assert run(server, "say", content=b"next", headers={"content-type": "text/plain"}).status_code == 200


def test_what_is_decoded_in_the_event_loop_is_small(server: Hosted) -> None:
    answer = run(server, "ask", content=b"question=" + b"%41" * 50_000, headers={"content-type": FORM})
    assert answer.status_code == 400 and "at most 65536 bytes" in answer.json()["error"]
    files = {"question": (None, b"q"), "photo": (None, b"data:image/png;base64," + b"AAAA" * 50_000)}
    answer = run(server, "ask", files=files)
    assert answer.status_code == 400 and "send it as a file" in answer.json()["error"]
    small = {"question": (None, b"q"), "photo": (None, b"data:image/png;base64," + base64.b64encode(png()))}
    assert run(server, "ask", files=small).json()["received"]["photo"] == f"{len(png())} bytes"
    document = b"[" + b"1," * 50_000 + b"1]"
    answer = run(server, "ask", files={"question": (None, document, "application/json")})
    assert answer.status_code == 400 and "at most 65536 bytes" in answer.json()["error"]


def test_a_part_with_an_unknown_name_is_refused_unread(server: Hosted) -> None:
    head = multipart(part("other", b""), end=b"")
    with socket.create_connection(("127.0.0.1", server.port), 10) as sock:
        sock.sendall(
            b"POST /run/ask HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=XX\r\n"
            b"content-length: 900000\r\n\r\n" + head
        )
        assert sock.recv(4096).startswith(b"HTTP/1.1 400")


def test_a_body_over_the_limit_is_refused_by_its_length(server: Hosted) -> None:
    answer = run(server, "look", files={"photo": ("x.png", b"x" * (1 << 20))})
    assert answer.status_code == 413 and "limits.message_bytes_max" in answer.json()["error"]


# one value


def test_the_body_is_the_value_of_the_only_input(server: Hosted, tmp_path: Path) -> None:
    size = {"received": {"photo": f"{len(png())} bytes"}}
    for type in ("image/png", "application/octet-stream"):
        assert run(server, "look", content=png(), headers={"content-type": type}).json() == size
    (tmp_path / "x.png").write_bytes(png())
    assert json.loads(curl(server, "/run/look", "--data-binary", f"@{tmp_path}/x.png")) == size
    assert run(server, "say", content="\u00e4", headers={"content-type": "text/plain"}).json() == {
        "received": {"words": "\u00e4"}
    }


def test_one_value_for_several_inputs_is_refused_with_their_names() -> None:
    two = info("two", {"a": "text", "b": "image"}, {"received": "json"})
    with hosted(Functions({"two": (two, received)})) as server:
        answer = run(server, "two", content=png(), headers={"content-type": "image/png"})
        assert answer.status_code == 400 and "a (text), b (image)" in answer.json()["error"]


# answers


def test_a_json_answer_has_every_output(server: Hosted) -> None:
    answer = run(server, "every", json={})
    assert answer.headers["content-type"] == "application/json"
    found = answer.json()
    assert {name: found[name] for name in ("said", "labels", "figures", "left", "scores")} == {
        "said": "hello", "labels": ["a", "b"], "figures": {"n": 1}, "left": None, "scores": [[1.5, 2.5]],
    }  # fmt: skip
    assert found["found"] == FOUND.to_json()
    assert found["photo"]["content_type"] == "image/png" and found["sound"]["content_type"] == "audio/wav"
    assert Image.open(io.BytesIO(base64.b64decode(found["photo"]["b64"]))).size == (3, 2)
    assert base64.b64decode(found["blob"]["b64"]) == EVERY["blob"]


@pytest.mark.parametrize(
    ("accept", "type", "start"),
    [
        ("image/png", "image/png", b"\x89PNG"), ("image/*", "image/png", b"\x89PNG"),
        ("image/jpeg", "image/jpeg", b"\xff\xd8"),
        ("text/plain", "text/plain; charset=utf-8", b"hello"), ("audio/wav", "audio/wav", b"RIFF"),
        ("audio/flac;q=0.5, text/html", "audio/flac", b"fLaC"),
        ("application/x-npy", "application/x-npy", b"\x93NUMPY"),
        ("text/html, application/json", "application/json", b"{"),
        ("*/*", "application/json", b"{"), ("image/png;q=0.1, application/json", "application/json", b"{"),
    ],
)  # fmt: skip
def test_accept_selects_the_form_of_the_answer(server: Hosted, accept: str, type: str, start: bytes) -> None:
    answer = run(server, "every", json={}, headers={"accept": accept})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == type and answer.content.startswith(start)


def test_what_cannot_be_answered_is_406_with_what_can(server: Hosted) -> None:
    answer = run(server, "every", json={}, headers={"accept": "video/mp4"})
    assert answer.status_code == 406 and "image/png" in answer.json()["error"]
    answer = run(server, "every?output=said", json={}, headers={"accept": "image/png"})
    assert answer.status_code == 406 and "text/plain" in answer.json()["error"]
    assert run(server, "every?output=left", json={}, headers={"accept": "application/*"}).json() == {"left": None}
    octets = {"accept": "application/octet-stream"}
    assert run(server, "every?output=left", json={}, headers=octets).status_code == 204
    assert "output=NAME" in run(server, "every", json={}, headers=octets).json()["error"]


def test_the_query_selects_outputs_and_parameters(server: Hosted) -> None:
    assert run(server, "every?output=said&output=figures", json={}).json() == {"said": "hello", "figures": {"n": 1}}
    for query in ("output=none", "seed=-1", "seed=x", "color=red", "sequence_start=1", "priority=" + "9" * 30):
        assert run(server, f"every?{query}", json={}).status_code == 400, query
    assert run(server, "every?seed=7&priority=1&sequence_id=a&sequence_start=true", json={}).status_code == 200


def events(text: str) -> list[tuple[str, Any]]:
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_events_bring_pieces_and_then_the_whole(server: Hosted) -> None:
    answer = run(server, "every", json={}, headers={"accept": "text/event-stream"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *pieces, (last, whole) = events(answer.text)
    assert pieces == [("piece", {"output": "said", "piece": letter}) for letter in "hello"]
    assert last == "done" and whole == run(server, "every", json={}).json()


def test_an_error_ends_the_events(server: Hosted) -> None:
    answer = run(server, "broken", json={}, headers={"accept": "text/event-stream"})
    pieces = [("piece", {"output": "said", "piece": "h"}), ("error", {"error": "it broke"})]
    assert answer.status_code == 200 and events(answer.text) == pieces


def test_large_outputs_are_nested_lists() -> None:
    big = np.arange(60_000, dtype=np.float32).reshape(2, 3, 10_000)
    model = info("big", {}, {"y": "float32[A, B, C]", "b": "bfloat16[N]", "c": "complex64[N]"})
    outputs = {"y": big, "b": np.array([0x3FC0] * 40_000, np.uint16), "c": np.array([1 + 2j], np.complex64)}
    with hosted(Functions({"big": (model, lambda ask: outputs)})) as server:
        found = run(server, "big", json={}).json()
        assert found["y"] == big.tolist() and found["b"][:2] == [1.5, 1.5] and found["c"] == [[1.0, 2.0]]


# generate

GENERATE = "/v2/models/every/generate"


def test_generate_answers_with_the_model_beside_its_outputs(server: Hosted) -> None:
    body = {"q": "hi", "id": "r1", "parameters": {"seed": 3}, "temperature": 0.5}
    found = httpx.post(server.url + GENERATE, json=body).json()
    assert (found["model_name"], found["model_version"], found["id"]) == ("every", "1", "r1")
    assert found["said"] == "hello" and found["figures"] == {"n": 1}
    assert httpx.post(f"{server.url}/v2/models/every/versions/1/generate", json={}).status_code == 200
    assert httpx.post(f"{server.url}/v2/models/every/versions/9/generate", json={}).status_code == 404


@pytest.mark.parametrize(
    "body", [{"q": 1}, {"other": [1]}, {"parameters": 3}, {"id": 3}, {"parameters": {"triton_x": 1}}, {"seed": "x"}, []]
)
def test_wrong_bodies_of_generate_are_refused(server: Hosted, body: Any) -> None:
    answer = httpx.post(server.url + GENERATE, json=body)
    assert answer.status_code == 400 and answer.json()["error"]


def test_generate_stream_sends_an_event_for_each_piece(server: Hosted) -> None:
    text = httpx.post(f"{server.url}{GENERATE}_stream", json={"q": "hi"}).text
    *pieces, rest = [json.loads(block.removeprefix("data: ")) for block in text.strip().split("\n\n")]
    assert [one["said"] for one in pieces] == list("hello")
    assert all(one["model_name"] == "every" for one in pieces)
    assert "said" not in rest and rest["labels"] == ["a", "b"]


def test_an_error_ends_generate_stream(server: Hosted) -> None:
    text = httpx.post(f"{server.url}/v2/models/broken/generate_stream", json={}).text
    assert text.endswith('data: {"error":"it broke"}\n\n')


# rights


def test_run_needs_a_right_for_the_model_and_counts_in_a_rate(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    path.touch(mode=0o600)
    entry = f"{{name: one, sha256: {digest(TOKEN)!r}, models: [ask], requests_per_s: 0.01, burst: 4}}"
    path.write_text(f"tokens:\n  - {entry}\n")
    with hosted(backend(), Gate(TokenFile(path))) as server:
        assert run(server, "ask", json={"question": "q"}).status_code == 401
        right = {"authorization": f"Bearer {TOKEN}"}
        assert run(server, "say", json={"words": "q"}, headers=right).status_code == 403
        assert run(server, "nothing", json={"words": "q"}, headers=right).status_code == 403
        assert run(server, "ask", json={"question": "q", "passages": ["a", "b"]}, headers=right).status_code == 200
        assert run(server, "ask", json={"question": "q"}, headers=right).status_code == 429


# random bodies


@settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(
    type=st.sampled_from(["application/json", "multipart/form-data; boundary=XX", FORM, "", "text/plain", "image/png"]),
    pieces=st.lists(
        st.sampled_from(
            [b"--XX", b"--", b"\r\n", b'content-disposition: form-data; name="question"', b"; filename=x", b"=", b"&",
             b"{", b"}", b'"question"', b":", b'"x"', b"[1,2]", b"null", b",", b"data:", b"\x00", b"\xff",
             b"question=a"]
        ),
        max_size=14,
    ),
)  # fmt: skip
def test_random_bodies_get_an_answer(server: Hosted, type: str, pieces: list[bytes]) -> None:
    for path in ("/run/ask", "/run/say", "/v2/models/ask/infer"):
        answer = httpx.post(server.url + path, content=b"".join(pieces), headers={"content-type": type}, timeout=20)
        assert answer.status_code in (200, 400), answer.text
