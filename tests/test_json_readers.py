"""One strictness for JSON: every reader uses strict_json, and an odd document has the same verdict by every route."""

from __future__ import annotations

import ast
import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weftline.cli.inputs import _parsed as read_argument
from weftline.engine.client.decoder import _json as read_answer
from weftline.engine.jobs.output.json_lines import json_text
from weftline.engine.jobs.sources.cells import Unusable, json_values
from weftline.engine.jobs.sources.jsonl_reader import JsonlReader
from weftline.engine.jobs.sources.reader import UNUSABLE
from weftline.engine.jobs.sources.text_reader import StandardInput
from weftline.engine.serving.v2.elements import value_of
from weftline.errors import PipelineError, WeftlineError
from weftline.nodes.contract import ConfigError
from weftline.nodes.hugging_face import read_json
from weftline.nodes.json_value import NotJson, encode_json
from weftline.nodes.media import MediaLimits, to_value
from weftline.nodes.ports import PortType
from weftline.nodes.strict_json import ANSWERS, FILES, STRICT, VALUES, Rules, loads, parse
from weftline.pipelines.placement.profile_file import read_profile
from weftline.pipelines.spec.document import read_document

ROOT = Path(__file__).parents[1]
OWN = {
    "nodes/strict_json.py": "the module itself",
    "engine/jobs/output/manifest.py": "a job's own record; names of files in it may hold halves of surrogate pairs",
    "engine/jobs/ray/service.py": "a configuration from this program to its replicas",
    "engine/jobs/ray/runner.py": "arguments and plans between tasks of this program",
    "engine/jobs/ray/replica.py": "arguments from this program to its replicas",
    "engine/llm/tokens.py": "the state of a decoder that the tokenizers library made in this process",
    "engine/llm/grammar/sandbox.py": "lines between this program and its own process",
    "engine/llm/parallel/followers.py": "settings from this program to its own processes",
    "engine/llm/answer_parser.py": "whole elements of a list of calls that a model wrote in part",
    "engine/serving/http/plain_inputs.py": "parts a list into elements, each of which strict_json reads as it is used",
    "engine/serving/openai/responses_api/items.py": "a response of this server, which it stores",
    "engine/serving/v2/classification.py": "elements that this server has written",
    "engine/llm/external/answer.py": "typed events of a stream, one for each token; unknown fields are skipped unread",
    "nodes/model_limits.py": "the syntax of large vocabularies, without their values",
    "nodes/tokenizer_trial.py": "parts of a tokenizer from this program to its own process",
    "weftline/gpu_check/llm_parts.py": "lines of its own process",
    "weftline/gpu_check/report.py": "its own report",
    "weftline/gpu_check/llm.py": "lines between this program and its own process",
    "weftline/gpu_check/outcomes.py": "its own report and lines of its own process",
    "weftline/gpu_check/processes.py": "messages between its own processes",
}
"""Files that parse JSON themselves, and why the rules of strict_json do not apply."""

PARSERS = {"loads", "load", "JSONDecoder", "decode", "Decoder", "raw_decode"}


def _parses_json(path: Path) -> bool:
    """Return True if a file refers to a parser of the modules json, msgspec.json or orjson, or imports one."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module in ("json", "msgspec.json", "orjson"):
            return True
        if isinstance(node, ast.Import) and any(one.name == "orjson" for one in node.names):
            return True
        if isinstance(node, ast.Attribute) and node.attr in PARSERS:
            of = ast.unparse(node.value)
            if of == "json" or of == "msgspec.json":
                return True
    return False


def test_no_other_file_parses_json_itself() -> None:
    folders = ("shm", "nodes", "pipelines", "engine", "weftline/cli", "weftline/gpu_check", "weftline/testing")
    files = [path for one in folders for path in (ROOT / one).rglob("*.py")] + list((ROOT / "weftline").glob("*.py"))
    found = {path.relative_to(ROOT).as_posix() for path in files if _parses_json(path)}
    assert sorted(found - set(OWN)) == [], "use weftline.nodes.strict_json"
    assert sorted(set(OWN) - found) == [], "remove the entry"


def _row(text: str) -> None:
    """Read a value of a row of JSONL as a `json` port does."""
    reader = JsonlReader(StandardInput(io.BytesIO(f'{{"v": null}}\n{{"v": {text}}}\n'.encode())))
    (batch,) = reader.read(reader.pieces(False)[0])
    if (reason := batch.table.column(UNUSABLE)[1].as_py()) is not None:
        raise NotJson(reason)
    value = json_values(batch.table.column("v").to_pylist())[1]
    if isinstance(value, Unusable):
        raise NotJson(value.reason)
    encode_json(value)


def _session(text: str) -> None:
    to_value(PortType("json"), text.encode(), MediaLimits())


def _model_file(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(text, "utf-8")
        read_json(Path(folder) / "config.json", "config.json")


def _profile(text: str) -> None:
    """Read a profile; problems of its schema are none of JSON."""
    with tempfile.NamedTemporaryFile("wb", suffix=".json") as file:
        file.write(text.encode())
        file.flush()
        try:
            read_profile(file.name)
        except PipelineError as error:
            if not any(one.expected or one.found == "missing" for one in error.problems):
                raise


ROUTES: dict[str, tuple[Rules, Callable[[str], object]]] = {
    "OpenAI body": (STRICT, lambda text: loads(text.encode(), "the body")),
    "profile": (STRICT, _profile),
    "v2 document": (VALUES, lambda text: value_of("json", text.encode(), "json")),
    "run -i": (VALUES, read_argument),
    "session": (VALUES, _session),
    "answer of a server": (VALUES, lambda text: read_answer(text.encode())),
    "row": (VALUES, _row),
    "model file": (FILES, _model_file),
    "answer of a model": (ANSWERS, lambda text: parse(text, ANSWERS)),
}
"""Routes of a document: its rules, and a function that raises for a document that they refuse."""

ALL = (STRICT, VALUES, FILES, ANSWERS)
ODD: dict[str, tuple[Rules, ...]] = {
    '{"a": 1, "a": 2}': (), '[{"x": {"a": 1, "a": 1}}]': (), '{"a": 1, "\\u0061" : 2}': (), '{"a": NaN, "a": 1}': (),
    "NaN": (VALUES, FILES), "[Infinity, -Infinity]": (VALUES, FILES), '{"a": [NaN]}': (VALUES, FILES), "nan": (),
    "18446744073709551616": (FILES, ANSWERS), "[-9223372036854775809]": (FILES, ANSWERS), "1" * 5000: (),
    "1e400": (), '{"a": -1e999}': (), "1" * 400 + ".0": (),
    '"\\ud800"': (), '{"\\udfff": 1}': (), '["\\ude00\\ud83d"]': (),
    "[" * 65 + "]" * 65: (), '{"a":' * 65 + "1" + "}" * 65: (), "[" * 5000: (),
    "\ufeff1": (), "1 2": (), "[1,]": (), "": (), "{'a': 1}": (), "01": (), "tru": (), "+1": (),
    '"a\tb"': (ANSWERS,),
    "[" * 63 + "]" * 63: ALL, "18446744073709551615": ALL, "-9223372036854775808": ALL, "1e308": ALL,
    '"\\ud83d\\ude00"': ALL, '{"a": {"a": 1}}': ALL, '{"a\\\\" : ":", "b": "\\":", "c:": " :"}': ALL,
}  # fmt: skip
"""Odd documents, and the rules that accept them."""


def accepts(read: Callable[[str], object], text: str) -> bool:
    try:
        read(text)
    except (NotJson, WeftlineError, ConfigError):
        return False
    return True


@pytest.mark.parametrize("text", ODD, ids=lambda text: text[:30])
def test_an_odd_document_has_one_verdict_by_every_route(text: str) -> None:
    verdicts = {route: accepts(read, text) for route, (_, read) in ROUTES.items()}
    assert verdicts == {route: rules in ODD[text] for route, (rules, _) in ROUTES.items()}


KEYS = st.sampled_from(['"a"', '"b"', '"\\u0061"', '"c:"', '"d\\\\"', '"\\ud800"'])
SCALARS = st.sampled_from([
    "null", "1", "-0.5", "true", '"x"', '" :"', '"\\":"', '":"', '"a\\\\"', "NaN", "-Infinity", "1e400",
    "18446744073709551616", '"\\ud800"', '"[{"', "1" * 18 + ".5", '"12345678901234567890"',
])  # fmt: skip
SPACED = st.sampled_from([":", ": ", " :", "\t: "])
DOCUMENTS = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda found: f"[{', '.join(found)}]")
        | st.lists(st.tuples(KEYS, SPACED, inner), max_size=3).map(
            lambda found: "{" + ",".join(map("".join, found)) + "}"
        )
    ),
    max_leaves=6,
)


@settings(max_examples=60)
@given(DOCUMENTS)
def test_every_route_agrees_with_its_rules(text: str) -> None:
    for route, (rules, read) in ROUTES.items():
        assert accepts(read, text) == accepts(lambda one, rules=rules: parse(one, rules), text), route  # type: ignore[misc]


@given(DOCUMENTS)
def test_strict_documents_are_what_the_standard_library_finds(text: str) -> None:
    try:
        value = parse(text, FILES)
    except NotJson:
        return
    assert repr(value) == repr(json.loads(text))
    assert repr(parse(json_text(value), FILES)) == repr(value), "batch outputs are read by the same rules"


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"a": "\\ud800"}', '{"a": 1} 2', "[" * 65 + "]" * 65])
def test_json_in_yaml_files_is_as_strict_where_yaml_can_be(text: str) -> None:
    try:
        assert read_document(text, "serve.yaml").problems
    except PipelineError:
        pass
