"""What the examples of deployment say is what the program has: options, keys, routes, and times that fit each other."""

import configparser
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from weftline.cli.command import from_given
from weftline.cli.main import command
from weftline.cli.serve import ServeFlags
from weftline.engine.serving.auth.exposure import check_exposure
from weftline.engine.serving.auth.methods import METHODS, METRICS, OPEN
from weftline.engine.serving.config import ServeConfig, ServedPipeline
from weftline.engine.serving.serve_file import ServeFile, assemble, merge, parse_serve_file
from weftline.pipelines.spec.document import read_document

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples/deploy"
MANIFESTS = sorted(DEPLOY.rglob("*.y*ml"))
SAID = ServeConfig({"p": ServedPipeline(Path("p.yaml"))})


def options(words: list[str]) -> dict[str, Any]:
    """Return what the command line makes of words after `weftline serve`; it fails on one that it does not have."""
    return dict(command("serve").make_context("serve", list(words)).params)


def manifest(name: str) -> dict[str, Any]:
    found = list(yaml.safe_load_all((DEPLOY / name).read_text()))
    assert len(found) == 1
    return dict(found[0])


def served() -> ServeFile:
    return parse_serve_file(
        read_document(manifest("kubernetes/configmap.yaml")["data"]["serve.yaml"], "map"), "map", ROOT
    )


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=True, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((DEPLOY / "weftline.service").read_text())
    return parser


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.name)
def test_every_manifest_is_yaml_and_has_a_kind(file: Path) -> None:
    for one in yaml.safe_load_all(file.read_text()):
        assert one.keys() >= (
            {"scrape_configs"} if file.name == "prometheus.yml" else {"apiVersion", "kind", "metadata"}
        )


def test_the_units_commands_exist_and_it_waits_longer_than_the_drain() -> None:
    service = unit()["Service"]
    assert options(shlex.split(service["ExecStartPre"])[2:])["print_config"]
    parsed = options(shlex.split(service["ExecStart"])[2:])
    assert int(service["TimeoutStopSec"]) > parsed["grace_s"] + 5
    assert service["KillMode"] == "mixed"
    url = re.search(r"http://127\.0\.0\.1:8000(/\w+)", service["ExecStartPost"])
    assert url
    assert METHODS[f"HTTP GET {url[1]}"] == OPEN


def test_the_container_starts_the_server_unprivileged_in_list_form() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    words = [json.loads(one) for one in re.findall(r"^(?:ENTRYPOINT|CMD) (\[.*\])$", text, re.M)]
    assert words[0] == ["weftline", "serve"]
    options(words[1])
    assert re.search(r"^USER [1-9]\d+:[1-9]\d+$", text, re.M)
    extras = re.search(r"^ARG EXTRAS=(.*)$", text, re.M)
    known = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M)
    assert extras
    assert set(extras[1].split(",")) <= set(known)


@pytest.mark.parametrize("name", ["kubernetes/deployment.yaml", "kserve/servingruntime.yaml"])
def test_probes_ask_what_there_is_and_needs_no_token(name: str) -> None:
    spec = manifest(name)["spec"]
    container = (spec.get("template", {}).get("spec") or spec)["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    probes = [container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
    for probe in probes:
        if "grpc" in probe:
            assert METHODS["/grpc.health.v1.Health/Check"] == OPEN
            continue
        assert METHODS[f"HTTP GET {probe['httpGet']['path']}"] == OPEN
        assert probe["httpGet"]["port"] in (*ports, *ports.values(), 8080)
    assert [probe["httpGet"]["path"] for probe in probes[1:]] == ["/readyz", "/livez"]


def test_pods_get_more_time_to_end_than_the_server_takes() -> None:
    pod = manifest("kubernetes/deployment.yaml")["spec"]["template"]["spec"]
    before_s = float(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > before_s + served().config.grace_s + 5
    args = manifest("kserve/servingruntime.yaml")["spec"]["containers"][0]["args"]
    ends_s = manifest("kserve/inferenceservice.yaml")["spec"]["predictor"]["terminationGracePeriodSeconds"]
    assert ends_s > options(args)["grace_s"] + 5


def test_the_clusters_configuration_is_one_and_guarded() -> None:
    config = served().config
    check_exposure(config)
    assert not config.insecure
    assert config.tls is not None
    pod = manifest("kubernetes/deployment.yaml")["spec"]["template"]["spec"]
    container = pod["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert config.http is not None
    assert ports == {"grpc": config.grpc.port, "http": config.http.port}
    mounts = [Path(one["mountPath"]) for one in container["volumeMounts"]]
    assert options(container["args"])["file"] == ["/etc/weftline/serve.yaml"]
    for file in (config.tls.certificate, config.tokens, config.pipelines["classifier"].file):
        assert file is not None
        assert [mount for mount in mounts if mount in file.parents], file
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}


def test_services_and_policies_are_about_the_deployments_pods() -> None:
    pod = manifest("kubernetes/deployment.yaml")["spec"]["template"]
    labels = pod["metadata"]["labels"]
    ports = {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]}
    assert manifest("kubernetes/deployment.yaml")["spec"]["selector"]["matchLabels"] == labels
    assert manifest("kubernetes/service.yaml")["spec"]["selector"] == labels
    assert {one["targetPort"] for one in manifest("kubernetes/service.yaml")["spec"]["ports"]} == set(ports)
    policy = manifest("kubernetes/networkpolicy.yaml")["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == set(ports.values())
    assert manifest("kubernetes/hpa.yaml")["spec"]["scaleTargetRef"]["name"] == "weftline"


def test_the_kserve_runtime_may_listen_and_is_the_one_in_use() -> None:
    runtime = manifest("kserve/servingruntime.yaml")
    parsed = options(runtime["spec"]["containers"][0]["args"])
    config = merge(SAID, from_given(ServeFlags, parsed)[0].keys)
    check_exposure(config)
    assert config.http is not None
    assert (config.grpc.port, config.http.port) == (9000, 8080)
    assert runtime["spec"]["annotations"]["prometheus.kserve.io/port"] == str(config.http.port)
    model = manifest("kserve/inferenceservice.yaml")["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] == runtime["spec"]["supportedModelFormats"][0]["name"]
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]


def test_prometheus_reads_the_figures_with_a_token_for_them() -> None:
    job = manifest("prometheus.yml")["scrape_configs"][0]
    assert METHODS[f"HTTP GET {job['metrics_path']}"] == METRICS
    assert job["authorization"]["credentials_file"]


def test_the_serve_file_among_the_examples_is_sound() -> None:
    pytest.importorskip("onnxruntime")
    served = assemble([str(ROOT / "examples/serve.yaml")], None)
    assert [name for plan in served.plans for name in plan.programs] == ["classifier", "tabular"]
    assert not served.config.pipelines["assistant"].load
