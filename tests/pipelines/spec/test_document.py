"""Environment variables in pipeline files: what is expanded, what is refused, and that secrets stay hidden.

Hostile and surprising YAML: what is refused, how fast, and what plain scalars mean.
"""

import itertools
import json
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from weftline.engine.jobs.output.fingerprint import pipeline_parts
from weftline.engine.serving.serve_file import read_serve_file
from weftline.errors import PipelineError
from weftline.pipelines.placement.place import Machine
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.spec import document
from weftline.pipelines.spec.document import DEPTH_MAX, EVENTS_MAX, TEXT_BYTES_MAX, escaped, read_document
from weftline.pipelines.spec.loader import load_file
from weftline.pipelines.spec.serialisation import to_yaml

MACHINE = Machine(cores=4, memory_bytes=8 << 30)
ENVIRONMENT = {"MODELS": "/srv/models", "PORT": "9001", "EMPTY": "", "API_TOKEN": "hunter22"}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("${MODELS}/yolo.pt", "/srv/models/yolo.pt"),
        ("'${MODELS}'", "/srv/models"),
        ("${PORT}", 9001),  # a plain value has the type of what it stands for
        ("'${PORT}'", "9001"),
        ("${UNSET:-8001}", 8001),
        ("${EMPTY:-here}", "here"),
        ("${EMPTY}", None),
        ("${UNSET:-}", None),
        ("$${MODELS}", "${MODELS}"),
        ("$MODELS ${1} ${", "$MODELS ${1} ${"),
        ("${MODELS}:${PORT}", "/srv/models:9001"),
    ],
)
def test_a_value_with_variables_becomes_what_they_stand_for(written: str, value: object) -> None:
    assert read_document(f"a: {written}\n", "x.yaml", ENVIRONMENT).value == {"a": value}


def test_values_are_not_expanded_twice_or_without_an_environment() -> None:
    assert read_document("a: ${X}\n", "x.yaml", {"X": "${MODELS}"}).value == {"a": "${MODELS}"}
    assert read_document("a: ${MODELS}\n", "x.yaml").value == {"a": "${MODELS}"}


def test_keys_prompts_and_templates_are_left_alone() -> None:
    text = "${PORT}: 1\nprompt: ['${PORT}']\ntemplate: ${PORT}\nabout: ${PORT}\nwhen: a == '${PORT}'\n"
    found = read_document(text, "x.yaml", ENVIRONMENT).value
    assert found == {
        "${PORT}": 1, "prompt": ["${PORT}"], "template": "${PORT}", "about": "${PORT}", "when": "a == '${PORT}'",
    }  # fmt: skip


def test_what_is_written_is_read_back_as_it_was() -> None:
    values = {"a": ["${X}", "$${X}", "${", "$$${X}"], "prompt": "${X}"}
    assert read_document(yaml.safe_dump(escaped(values)), "x.yaml", {}).value == values


def test_every_unset_variable_is_a_problem_with_its_line() -> None:
    document = read_document("a: ${NO}\nb:\n  - x${NOT_EITHER}\n", "x.yaml", ENVIRONMENT)
    assert [(one.path, one.line) for one in document.problems] == [("a", 1), ("b.0", 3)]
    assert "the environment variable NO is not set" in str(document.problems[0])
    assert "${NO:-default}" in str(document.problems[0])


FILE = """
weftline: 1
name: secretive
inputs: {text: text}
steps:
  call: {node: template, inputs: {text: text}, template: "{{ text }}", undefined_option: ${API_TOKEN}}
outputs: {text: call.text}
"""

SOUND = """
weftline: 1
name: sound
inputs: {text: text}
steps:
  call:
    node: guardrail
    inputs: {text: text}
    policy: {block: [secrets], message: "ask ${API_TOKEN} at ${HOST}"}
outputs: {text: call.text}
"""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in {**ENVIRONMENT, "HOST": "north"}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_a_problem_never_shows_a_secret(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("weftline: 1\nname: n\nsteps:\n  a: {node: '${API_TOKEN}', device: '${API_TOKEN}'}\n")
    with pytest.raises(PipelineError) as raised:
        make_plan(load_file(file), MACHINE)
    assert "hunter22" not in str(raised.value)
    assert "${API_TOKEN}" in str(raised.value)


def test_a_secret_is_written_as_its_variable_and_does_not_change_a_job(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(SOUND)
    pipeline = load_file(file)
    first = make_plan(pipeline, MACHINE)
    assert "hunter22" in str(first.steps[0].options)
    assert "ask ${API_TOKEN} at north" in to_yaml(pipeline)
    assert "hunter22" not in to_yaml(pipeline)
    environment.setenv("API_TOKEN", "hunter23")
    assert pipeline_parts(make_plan(load_file(file), MACHINE)) == pipeline_parts(first)
    environment.setenv("HOST", "south")
    assert pipeline_parts(make_plan(load_file(file), MACHINE)) != pipeline_parts(first)


def test_an_inner_pipeline_hides_its_secrets_too(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "inner.yaml").write_text(SOUND)
    outer = tmp_path / "outer.yaml"
    outer.write_text(
        "weftline: 1\nname: outer\ninputs: {text: text}\n"
        "steps:\n  in: {pipeline: inner.yaml, inputs: {text: text}}\noutputs: {text: in.text}\n"
    )
    assert make_plan(load_file(outer), MACHINE).secrets == {"hunter22": "${API_TOKEN}"}


def test_a_serve_file_takes_variables_and_hides_secrets(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("pipelines: {a: '${MODELS}/a.yaml'}\ngrpc:\n  port: ${PORT}\n  host: '${GRPC_HOST:-127.0.0.1}'\n")
    config = read_serve_file(file).config
    assert (config.grpc.port, config.grpc.host, config.pipelines["a"].file) == (
        9001, "127.0.0.1", Path("/srv/models/a.yaml"),
    )  # fmt: skip
    file.write_text("pipelines: {a: a.yaml}\notlp: ${API_TOKEN}\n")
    with pytest.raises(PipelineError) as raised:
        read_serve_file(file)
    assert "hunter22" not in str(raised.value)


REFUSED_WITHIN_S = 0.1
"""Of this process's own time, so that a busy machine does not matter."""


def bomb() -> str:
    """Nine levels of nine aliases each: 300 bytes for 9 ** 9 leaves."""
    names = "abcdefghi"
    lines = ["a: &a [x,x,x,x,x,x,x,x,x]"]
    lines += [f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]" for old, new in itertools.pairwise(names)]
    return "\n".join(lines)


HOSTILE = {
    "100k nested lists": "[" * 100_000,
    "100k nested mappings": "{a: " * 100_000,
    "nested block lists": "- " * 50_000,
    "nested complex keys": "? " * 50_000,
    "nested by indentation": "".join(" " * depth + "a:\n" for depth in range(400)),
    "too many entries": "- a\n" * (TEXT_BYTES_MAX // 5),
    "too many flow entries": "[" + "a," * (TEXT_BYTES_MAX // 3) + "]",
    "too large": "a: " + "x" * TEXT_BYTES_MAX,
    "too large in UTF-8": "a: " + "é" * (TEXT_BYTES_MAX // 2),
    "two documents": "a: 1\n---\nb: 2\n",
    "NUL": "a: 1\nb: \0\n",
    "a control character": "a: \x07\n",
    "a list as a key": "[a, b]: c\n",
    "a mapping as a key": "? {a: b}\n: c\n",
    "unbalanced": "a: [1, 2\nb: 3\n",
    "a tab": "a:\n\tb: 1\n",
    "an alias of nothing": "a: *b\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_documents_are_refused_at_once(name: str) -> None:
    started = time.process_time()
    with pytest.raises(PipelineError):
        found = read_document(HOSTILE[name], "hostile.yaml")
        raise (
            PipelineError(found.problems) if found.problems else AssertionError(f"{name} was read: {found.value!r:.80}")
        )
    assert time.process_time() - started < REFUSED_WITHIN_S, "the guard lets the document cost too much"


def test_an_alias_bomb_is_listed_not_built() -> None:
    found = read_document(bomb(), "bomb.yaml")
    assert len(bomb()) < 340
    assert len(found.problems) == 9 + 8 * 9
    assert found.value["i"] == [None] * 9


def test_the_guard_works_without_libyaml_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "_PARSER", yaml.SafeLoader)
    with pytest.raises(PipelineError, match=f"nested deeper than {DEPTH_MAX}"):
        read_document("[" * 100_000, "deep.yaml")
    assert read_document("a: [1, on]\n", "x.yaml").value == {"a": [1, "on"]}


def test_limits_are_reached_exactly_where_they_say() -> None:
    deep = "[" * DEPTH_MAX + "]" * DEPTH_MAX
    assert read_document(deep, "x.yaml").value is not None
    with pytest.raises(PipelineError):
        read_document(f"[{deep}]", "x.yaml")
    spent = 6  # events around the entries: starts and ends of stream, document and list
    read_document("- a\n" * (EVENTS_MAX - spent), "x.yaml")
    with pytest.raises(PipelineError, match="YAML events"):
        read_document("- a\n" * (EVENTS_MAX + 1), "x.yaml")


@pytest.mark.parametrize(
    ("text", "line", "found"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "written twice, first on line 1"),
        ("a:\n  <<: {b: 1}\n  c: 2\n", 2, "a merge key, <<"),
        ("a: !!python/object/apply:os.system [ls]\n", 1, "a tag"),
        ("a: !custom x\n", 1, "a tag"),
        ("a: &x 1\n", 1, "an anchor, &x"),
        ("a: " + "9" * 5000, 1, "a number of 5000 characters"),
    ],
)
def test_what_a_pipeline_never_needs_is_a_problem_with_its_line(text: str, line: int, found: str) -> None:
    problems = read_document(text, "x.yaml").problems
    assert [(one.line, found in one.found, one.file) for one in problems] == [(line, True, "x.yaml")]
    assert problems[0].fix


def test_a_file_is_read_past_its_mistakes() -> None:
    found = read_document("a: 1\na: {x: [1, 2]}\nb: !t {c: 3}\n<<: {q: 1}\nd: 4\n", "x.yaml")
    assert found.value == {"a": 1, "b": {"c": 3}, "d": 4}
    assert [one.line for one in found.problems] == [2, 3, 4]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("on", "on"), ("yes", "yes"), ("no", "no"), ("off", "off"), ("y", "y"), ("12:30", "12:30"), ("1_000", "1_000"),
        ("012", 12), ("0o17", 15), ("0x1F", 31), ("-3", -3), ("+3", 3), ("1.5", 1.5), ("1e3", 1000.0), (".5", 0.5),
        ("-.inf", float("-inf")), ("true", True), ("False", False), ("tRUE", "tRUE"), ("null", None), ("~", None),
        ("''", ""), ("'12'", "12"), ('"true"', "true"), ("2024-01-01", "2024-01-01"), ("=", "="), ("0b1", "0b1"),
    ],
)  # fmt: skip
def test_plain_scalars_follow_yaml_1_2(written: str, value: object) -> None:
    found = read_document(f"a: {written}\n", "x.yaml").value["a"]
    assert (type(found), found) == (type(value), value)


def test_keys_are_text_whatever_they_look_like() -> None:
    assert list(read_document("on: 1\n1: 2\nnull: 3\ntrue: 4\n", "x.yaml").value) == ["on", "1", "null", "true"]


def test_every_path_has_its_line() -> None:
    lines = read_document("a:\n  b:\n    - 1\n    - c: 2\n  d: {e: 3}\n", "x.yaml").lines
    assert lines == {"a": 1, "a.b": 2, "a.b.0": 3, "a.b.1": 4, "a.b.1.c": 4, "a.d": 5, "a.d.e": 5}


@pytest.mark.parametrize("text", ["a:\n\tb: 1\n", "outputs:\n  b: two.txt\n\tc: d\n"])
def test_a_tab_is_refused_with_the_remedy(text: str) -> None:
    with pytest.raises(PipelineError) as caught:
        read_document(text, "p.yaml")
    assert caught.value.problems[0].fix == "indent with spaces"


def test_a_syntax_error_names_its_line() -> None:
    with pytest.raises(PipelineError) as caught:
        read_document("a: 1\nb: [1, 2\nc: 3\n", "x.yaml")
    assert caught.value.problems[0].line in (2, 3)
    assert caught.value.problems[0].found.startswith("not YAML")


TEXT = st.text(
    st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]), max_size=8
)  # JSON escapes the rest in pairs
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False, width=32)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(PLAIN)
def test_quoted_documents_are_read_as_json_would(value: object) -> None:
    """JSON is YAML 1.2: strings are quoted, so what is read is what was written."""
    assert read_document(json.dumps({"v": value}, ensure_ascii=True), "x.yaml").value == {"v": value}


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="ab:-[]{}&*!|>'\"#?,\n \t%@0.<", max_size=60))
def test_no_text_makes_anything_but_values_or_problems(text: str) -> None:
    try:
        read_document(text, "x.yaml")
    except PipelineError as error:
        assert error.problems


def test_a_parser_error_without_text_is_named_by_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(*args: object, **options: object) -> None:
        raise yaml.YAMLError("\n")

    monkeypatch.setattr(yaml, "parse", parse)
    with pytest.raises(PipelineError) as caught:
        read_document("a: 1", "f.yaml")
    assert caught.value.problems[0].found == "not YAML: YAMLError"
