"""The same tests of the gRPC server on the transport grpcio, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_test_of_the_server_passes_on_grpcio() -> None:
    folder = Path(__file__).parent
    only_nghttp2 = [f"--ignore={path}" for path in (*folder.glob("test_http2*.py"), Path(__file__))]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder), *only_nghttp2]
    environment = os.environ | {"WEFTLINE_TEST_TRANSPORT": "grpcio"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:]
