"""Certificates for tests, made by the openssl command: an authority, and what it signs for 127.0.0.1 and localhost."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1"


class Authority:
    """Signs certificates into its folder; `file` is its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder / name
        self._folder.mkdir()
        self.file = self._folder / "ca.pem"
        self._key = self._folder / "ca.key"
        _openssl(
            "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
            "-keyout", str(self._key), "-out", str(self.file), "-subj", f"/CN={name}",
        )  # fmt: skip

    def sign(self, name: str) -> tuple[Path, Path]:
        """Return the files of a new certificate and its key."""
        certificate, key, request = (self._folder / f"{name}.{suffix}" for suffix in ("pem", "key", "csr"))
        extra = self._folder / "names.cnf"
        extra.write_text(NAMES)
        _openssl(
            "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-keyout", str(key), "-out", str(request), "-subj", f"/CN={name}",
        )  # fmt: skip
        _openssl(
            "x509", "-req", "-in", str(request), "-CA", str(self.file), "-CAkey", str(self._key), "-CAcreateserial",
            "-days", "2", "-extfile", str(extra), "-out", str(certificate),
        )  # fmt: skip
        key.chmod(0o600)
        return certificate, key


def _openssl(*arguments: str) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command is not installed")
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)
