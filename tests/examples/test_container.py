"""The Containerfile, executed step by step on a Debian root made by debootstrap; stock clients ask its server.

buildah executes it. Debian's mirror and the package index are those that this machine is configured for. The build
argument EXTRAS leaves out torch, whose index is PyTorch's own. Not covered: the image of a GPU, a read-only root, and a
runtime that publishes ports. buildah isolates with chroot, and the server has this machine's network.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import tritonclient.grpc
import tritonclient.http
import yaml

from tests.engine.serving.auth.certificates import Authority

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples/deploy"
PHOTO = ROOT / "examples/data/photo.png"
BUILD_S, START_S = 500, 60
APT_KEYS = re.compile(r"Acquire::(https?|Check-|Retries)")
PIP_KEYS = ("index-url", "extra-index-url", "trusted-host", "proxy", "timeout")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(*words: str | Path, **more: Any) -> str:
    """Run a command and return its standard output; the test fails with the end of what it wrote."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=BUILD_S, **more)
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@dataclass(frozen=True)
class Buildah:
    """buildah with a store of its own."""

    store: Path

    def __call__(self, *words: str | Path) -> str:
        return run(*self.command(*words), env=os.environ | {"BUILDAH_ISOLATION": "chroot"})

    def command(self, *words: str | Path) -> list[str]:
        store = ["--root", self.store / "root", "--runroot", self.store / "run", "--storage-driver", "vfs"]
        return ["buildah", *map(str, [*store, *words])]


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    for tool in ("buildah", "debootstrap"):
        if shutil.which(tool) is None and not Path("/usr/sbin", tool).exists():
            pytest.skip(f"{tool} is not installed")
    if os.geteuid() != 0:
        pytest.skip("debootstrap needs the rights of root")
    store = tmp_path_factory.mktemp("containers")
    mount = ["mount", "-t", "tmpfs", "-o", "size=6g", "tmpfs", store]  # in memory: dpkg syncs every file
    if (done := subprocess.run(mount, capture_output=True, text=True)).returncode:
        pytest.skip(f"this machine permits no mounts: {done.stderr.strip()}")
    try:
        yield Buildah(store)
    finally:
        run("umount", "--recursive", "--lazy", store)


def debian_mirror() -> str:
    """Return the mirror of Debian among the sources of this machine's apt."""
    known = run("apt-get", "indextargets", "--format", "$(LABEL) $(REPO_URI)", "Created-By: Packages")
    mirrors = [line.removeprefix("Debian ") for line in known.splitlines() if line.startswith("Debian ")]
    if not mirrors:
        pytest.skip("there is no Debian mirror among the sources of apt")
    return mirrors[0]


def pip_volumes(folder: Path) -> list[str]:
    """Return options that show a build this machine's configuration of pip, without its local folders."""
    lines = run(sys.executable, "-m", "pip", "config", "list").splitlines()
    values = {
        key.rpartition(".")[2]: str(ast.literal_eval(value)) for key, _, value in (one.partition("=") for one in lines)
    }
    kept = {key: value for key, value in values.items() if key in PIP_KEYS and not value.startswith(("file:", "/"))}
    authorities = values.get("cert") or os.environ.get("SSL_CERT_FILE")
    options = []
    if authorities:
        kept["cert"] = "/run/authorities.pem"
        options.append(f"--volume={authorities}:/run/authorities.pem:ro")
    file = folder / "pip.conf"
    file.write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in kept.items()))
    return [*options, f"--volume={file}:/etc/pip.conf:ro"]


@pytest.fixture(scope="module")
def image(buildah: Buildah, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Build the image of the Containerfile, without torch, on a base that debootstrap makes; return its name."""
    text = (DEPLOY / "Containerfile").read_text()
    release = re.search(r"^ARG DEBIAN=(\w+)$", text, re.M)
    assert release
    base = buildah("from", "scratch").strip()
    root = Path(buildah("mount", base).strip())
    run(
        "debootstrap",
        "--variant=minbase",
        release[1],
        root,
        debian_mirror(),
        env=os.environ | {"PATH": os.defpath + ":/usr/sbin:/sbin"},
    )
    settings = [line for line in run("apt-config", "dump").splitlines() if APT_KEYS.match(line)]
    (root / "etc/apt/apt.conf.d/90machine").write_text("\n".join([*settings, ""]))
    buildah("umount", base)
    buildah("commit", "--rm", base, f"docker.io/library/debian:{release[1]}-slim")
    folder = tmp_path_factory.mktemp("pip")
    options = [
        "--pull-never",
        "--format",
        "docker",
        *pip_volumes(folder),
        "-f",
        DEPLOY / "Containerfile",
        "-t",
        "weftline",
    ]
    buildah("build", *options, "--build-arg", "EXTRAS=serve,trace,onnx", "--build-arg", "TORCH_INDEX=", ROOT)
    return "localhost/weftline"


@pytest.fixture(scope="module")
def config(buildah: Buildah, image: str) -> dict[str, Any]:
    """Return the configuration that the image gives its containers."""
    return dict(json.loads(buildah("inspect", "--type", "image", image))["Docker"]["config"])


@pytest.fixture(scope="module")
def container(buildah: Buildah, image: str) -> str:
    return buildah("from", "--pull-never", image).strip()


def test_the_image_starts_the_server_unprivileged(config: dict[str, Any]) -> None:
    assert (config["User"], config["WorkingDir"], config["StopSignal"]) == ("10001:10001", "/etc/weftline", "SIGTERM")
    assert config["ExposedPorts"].keys() == {"8001/tcp", "8000/tcp"}
    assert [*config["Entrypoint"], *config["Cmd"]][:3] == ["weftline", "serve", "/etc/weftline/serve.yaml"]


def test_the_image_has_no_compiler_and_no_installer(buildah: Buildah, container: str) -> None:
    found = buildah(
        "run", container, "--", "sh", "-c", "command -v cc gcc make pip pip3 git curl; python -m pip 2>&1; true"
    )
    assert "/bin/" not in found.replace("/opt/weftline/bin/python: No module named pip", "")
    assert "No module named pip" in found


@dataclass(frozen=True)
class Server:
    """A server inside the container, its ports on this machine, and what its clients need."""

    process: subprocess.Popen[str]
    log: Path
    grpc_port: int
    http_port: int
    authorities: Path
    token: str
    health: list[str]

    @property
    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.authorities)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture(scope="module")
def server(
    buildah: Buildah, container: str, config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Run the image's command with the serve file of compose.yaml, at free ports, until its health check passes."""
    folder = tmp_path_factory.mktemp("etc")
    authority = Authority(folder, "authority")
    certificate, key = authority.sign("server")
    made = subprocess.run(
        [sys.executable, "-m", "weftline", "token", "web"], capture_output=True, text=True, check=True
    )
    (folder / "tokens.yaml").write_text("tokens:\n" + made.stdout)
    token = made.stderr.split()[-1]
    ports = {8001: free_port(), 8000: free_port()}
    served = yaml.safe_load((DEPLOY / "serve.yaml").read_text())
    for protocol in ("grpc", "http"):
        served[protocol]["port"] = ports[served[protocol]["port"]]
    (folder / "serve.yaml").write_text(yaml.safe_dump(served))
    for file in (certificate, key, folder / "tokens.yaml"):
        os.chown(file, 10001, 10001)
        file.chmod(0o400)
    mounts = {
        folder / "serve.yaml": "/etc/weftline/serve.yaml",
        certificate: served["tls"]["certificate"],
        key: served["tls"]["key"],
        folder / "tokens.yaml": served["tokens"],
        ROOT / "examples": "/models",
    }
    volumes = [f"--volume={source}:{target}:ro" for source, target in mounts.items()]
    url = re.search(r"READY_URL=(\S+)", "\n".join(config["Env"]))
    assert url
    ready = url[1].replace(":8000", f":{ports[8000]}")
    health = buildah.command("run", "--env", f"READY_URL={ready}", container, "--", *config["Healthcheck"]["Test"][1:])
    log = folder / "log"
    command = buildah.command("run", *volumes, container, "--", *config["Entrypoint"], *config["Cmd"])
    environment = os.environ | {"BUILDAH_ISOLATION": "chroot"}
    with (
        log.open("w") as output,
        subprocess.Popen(command, stdout=output, stderr=output, text=True, env=environment) as process,
    ):
        try:
            wait_until_healthy(process, health, log)
            yield Server(process, log, ports[8001], ports[8000], authority.file, token, health)
        finally:
            if process.poll() is None:
                for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                    one.kill()


def healthy(health: list[str]) -> bool:
    environment = os.environ | {"BUILDAH_ISOLATION": "chroot"}
    return subprocess.run(health, capture_output=True, env=environment, timeout=START_S).returncode == 0


def wait_until_healthy(process: subprocess.Popen[str], health: list[str], log: Path) -> None:
    end = time.monotonic() + START_S
    while not healthy(health):
        assert process.poll() is None and time.monotonic() < end, log.read_text()[-4000:]
        time.sleep(0.5)


def server_process(server: Server) -> psutil.Process:
    """Return the process 1 of the container."""
    inside = psutil.Process(server.process.pid).children(recursive=True)
    return next(
        one for one in inside if one.cmdline()[:2] == ["/opt/weftline/bin/python", "/opt/weftline/bin/weftline"]
    )


def test_the_server_answers_tritons_client_over_grpc(server: Server) -> None:
    options = {"ssl": True, "root_certificates": str(server.authorities)}
    with tritonclient.grpc.InferenceServerClient(f"localhost:{server.grpc_port}", **options) as client:
        photo = tritonclient.grpc.InferInput("photo", [1], "BYTES")
        photo.set_data_from_numpy(np.array([PHOTO.read_bytes()], object))
        answer = client.infer("classifier", [photo], headers={"authorization": f"Bearer {server.token}"})
    assert answer.as_numpy("label")[0]
    assert answer.as_numpy("scores").dtype == np.float32


def test_the_server_answers_tritons_client_and_forms_over_http(server: Server) -> None:
    headers = {"authorization": f"Bearer {server.token}"}
    context = {"ssl": True, "ssl_options": {"ca_certs": str(server.authorities)}}
    with tritonclient.http.InferenceServerClient(f"localhost:{server.http_port}", **context) as client:
        assert client.get_model_metadata("classifier", headers=headers)["name"] == "classifier"
    url = f"https://localhost:{server.http_port}/run/classifier"
    with httpx.Client(verify=server.context, headers=headers) as http:
        assert http.post(url, files={"photo": PHOTO.read_bytes()}).json()["label"]


def test_a_client_without_a_token_is_refused(server: Server) -> None:
    url = f"https://localhost:{server.http_port}/run/classifier"
    assert httpx.post(url, files={"photo": b""}, verify=server.context).status_code == 401


def test_the_server_runs_as_its_user_with_libnghttp2(server: Server) -> None:
    assert set(server_process(server).uids()) == {10001}
    assert "nghttp2" in server.log.read_text()


def test_sigterm_drains_the_server_and_ends_it_with_0(server: Server) -> None:
    server_process(server).send_signal(signal.SIGTERM)
    assert server.process.wait(45) == 0, server.log.read_text()[-4000:]
    assert not healthy(server.health)
