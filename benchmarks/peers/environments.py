"""Peers' environments, each in a folder of its own under `.peers/`: `python -m benchmarks.peers.environments`.

Nothing is installed system-wide. triton: nvidia-pytriton, which brings Triton Inference Server 2.51 and its Python
backend. perf: NVIDIA's perf_analyzer from the tritonclient 2.46 wheel, with the two libraries it needs (libb64 from a
Debian package that is unpacked, not installed; libcudart from PyPI). mosec, ray, fastapi, litserve and bentoml: as they
come.
"""

from __future__ import annotations

import argparse
import stat
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

HOME = Path(__file__).resolve().parents[2] / ".peers"

PACKAGES = {
    "triton": (("--no-deps", "nvidia-pytriton==0.5.13"), ("numpy<2", "nvidia-cuda-runtime-cu12")),
    "perf": (("nvidia-cuda-runtime-cu12",),),
    "mosec": (("mosec==0.9.8", "numpy", "msgpack"),),
    "ray": (("ray[serve]==2.60.0", "numpy"),),
    "fastapi": (("fastapi==0.165.0", "uvicorn[standard]==0.54.0", "onnxruntime==1.31.1", "numpy"),),
    "litserve": (("litserve==0.2.19", "onnxruntime==1.31.1", "numpy"),),
    "bentoml": (("bentoml==1.4.40", "onnxruntime==1.31.1", "numpy"),),
}
"""What pip installs for each peer, one call after the other."""


def python_of(peer: str) -> Path:
    """Return the peer's Python; it exists when the peer is built."""
    return HOME / peer / "bin" / "python"


def built(peer: str) -> bool:
    return (HOME / peer / ".built").exists()


def build(peer: str) -> None:
    """Build one peer's environment; CalledProcessError when a package cannot be had."""
    folder = HOME / peer
    if built(peer):
        return
    print(f"building {peer} in {folder}", file=sys.stderr)
    venv.create(folder, with_pip=True, clear=True)
    for packages in PACKAGES[peer]:
        command = [str(python_of(peer)), "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages]
        subprocess.run(command, check=True)
    if peer == "perf":
        _unpack_perf_analyzer(folder)
    (folder / ".built").touch()


def perf_analyzer() -> tuple[Path, dict[str, str]] | None:
    """Return the perf_analyzer binary and the environment it runs in, or None when it is not built."""
    if not built("perf"):
        return None
    folder = HOME / "perf"
    libraries = [*folder.glob("libb64/usr/lib/*"), *folder.glob("lib/python3*/site-packages/nvidia/*/lib")]
    return folder / "perf_analyzer", {"LD_LIBRARY_PATH": ":".join(map(str, libraries))}


def _unpack_perf_analyzer(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        pip = [str(folder / "bin" / "python"), "-m", "pip", "download", "-q", "--no-deps", "-d", scratch]
        subprocess.run([*pip, "tritonclient==2.46.0"], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), scratch], check=True)
        (binary,) = Path(scratch).glob("*/data/bin/perf_analyzer")
        target = folder / "perf_analyzer"
        target.write_bytes(binary.read_bytes())
        target.chmod(target.stat().st_mode | stat.S_IXUSR)
        subprocess.run(["apt-get", "download", "-q", "libb64-0d"], check=True, cwd=scratch)
        (package,) = Path(scratch).glob("*.deb")
        subprocess.run(["dpkg", "-x", str(package), str(folder / "libb64")], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", help=f"of {', '.join(PACKAGES)}; all when left out")
    for peer in parser.parse_args().peers or list(PACKAGES):
        try:
            build(peer)
        except (subprocess.CalledProcessError, OSError, ValueError) as error:
            print(f"{peer} could not be built: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
