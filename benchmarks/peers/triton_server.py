"""Triton Inference Server with identity steps, for a Python that has nvidia-pytriton (which brings Triton's binary).

    python benchmarks/peers/triton_server.py FOLDER PORT

Writes a model repository into FOLDER (`one`: an ensemble of one Python step; `three`: of three in a row; every step
passes its tensor on) and runs the server on 127.0.0.1:PORT until it is terminated. Prints `ready` when it is.
"""

import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.request

STEP = """
import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            tensor = pb.get_input_tensor_by_name(request, "x")
            answers.append(pb.InferenceResponse([pb.Tensor("y", tensor.as_numpy())]))
        return answers
"""

PORTS = """
input [{ name: "x" data_type: TYPE_UINT8 dims: [ -1 ] }]
output [{ name: "y" data_type: TYPE_UINT8 dims: [ -1 ] }]
"""


def write_models(folder: pathlib.Path) -> None:
    for at in range(3):
        home = folder / f"step{at}"
        (home / "1").mkdir(parents=True, exist_ok=True)
        (home / "1" / "model.py").write_text(STEP)
        (home / "config.pbtxt").write_text(
            f'name: "step{at}"\nbackend: "python"\nmax_batch_size: 0\n{PORTS}'
            "instance_group [{ kind: KIND_CPU count: 1 }]\n"
        )
    for name, count in (("one", 1), ("three", 3)):
        home = folder / name
        (home / "1").mkdir(parents=True, exist_ok=True)
        steps = []
        for at in range(count):
            given = "x" if at == 0 else f"t{at}"
            gives = "y" if at == count - 1 else f"t{at + 1}"
            steps.append(
                f'{{ model_name: "step{at}" model_version: -1 input_map {{ key: "x" value: "{given}" }} '
                f'output_map {{ key: "y" value: "{gives}" }} }}'
            )
        (home / "config.pbtxt").write_text(
            f'name: "{name}"\nplatform: "ensemble"\nmax_batch_size: 0\n{PORTS}'
            f"ensemble_scheduling {{ step [ {', '.join(steps)} ] }}\n"
        )


def main() -> None:
    folder, port = pathlib.Path(sys.argv[1]).absolute(), int(sys.argv[2])
    write_models(folder / "models")
    found = importlib.util.find_spec("pytriton")  # not imported: its own dependencies are not needed
    if found is None or found.origin is None:
        sys.exit("nvidia-pytriton is not installed here")
    package = pathlib.Path(found.origin).parent
    home = package / "tritonserver"
    stubs = home / "python_backend_stubs" / f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = home / "backends" / "python" / "triton_python_backend_stub"
    if not stub.exists():
        stub.symlink_to(stubs / "triton_python_backend_stub")
    site = package.parent
    libs = os.pathsep.join(
        [str(p) for p in [*site.glob("nvidia/*/lib"), home / "external_libs", pathlib.Path(sys.base_prefix) / "lib"]]
    )
    environment = dict(os.environ, LD_LIBRARY_PATH=libs, PYTHONPATH=str(site))
    command = [
        str(home / "bin" / "tritonserver"),
        f"--model-repository={folder / 'models'}",
        f"--backend-directory={home / 'backends'}",
        "--grpc-address=127.0.0.1", f"--grpc-port={port}", "--allow-metrics=false",
        "--http-address=127.0.0.1", f"--http-port={port + 1}",
    ]  # fmt: skip
    with (folder / "triton.log").open("w") as log:
        # The stub looks for numpy in its working directory before the base Python, whose numpy may be too new for it.
        server = subprocess.Popen(command, env=environment, cwd=site, stdout=log, stderr=log)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: server.terminate())
        for _ in range(300):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port + 1}/v2/health/ready", timeout=1)
                break
            except OSError:
                if server.poll() is not None:
                    sys.exit(f"tritonserver ended: see {log.name}")
                time.sleep(0.2)
        print("ready", flush=True)
        sys.exit(server.wait())


if __name__ == "__main__":
    main()
