"""What workers write to standard error."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_a_workers_import_of_torchao_writes_nothing() -> None:
    code = "from weftline.engine.worker.stdio import log_to_stderr; log_to_stderr(); import torchao"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert found.stderr == ""
