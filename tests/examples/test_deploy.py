"""What the examples of deployment say is what the program has: options, keys, routes, and times that fit each other."""

import configparser
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from weftline.cli.command import from_given
from weftline.cli.main import command
from weftline.cli.serve import ServeFlags
from weftline.engine.machine import this_machine
from weftline.engine.serving.auth.exposure import check_exposure
from weftline.engine.serving.auth.methods import METHODS, METRICS, OPEN
from weftline.engine.serving.config import ServeConfig, ServedPipeline
from weftline.engine.serving.serve_file import ServeFile, assemble, merge, parse_serve_file
from weftline.pipelines.placement.sharing import plan_shared
from weftline.pipelines.spec.document import read_document
from weftline.pipelines.spec.loader import load_file

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples/deploy"
COMPOSE = ("compose.yaml", "compose.gpu.yaml")
CLUSTER = sorted([*(DEPLOY / "kubernetes").glob("*.yaml"), *(DEPLOY / "kserve").glob("*.yaml")])
VALIDATORS = ROOT / "build/validators"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
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


def shared_bytes(pipeline: str) -> int:
    """Return the shared memory that a pipeline of the examples plans, and that of decoding its inputs."""
    loaded = load_file(ROOT / "examples" / pipeline)
    plan = plan_shared({loaded.name: loaded}, this_machine()).programs[loaded.name].plan
    return sum(worker.arena_bytes for worker in plan.workers) + plan.ingress_arena_bytes + plan.decode_bytes_max


def size_bytes(text: str) -> int:
    """Return the bytes of a size as Kubernetes (`4Gi`) and Compose (`4g`) write it."""
    number, unit = re.fullmatch(r"(\d+)(?:([MG])i|([mg]))", text).group(1, 0)  # type: ignore[union-attr]
    return int(number) << {"m": 20, "g": 30}[unit.rstrip("i")[-1].lower()]


@pytest.mark.parametrize("file", CLUSTER, ids=lambda file: file.name)
def test_every_manifest_is_yaml_and_has_a_kind(file: Path) -> None:
    for one in yaml.safe_load_all(file.read_text()):
        assert one.keys() >= {"apiVersion", "kind", "metadata"}


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
    assert extras
    assert set(extras[1].split(",")) <= set(PROJECT["project"]["optional-dependencies"])


def test_the_container_copies_what_the_package_is_built_from() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    copied = {
        word.rstrip("/") for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M) for word in line.split()
    }
    folders = {folder.partition("/")[0] for folder in PROJECT["tool"]["setuptools"]["package-dir"].values()}
    project = PROJECT["project"]
    assert copied == {"pyproject.toml", "constraints.txt", project["readme"], *project["license-files"], *folders}


def test_the_final_image_has_libnghttp2_and_no_build_tools_by_default() -> None:
    final = (DEPLOY / "Containerfile").read_text().rpartition("\nFROM ")[2]
    installed = re.search(r"apt-get install --yes --no-install-recommends (.*?) \\\n", final)
    assert installed
    assert installed[1].split() == ["python3", "libnghttp2-14", "$PACKAGES"]
    assert re.search(r'^ARG PACKAGES=""$', final, re.M)


def test_the_health_check_asks_readiness_at_the_http_port() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    url = re.search(r"READY_URL=https://127\.0\.0\.1:(\d+)(/\w+)$", text, re.M)
    http = composed_serve_file().config.http
    assert url and http
    assert METHODS[f"HTTP GET {url[2]}"] == OPEN
    assert int(url[1]) == http.port
    script = json.loads(re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", text, re.M)[0])
    assert script[:2] == ["python", "-c"]
    assert "os.environ['READY_URL']" in script[2]


def composed() -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "compose.yaml").read_text()))


def composed_serve_file() -> ServeFile:
    file = DEPLOY / "serve.yaml"
    return parse_serve_file(read_document(file.read_text(), str(file)), str(file), ROOT)


def test_compose_and_the_cluster_serve_the_same_file() -> None:
    inline = yaml.safe_load(manifest("kubernetes/configmap.yaml")["data"]["serve.yaml"])
    assert yaml.safe_load((DEPLOY / "serve.yaml").read_text()) == inline


def test_compose_has_the_ports_and_files_of_its_serve_file() -> None:
    service, config = composed()["services"]["weftline"], composed_serve_file().config
    check_exposure(config)
    assert config.http is not None and config.tls is not None
    ports = [config.grpc.port, config.http.port]
    assert service["ports"] == [f"{port}:{port}" for port in ports]
    exposed = re.search(r"^EXPOSE (.*)$", (DEPLOY / "Containerfile").read_text(), re.M)
    assert exposed and [int(port) for port in exposed[1].split()] == ports
    targets = {Path(secret["target"]) for secret in service["secrets"]}
    assert targets == {config.tls.certificate, config.tls.key, config.tokens}
    assert {secret["source"] for secret in service["secrets"]} == set(composed()["secrets"])
    assert [Path(one.rpartition(":")[0].rpartition(":")[2]) for one in service["volumes"]] == [
        Path("/etc/weftline/serve.yaml"),
        config.pipelines["classifier"].file.parent,
    ]


def test_compose_gives_the_drain_and_the_plan_what_they_need() -> None:
    service = composed()["services"]["weftline"]
    assert float(service["stop_grace_period"].removesuffix("s")) > composed_serve_file().config.grace_s + 5
    temporary = re.search(r"size=(\w+)", service["tmpfs"][0])
    assert temporary and "exec" in service["tmpfs"][0].split(":")[1].split(",")
    beside = size_bytes(service["shm_size"]) + shared_bytes("classifier.yaml")
    assert size_bytes(service["mem_limit"]) > beside + size_bytes("512m")
    assert composed()["services"].keys() == yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())["services"].keys()


def test_the_arguments_of_the_gpu_image_are_those_of_the_containerfile() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    arguments = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())["services"]["weftline"]["build"]["args"]
    assert set(arguments) < set(re.findall(r"^ARG (\w+)=", text, re.M))
    assert set(arguments["EXTRAS"].split(",")) <= set(PROJECT["project"]["optional-dependencies"])
    for name, value in arguments.items():
        assert f"--build-arg {name}={value}" in text or f'--build-arg {name}="{value}"' in text


def test_pods_have_the_memory_that_the_plan_and_their_volumes_take() -> None:
    pod = manifest("kubernetes/deployment.yaml")["spec"]["template"]["spec"]
    container = pod["containers"][0]
    volumes = {one["name"]: one for one in pod["volumes"]}
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    shared = volumes[mounts["/dev/shm"]]["emptyDir"]
    assert shared["medium"] == "Memory"
    beside = size_bytes(shared["sizeLimit"]) + shared_bytes("classifier.yaml")
    assert size_bytes(container["resources"]["limits"]["memory"]) > beside + size_bytes("512m")
    assert "medium" not in volumes[mounts["/tmp"]]["emptyDir"]


def validate(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a validator of build/validators, which have their schemas with them."""
    if not VALIDATORS.is_dir():
        pytest.skip(f"{VALIDATORS.relative_to(ROOT)} is not installed: make setup-slow")
    command = [sys.executable, "-m", *map(str, words)]
    environment = os.environ | {"PYTHONPATH": str(VALIDATORS)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


KUBERNETES = ("kubernetes_validate", "--strict")
COMPOSE_SCHEMA = ("check_jsonschema", "--builtin-schema", "vendor.compose-spec")


@pytest.mark.slow
def test_manifests_are_valid_resources_of_kubernetes() -> None:
    done = validate(*KUBERNETES, *[file for file in CLUSTER if file.parent.name == "kubernetes"])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_containers_of_kserve_are_valid_in_a_pod(tmp_path: Path) -> None:
    """KServe's own resources are not among the schemas; a ServingRuntime's containers are those of a pod."""
    containers = manifest("kserve/servingruntime.yaml")["spec"]["containers"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": {"containers": containers}}
    (tmp_path / "pod.yaml").write_text(yaml.safe_dump(pod))
    done = validate(*KUBERNETES, tmp_path / "pod.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_compose_files_are_valid() -> None:
    done = validate(*COMPOSE_SCHEMA, *[DEPLOY / name for name in COMPOSE])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "name", "right", "wrong"),
    [
        (KUBERNETES, "kubernetes/deployment.yaml", "readinessProbe:", "readyProbe:"),
        (KUBERNETES, "kubernetes/service.yaml", "port: 8001", "port: grpc"),
        (COMPOSE_SCHEMA, "compose.yaml", "stop_grace_period:", "grace_period:"),
    ],
)
def test_the_validators_refuse_a_wrong_key_or_value(
    words: tuple[str, ...], name: str, right: str, wrong: str, tmp_path: Path
) -> None:
    text = (DEPLOY / name).read_text()
    assert right in text
    (tmp_path / "wrong.yaml").write_text(text.replace(right, wrong))
    done = validate(*words, tmp_path / "wrong.yaml")
    assert done.returncode == 1, done.stdout + done.stderr


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
