"""Configuration of a server: files, a serve file and flags, merged and checked before it starts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weftline.engine.flags import flag_fields
from weftline.engine.serving import exposed_models
from weftline.engine.serving.config import GrpcConfig, HttpConfig, ServeConfig, ServedPipeline, Tls
from weftline.engine.serving.serve_file import Assembled, assemble, merge
from weftline.errors import InputError, PipelineError
from weftline.pipelines.placement.machine import Device, Machine

PIPELINE = """
weftline: 1
name: {name}
inputs: {{x: text}}
steps:
  a: {{node: echo, inputs: {{value: x}}}}
  b: {{node: echo, inputs: {{value: a.value}}}}
outputs: {{y: b.value}}
"""
Writer = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    def write(name: str, text: str = PIPELINE, **values: str) -> str:
        file = tmp_path / f"{name}.yaml"
        file.write_text(text.format(name=name) if text is PIPELINE else text)
        return str(file)

    return write


def wrong(files: list[str], config: str | None = None, **given: Any) -> str:
    with pytest.raises(PipelineError) as error:
        assemble(files, config, **given)
    return str(error.value)


def programs(served: Assembled) -> list[str]:
    return [name for plan in served.plans for name in plan.programs]


def test_a_pipeline_file_is_served_under_its_own_name(write: Writer) -> None:
    file, other = write("shout"), write("whisper")
    served = assemble([file, other], None)
    assert served.config == ServeConfig({"shout": ServedPipeline(Path(file)), "whisper": ServedPipeline(Path(other))})
    assert programs(served) == ["shout", "whisper"]


def test_a_serve_file_is_known_by_its_pipelines_and_others_join_it(write: Writer) -> None:
    write("shout")
    serve, other = write("serve", "pipelines: {loud: shout.yaml}\ngrace_s: 3\n"), write("whisper")
    for files, named in (([serve, other], None), ([other], serve)):
        served = assemble(files, named)
        assert list(served.config.pipelines) == ["loud", "whisper"] == programs(served)
        assert served.config.grace_s == 3


def test_flags_override_the_file() -> None:
    said = ServeConfig({"p": ServedPipeline(Path("p.yaml"))}, GrpcConfig(port=1), HttpConfig(port=2), grace_s=3)
    keys = {
        "grpc.host": "::1", "http.host": "::1", "grpc.port": 11, "http.port": 12, "grpc.processes": 2, "grace_s": 0.0,
        "logs.format": "json", "logs.requests": True, "logs.level": "debug", "tokens": Path("t"),
        "tls.certificate": Path("c"), "tls.key": Path("k"), "tls.client_ca": Path("a"), "insecure": True,
        "shared_memory": True, "otlp": "http://o:1",
    }  # fmt: skip
    merged = merge(said, keys, ("a", "p.b", "a"))
    assert (merged.grpc, merged.http) == (GrpcConfig("::1", 11, None, 2), HttpConfig("::1", 12))
    assert merged.tls == Tls(Path("c"), Path("k"), Path("a"))
    assert (merged.tokens, merged.grace_s, merged.otlp) == (Path("t"), 0.0, "http://o:1")
    assert (merged.logs.format, merged.logs.requests, merged.logs.level) == ("json", True, "debug")
    assert merged.insecure and merged.shared_memory
    assert merged.pipelines["p"].expose == ("a", "b")
    assert merge(said, {}) == said


def test_http_is_off_until_it_is_asked_for_and_then_on_loopback() -> None:
    said = ServeConfig({"p": ServedPipeline(Path("p.yaml"))}, GrpcConfig("0.0.0.0"))
    assert merge(said, {"http.host": "::1"}).http is None
    assert merge(said, {"http.port": 0}).http == HttpConfig("127.0.0.1", 0)


def test_one_certificate_flag_needs_the_other_in_the_file() -> None:
    said = ServeConfig({"p": ServedPipeline(Path("p.yaml"))})
    with pytest.raises(PipelineError, match="--tls-key: missing"):
        merge(said, {"tls.certificate": Path("c")})
    with pytest.raises(PipelineError, match="--tls-cert: missing"):
        merge(said, {"tls.client_ca": Path("a")})
    has = ServeConfig(said.pipelines, tls=Tls(Path("c"), Path("k")))
    assert merge(has, {"tls.key": Path("k2")}).tls == Tls(Path("c"), Path("k2"))


def test_options_have_the_bounds_and_patterns_of_their_keys(write: Writer) -> None:
    text = wrong([write("shout")], overrides={"grpc.host": "no host", "otlp": "ftp://o", "grpc.port": 70_000})
    assert "the command line  --host: 'no host'\n    expected: an address" in text
    assert "the command line  --otlp: 'ftp://o'\n    expected: http://HOST:PORT" in text
    assert "the command line  --port: 70000\n    expected: " in text


def test_every_option_sets_a_key_of_its_own_or_equal_keys() -> None:
    names: dict[str, list[str]] = {}
    for one in flag_fields(ServeConfig):
        names.setdefault(one.flag.name, []).append(one.key)
    assert {name: keys for name, keys in names.items() if len(keys) > 1} == {"--host": ["grpc.host", "http.host"]}


def test_problems_of_every_file_come_together_each_with_its_own_line(write: Writer) -> None:
    write("shout")
    write("broken", "weftline: 1\nname: broken\nsteps: {a: {node: ecko}}\noutputs: {y: a.value}\n")
    serve = write(
        "serve",
        "pipelines:\n  gone: gone.yaml\n  bad: broken.yaml\n  loud:\n    file: shout.yaml\n    expose: [c]\n"
        "  loud2: {file: shout.yaml, expose: [a]}\n  loud2.a: shout.yaml\n"
        "tokens: none.yaml\ntls: {certificate: c.pem, key: k.pem}\n",
    )
    text = wrong([serve])
    for line, said in (
        (2, "pipelines.gone: there is no file"),
        (6, "pipelines.loud.expose: no step is called c"),
        (7, "a pipeline is called loud2.a already"),
        (9, "tokens: there is no file"),
        (10, "tls.certificate: there is no file"),
        (10, "tls.key: there is no file"),
    ):
        assert f"serve.yaml:{line}  " in text
        assert said in text
    assert "broken.yaml:3" in text
    assert "did you mean echo?" in text
    assert "nothing was started" in text


def test_what_is_only_loaded_later_may_be_missing_or_broken_now(write: Writer) -> None:
    write("broken", "weftline: 1\n")
    text = "pipelines: {a: {file: gone.yaml, load: false}, b: {file: broken.yaml, load: false, expose: [s]}}\n"
    served = assemble([write("serve", text)], None)
    assert list(served.config.pipelines) == ["a", "b"]
    assert not served.plans and not served.failed


def test_problems_of_flags_name_the_flag(write: Writer) -> None:
    file = write("shout")
    assert "--tokens: there is no file" in wrong([file], overrides={"tokens": Path("/none/t.yaml")})
    assert "--expose: c" not in wrong([file], expose=("c",))
    assert "no step is called c" in wrong([file], expose=("c",))
    assert "PIPELINE.STEP of shout, whisper" in wrong([file, write("whisper")], expose=("a",))
    assert "no pipeline" in wrong([])
    both = wrong([file, write("broken", "weftline: 1\n")], expose=("x.y",))
    assert "--expose: x.y" in both
    assert "broken.yaml" in both


def test_a_unix_socket_belongs_to_one_process_and_its_group_wants_a_socket(write: Writer) -> None:
    file = write("shout")
    both = wrong([file], overrides={"grpc.socket": Path("w.sock"), "grpc.processes": 2})
    assert "--processes: a Unix socket belongs to one process, and there are 2" in both
    serve = write("serve", "pipelines: {loud: shout.yaml}\ngrpc: {socket_group: web}\n")
    assert "grpc.socket_group: a group for a Unix socket, and there is none" in wrong([serve])


def test_two_files_of_one_name_and_two_serve_files_are_refused(write: Writer, tmp_path: Path) -> None:
    file = write("shout")
    (tmp_path / "copy.yaml").write_text(PIPELINE.format(name="shout"))
    assert "shout is served already" in wrong([file, str(tmp_path / "copy.yaml")])
    serve = write("serve", "pipelines: {loud: shout.yaml}\n")
    assert "2 serve files" in wrong([serve], serve)


def test_a_missing_file_is_reported_once(tmp_path: Path) -> None:
    assert wrong([str(tmp_path / "none.yaml")]).count("there is no such file") == 1


def test_shared_memory_wants_one_process_since_regions_are_known_to_one(write: Writer) -> None:
    write("shout")
    serve = write("serve", "pipelines: {a: shout.yaml}\nshared_memory: true\ngrpc: {processes: 2}\n")
    assert "serve.yaml:2  shared_memory: regions are known" in wrong([serve])
    assert "--shared-memory: regions are known" in wrong(
        [write("whisper")], overrides={"shared_memory": True, "grpc.processes": 2}
    )
    assert assemble([serve], None, {"grpc.processes": 1}).config.shared_memory


def test_a_step_that_cannot_stand_alone_is_refused_with_the_reason(
    write: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(pipeline: object, step: str) -> None:
        raise InputError("it is the scheduler's")

    monkeypatch.setattr(exposed_models, "exposed", refused)
    assert "step a cannot be a model of its own: it is the scheduler's" in wrong([write("shout")], expose=("a",))


def test_a_step_that_is_a_pipeline_cannot_stand_alone(write: Writer) -> None:
    write("shout")
    outer = PIPELINE.format(name="outer").replace(
        "{node: echo, inputs: {value: x}}", "{pipeline: shout.yaml, inputs: {x: x}}"
    )
    outer = outer.replace("a.value", "a.y")
    file = write("outer", outer)
    assert "step a cannot be a model of its own" in wrong([file], expose=("a",))
    assert programs(assemble([file], None, expose=("b",))) == ["outer", "outer.b"]


def test_pipelines_loaded_at_the_start_share_the_gpus_in_order(write: Writer) -> None:
    on_gpu = """
weftline: 1
name: {}
inputs: {{x: text}}
steps: {{a: {{node: echo, inputs: {{value: x}}, device: "fake:0", device_bytes: {}}}}}
outputs: {{y: a.value}}
"""
    gib, machine = 1 << 30, Machine(2, 8 << 30, (Device("fake:0", 8 << 30),))
    first, second = write("first", on_gpu.format("first", 4 * gib)), write("second", on_gpu.format("second", 3 * gib))
    assert programs(assemble([first], None, machine=machine)) == ["first"]
    served = assemble([first, second], None, machine=machine)
    assert programs(served) == ["first"] and list(served.failed) == ["second"]
    (problem,) = served.failed["second"]
    assert problem.file == second and "fake:0 has 8 GiB" in problem.found
    assert "second.yaml" in wrong([first, second], machine=machine, strict=True)
    assert "second.yaml" in wrong([first, second], machine=machine, overrides={"strict": True})
    serve = write("serve", "pipelines: {one: first.yaml, two: {file: second.yaml, load: false}}\n")
    assert programs(assemble([serve], None, machine=machine)) == ["one"]


def test_a_pipeline_with_problems_is_no_mistake_of_what_it_exposes(write: Writer) -> None:
    write("shout"), write("bad", PIPELINE.format(name="bad").replace("node: ", "node: un"))
    served = assemble([write("serve", "pipelines: {loud: shout.yaml, bad: {file: bad.yaml, expose: [a]}}\n")], None)
    assert programs(served) == ["loud"] and list(served.failed) == ["bad"]


def test_a_pipeline_that_cannot_be_read_leaves_the_others(write: Writer, tmp_path: Path) -> None:
    good, broken = write("shout"), write("broken", "weftline: 1\nsteps: [\n")
    serve = write("serve", "pipelines: {loud: shout.yaml, gone: gone.yaml, broken: {file: broken.yaml, expose: [s]}}\n")
    served = assemble([serve], None)
    assert programs(served) == ["loud"] and list(served.config.pipelines) == ["loud", "gone", "broken"]
    assert [problem.line for problem in served.failed["gone"]] == [1] and served.failed["broken"][0].file == broken
    beside = assemble([good, broken, str(tmp_path / "none.yaml")], None)
    assert programs(beside) == ["shout"] and sorted(beside.failed) == ["broken", "none"]
    assert "nothing was started" in wrong([broken, str(tmp_path / "none.yaml")]), "none is left"


def test_exposed_steps_are_planned_with_their_pipelines_on_shared_gpus(write: Writer) -> None:
    talks = """
weftline: 1
name: {}
inputs: {{x: text}}
steps: {{s: {{node: llm, model: m, inputs: {{prompt: x}}, device: "fake:0", device_bytes: {}}}}}
outputs: {{y: s.text}}
"""
    gib, machine = 1 << 30, Machine(2, 8 << 30, (Device("fake:0", 16 << 30),))
    first, second = write("first", talks.format("first", gib)), write("second", talks.format("second", 3 * gib))
    served = assemble([first, second], None, expose=("first.s",), machine=machine)
    (plan,) = served.plans
    assert list(plan.programs) == ["first", "first.s", "second"] and len(plan.plan.steps) == 2
    assert plan.programs["first"].deployments == plan.programs["first.s"].deployments, "the exposed step shares"
    sizes = {step.options["kv_bytes"] for step in plan.plan.steps}
    assert len(sizes) == 1 and sizes.pop() > gib, "evenly, of all that is left"
    small = Machine(2, 8 << 30, (Device("fake:0", 4 << 30),))
    left = assemble([first, second], None, expose=("first.s", "second.s"), machine=small)
    assert programs(left) == ["first", "first.s"] and list(left.failed) == ["second", "second.s"]
    exposed = wrong([first, second], expose=("first.s", "second.unknown"), machine=small)
    assert "no step is called unknown" in exposed and "second.yaml" in exposed


ASKS = """\
weftline: 1
name: {name}
inputs: {{q: text}}
steps:
  answer: {{node: llm, model: {model}, prompt: "{prompt}: {{{{ q }}}}"}}
  again: {{node: llm, model: {model}, prompt: "once more {{{{ q }}}}"}}
outputs: {{answer: answer.text, again: again.text}}
"""


def test_an_exposed_model_is_loaded_once_with_all_steps_that_name_it(tmp_path: Path) -> None:
    model = Path("examples/models/shapes-chat").absolute()
    for name, prompt in (("one", "say"), ("two", "tell")):
        (tmp_path / f"{name}.yaml").write_text(ASKS.format(name=name, model=model, prompt=prompt))
    files = [str(tmp_path / "one.yaml"), str(tmp_path / "two.yaml")]
    (plan,) = assemble(files, None, expose=["one.answer"]).plans
    assert [step.node for step in plan.plan.steps].count("weftline.engine.llm.node:Llm") == 1
    assert set(plan.programs) == {"one", "one.answer", "two"}
