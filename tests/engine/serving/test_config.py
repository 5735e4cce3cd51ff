"""A serve file: what it says, what is wrong with it, and that what is printed can be read again."""

from collections.abc import Callable
from pathlib import Path

import pytest

from weftline.engine.serving.config import GrpcConfig, HttpConfig, Logs, ServeConfig, ServedPipeline, ServeLimits, Tls
from weftline.engine.serving.serve_file import read_serve_file, to_text
from weftline.errors import PipelineError
from weftline.pipelines.check.validation import json_schema_of

Writer = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    def write(text: str) -> Path:
        file = tmp_path / "serve.yaml"
        file.write_text(text)
        return file

    return write


def problems(file: Path) -> list[str]:
    with pytest.raises(PipelineError) as error:
        read_serve_file(file)
    return [f"{one.line} {one.path}: {one.found} | {one.expected} | {one.fix}" for one in error.value.problems]


def test_everything_can_be_said(write: Writer, tmp_path: Path) -> None:
    file = write("""
pipelines:
  assistant: {file: assistant.yaml, expose: [answer], load: false}
  ocr: sub/ocr.yaml
grpc: {host: "::1", port: 9001, processes: 2, reflection: false}
http: {port: 0}
tls: {certificate: cert.pem, key: key.pem, client_ca: /ca.pem}
tokens: tokens.yaml
insecure: true
shared_memory: true
grace_s: 5
limits: {calls_max: 8, header_s: 1.5}
logs: {format: json, level: warning, requests: true}
otlp: http://collector:4317
""")
    assert read_serve_file(file).config == ServeConfig(
        pipelines={
            "assistant": ServedPipeline(tmp_path / "assistant.yaml", ("answer",), load=False),
            "ocr": ServedPipeline(tmp_path / "sub/ocr.yaml"),
        },
        grpc=GrpcConfig("::1", 9001, None, 2, reflection=False),
        http=HttpConfig(port=0),
        tls=Tls(tmp_path / "cert.pem", tmp_path / "key.pem", Path("/ca.pem")),
        tokens=tmp_path / "tokens.yaml",
        insecure=True,
        shared_memory=True,
        grace_s=5,
        limits=ServeLimits(calls_max=8, header_s=1.5),
        logs=Logs("json", "warning", requests=True),
        otlp="http://collector:4317",
    )


def test_what_is_not_said_is_the_default_and_http_is_off(write: Writer, tmp_path: Path) -> None:
    config = read_serve_file(write("pipelines: {ocr: ocr.yaml}\n")).config
    assert config == ServeConfig({"ocr": ServedPipeline(tmp_path / "ocr.yaml")})
    assert config.http is None


def test_all_problems_come_at_once_each_with_line_and_remedy(write: Writer) -> None:
    file = write("""
pipelines:
  ocr: {file: ocr.yaml, exposed: [a]}
  ../up: up.yaml
  empty: {}
grcp: {port: 1}
grpc: {port: 70000, host: "a b", proceses: 1}
http: {prot: 8}
tls: {certificate: c.pem}
grace_s: 30s
limits: {message_bytes_max: 64MB, calls_max: 0}
logs: {format: xml}
otlp: collector:4317
""")
    found = problems(file)
    for line, path, said in (
        (3, "pipelines.ocr.exposed", "did you mean expose?"),
        (4, "pipelines.../up", "letters, digits, '.', '_' and '-'"),
        (5, "pipelines.empty.file", "missing"),
        (6, "grcp", "did you mean grpc?"),
        (7, "grpc.port", "at most 65535"),
        (7, "grpc.host", "such as 127.0.0.1"),
        (7, "grpc.proceses", "did you mean processes?"),
        (8, "http.prot", "did you mean port?"),
        (9, "tls.key", "missing"),
        (10, "grace_s", "a number"),
        (11, "limits.message_bytes_max", "a whole number"),
        (11, "limits.calls_max", "at least 1"),
        (12, "logs.format", "'text' or 'json'"),
        (13, "otlp", "http://HOST:PORT"),
    ):
        assert [one for one in found if one.startswith(f"{line} {path}: ") and said in one], (path, said, found)
    assert len(found) == 14


@pytest.mark.parametrize("text", ["", "- a\n", "ocr.yaml\n"])
def test_what_is_no_mapping_is_refused(write: Writer, text: str) -> None:
    assert "a mapping with `pipelines:`" in problems(write(text))[0]


def test_a_file_that_cannot_be_read_has_its_own_error(tmp_path: Path) -> None:
    assert "there is no such file" in problems(tmp_path / "none.yaml")[0]
    assert "cannot be read" in problems(tmp_path)[0]
    (tmp_path / "latin.yaml").write_bytes(b"pipelines:\n  caf\xe9: a.yaml\n")
    assert problems(tmp_path / "latin.yaml")[0].startswith("2 : byte 0xe9 is not UTF-8")


def test_aliases_and_duplicates_are_refused_with_their_lines(write: Writer) -> None:
    found = problems(write("pipelines: &all {ocr: ocr.yaml}\ngrace_s: 1\ngrace_s: 2\n"))
    assert "an anchor" in found[0]
    assert found[1].startswith("3 grace_s: written twice")


def test_no_problem_shows_a_regular_expression(write: Writer) -> None:
    file = write('pipelines: {"a/b": a.yaml, c: {file: c.yaml, expose: ["x.y"]}}\ngrpc: {host: "/"}\notlp: "ftp://a"\n')
    assert not [one for one in problems(file) if "[A-Za-z" in one]


@pytest.mark.parametrize("text", [
    "pipelines: {a: a.yaml}\n",
    "pipelines: {a: {file: a.yaml, expose: [s, t], load: false}}\nhttp: {}\ntokens: t\ngrpc: {socket: w.sock}\n"
    "tls: {certificate: c, key: k}\nlimits: {regions_max: 3}\nlogs: {format: json}\n",
])  # fmt: skip
def test_what_is_printed_says_the_same(write: Writer, text: str) -> None:
    config = read_serve_file(write(text)).config
    assert read_serve_file(write(to_text(config))).config == config


def test_every_number_has_bounds_and_every_key_its_documentation() -> None:
    schema = json_schema_of(ServeConfig)
    bare, unexplained = [], []
    for kind in (schema, *schema["$defs"].values()):
        for name, one in kind["properties"].items():
            if one.get("type") in ("integer", "number") and not {"minimum", "maximum"} <= one.keys():
                bare.append(f"{kind['title']}.{name}")
            if not one.get("description") and "$ref" not in one:
                unexplained.append(f"{kind['title']}.{name}")
        assert kind["description"], kind["title"]
    assert (bare, unexplained) == ([], [])


def test_code_may_construct_values_that_a_file_may_not() -> None:
    assert ServeLimits(calls_max=0, message_bytes_max=1).budget_bytes == 256 << 20
