"""Options of an llm step with an external engine: checked before anything is started or contacted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.engine.serving.auth.certificates import Authority
from weftline.cli.chat_step import chat_step
from weftline.engine.llm.external.node import ExternalLlm
from weftline.engine.llm.external.options import ExternalLlmConfig
from weftline.engine.llm.node import Llm
from weftline.engine.llm.options import LlmConfig
from weftline.node import ConfigError, StepContext
from weftline.pipelines.check.checker import check
from weftline.pipelines.placement.machine import Device, Machine
from weftline.pipelines.placement.planner import make_plan
from weftline.pipelines.spec.graph import Pipeline
from weftline.pipelines.spec.json_schema import json_schema
from weftline.pipelines.spec.loader import load_file

KEY = "sk-1234567890"


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", KEY)
    monkeypatch.setenv("SPACED_KEY", f"{KEY}\n")
    monkeypatch.delenv("NO_KEY", raising=False)


def ports(folder: Path, **options: Any) -> Any:
    return ExternalLlm.ports(
        ExternalLlmConfig(**{"model": "m", "url": "https://host/v1", **options}), StepContext(folder)
    )


@pytest.mark.parametrize(
    "url",
    [
        *("https://host/v1", "https://host:8443", "https://[2001:db8::1]/v1/"),
        *("http://127.0.0.1:8000/v1", "http://localhost:11434/v1", "http://[::1]:8000/v1"),
    ],
)
def test_https_and_http_on_this_machine_are_accepted(url: str, tmp_path: Path) -> None:
    assert ports(tmp_path, url=url)


@pytest.mark.parametrize(
    ("options", "option", "found"),
    [
        ({"url": "http://host/v1"}, "url", "http to 'host', which is not this machine"),
        ({"url": "http://10.0.0.1/v1"}, "url", "not this machine"),
        ({"url": "http://localhost.evil.org/v1"}, "url", "not this machine"),
        ({"url": "host/v1"}, "url", "no scheme"),
        ({"url": "ftp://host/v1"}, "url", "ftp"),
        ({"url": "https:///v1"}, "url", "none"),
        ({"url": "https://host:99999/v1"}, "url", "no valid URL"),
        ({"url": "https://host/ v1"}, "url", "no valid URL"),
        ({"url": "https://host/v1\nx"}, "url", "no valid URL"),
        ({"url": f"https://user:{KEY}@host/v1"}, "url", "a user or password"),
        ({"url": "https://host/v1?api-version=3"}, "url", "a query"),
        ({"key": KEY}, "key", "not the name of a variable"),
        ({"key": "NO_KEY"}, "key", "is not set"),
        ({"key": "SPACED_KEY"}, "key", "spaces around it"),
        ({"ca": "missing.pem"}, "ca", "No such file"),
        ({"ca": "empty.pem"}, "ca", "no certificate"),
        ({"ca": "empty.pem", "url": "http://localhost/v1"}, "ca", "beside a URL with http"),
        ({"model": ""}, "model", "0 characters"),
        ({"server": "triton"}, "server", "'triton'"),
        ({"ca": "~no-such-user/ca.pem"}, "ca", "No such file or directory"),
        ({"sequences_max": 0}, "sequences_max", "0"),
        ({"stall_max_s": 0.0}, "stall_max_s", "0"),
        ({"sampling": {"top_k": 5}}, "sampling.top_k", "not an option of a server of kind openai"),
        ({"sampling": {"grammar": "start: x"}, "server": "vllm"}, "sampling.grammar", "of kind vllm"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], option: str, found: str, tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("nothing\n")
    with pytest.raises(ConfigError) as refused:
        ports(tmp_path, **options)
    assert refused.value.option == option
    assert found in refused.value.found
    assert KEY not in f"{refused.value.found}{refused.value.expected}{refused.value.fix}", "it may be the key"


def test_insecure_allows_http_and_a_private_authority_is_read(tmp_path: Path) -> None:
    assert ports(tmp_path, url="http://host/v1", insecure=True)
    authority = Authority(tmp_path, "private")
    assert ports(tmp_path, ca=str(authority.file), key="A_KEY")


def test_an_unsupported_option_names_the_servers_that_have_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        ports(tmp_path, sampling={"top_k": 5})
    assert refused.value.fix == "remove it, or set `server` if it is one of vllm, sglang, tensorrt-llm, weftline"


def test_the_ports_are_those_of_our_own_engine(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    own = Llm.ports(LlmConfig(model="organisation/model"), StepContext(tmp_path))
    external = ports(tmp_path, server="vllm")
    missing = {one.name for one in own.inputs} - {one.name for one in external.inputs}
    assert {"adapter", "retention"} <= missing <= {"adapter", "retention", "template", "images", "videos", "fps"}
    assert {one.name for one in own.outputs} <= {one.name for one in external.outputs}
    assert "tenant" not in {one.name for one in ports(tmp_path).inputs}, "callers would share cached prompts"


FILE = """\
weftline: 1
name: ask
inputs: {question: text}
steps:
  answer:
    node: llm
    model: m
    prompt: "A fixed beginning of every prompt that is long enough to be kept in whole pages: {{ question }}"
    %s
outputs: {text: answer.text}
"""
OWN = {"kv_bytes": 1, "ranks": 2, "weights": "int8", "prefix": "x", "adapters": "{a: b}", "draft_model": "x"}.items()
EXTERNAL = "engine: openai\n    url: https://host/v1"


def pipeline(folder: Path, options: str) -> Pipeline:
    file = folder / "ask.yaml"
    file.write_text(FILE % options)
    return load_file(file)


@pytest.mark.parametrize(
    ("options", "path", "found"),
    [
        *((f"{EXTERNAL}\n    {name}: {value}", name, "an option of `engine: weftline` only") for name, value in OWN),
        ("url: https://host/v1", "url", "an option of `engine: openai` only"),
        ("engine: weftline\n    key: A_KEY", "key", "an option of `engine: openai` only"),
        ("engine: vllm", "engine", "'vllm'"),
        (f"{EXTERNAL}\n    typo: 1", "typo", "unknown key"),
        (f"{EXTERNAL}\n    inputs: {{adapter: question}}", "inputs.adapter", "adapter"),
    ],
)
def test_options_of_the_other_engine_are_refused_by_name(options: str, path: str, found: str, tmp_path: Path) -> None:
    [problem] = check(pipeline(tmp_path, options))
    assert problem.path == f"steps.answer.{path}"
    assert found in str(problem)


def test_an_external_step_needs_no_gpu_and_no_memory(tmp_path: Path) -> None:
    machine = Machine(8, 64 << 30, (Device("cuda:0", 80 << 30),))
    plan = make_plan(pipeline(tmp_path, f"{EXTERNAL}\n    key: A_KEY"), machine)
    step = plan.step("answer")
    assert (step.devices, step.device_bytes, step.fills_memory, step.heavy) == (("cpu",), 0, False, False)
    assert "prefix" not in step.options
    assert step.variables == ("A_KEY",)
    assert plan.budgets == ()
    assert any("answers come from model m at https://host (server: openai)" in note for note in plan.notes)
    assert any("its process inherits A_KEY" in note for note in plan.notes)
    assert KEY not in repr(plan)


def test_a_gpu_that_was_stated_is_noted_as_unused(tmp_path: Path) -> None:
    machine = Machine(8, 64 << 30, (Device("cuda:0", 80 << 30),))
    plan = make_plan(pipeline(tmp_path, f"{EXTERNAL}\n    device: cuda:0"), machine)
    assert "answer: it uses no GPU; leave `device` out" in plan.notes


def test_editors_accept_the_options_of_both_engines(tmp_path: Path) -> None:
    schema = jsonschema.Draft202012Validator(json_schema())
    for options in (EXTERNAL, "kv_bytes: 100000000"):
        pipeline(tmp_path, options)
        assert list(schema.iter_errors(yaml.safe_load((tmp_path / "ask.yaml").read_text()))) == []
    assert list(schema.iter_errors(yaml.safe_load(FILE % "typo: 1")))


def test_a_chat_can_be_held_with_an_external_engine(tmp_path: Path) -> None:
    step = chat_step(pipeline(tmp_path, f"{EXTERNAL}\n    system: be brief"))
    assert (step.name, step.model, step.system) == ("answer", "m", "be brief")
    assert check(step.pipeline) == []


def test_checking_and_opening_an_external_step_loads_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys\nfor name in ('torch', 'transformers', 'numba', 'llguidance'):\n    sys.modules[name] = None\n"
        "from pathlib import Path\nfrom weftline.engine.llm.external.node import ExternalLlm\n"
        "from weftline.node import OpenContext, StepContext\n"
        "config = ExternalLlm.Config('m', 'http://localhost:1/v1')\n"
        "ExternalLlm.ports(config, StepContext(Path()))\n"
        "print('httpx2' in sys.modules)\n"
        "node = ExternalLlm(config)\nnode.open(OpenContext(Path()))\nnode.close()\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "False\n"), ended.stderr
