"""NVIDIA's multi-process service: used when it was asked for and runs, and never by accident."""

import os
from pathlib import Path

import pytest

from weftline.engine.runtime import mps


def daemon(folder: Path, pid: int) -> Path:
    (folder / "control").touch()
    (folder / "nvidia-cuda-mps-control.pid").write_text(f"{pid}\n")
    return folder


def test_it_runs_when_its_pipe_and_its_process_are_there(tmp_path: Path) -> None:
    assert not mps.runs(tmp_path)
    assert mps.runs(daemon(tmp_path, os.getpid()))


def test_what_a_dead_daemon_left_behind_is_no_daemon(tmp_path: Path) -> None:
    dead = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(dead, 0)
    assert not mps.runs(daemon(tmp_path, dead))
    (tmp_path / "nvidia-cuda-mps-control.pid").write_bytes(b"\xff../..")
    assert not mps.runs(tmp_path)


def test_a_daemon_of_another_container_runs_while_its_pipe_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "control")  # its pid file is not there, or names a process of the other container
    assert not mps.runs(tmp_path)
    reader = os.open(tmp_path / "control", os.O_RDONLY | os.O_NONBLOCK)
    assert mps.runs(tmp_path)
    os.close(reader)
    assert not mps.runs(tmp_path)


def test_a_directory_that_the_environment_names_is_left_to_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(mps.PIPE_DIRECTORY, str(daemon(tmp_path, os.getpid())))
    assert mps.prepare(False) == {mps.PIPE_DIRECTORY: str(tmp_path)}


def test_workers_find_it_only_where_it_was_asked_for_and_runs(tmp_path: Path) -> None:
    assert mps.for_workers(True, tmp_path, True) == {mps.PIPE_DIRECTORY: str(tmp_path)}
    for wanted, running in ((False, True), (True, False), (False, False)):
        assert mps.for_workers(wanted, tmp_path, running) == {mps.PIPE_DIRECTORY: mps.NOWHERE}
    assert not Path(mps.NOWHERE).exists()


def test_its_fault_domain_is_logged_and_so_is_its_absence() -> None:
    assert "ends the work of all of them" in mps.warning(True, True)
    assert "does not run here" in mps.warning(True, False)
    assert mps.warning(False, True) == mps.warning(False, False) == ""


def test_its_directory_is_the_environments_or_the_usual_one() -> None:
    assert mps.directory({mps.PIPE_DIRECTORY: "/run/mps"}) == Path("/run/mps")
    assert mps.directory({}) == Path(mps.DEFAULT_DIRECTORY)


def test_workers_on_a_gpu_do_not_use_a_service_that_was_not_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(mps.PIPE_DIRECTORY, raising=False)
    monkeypatch.setattr(mps, "DEFAULT_DIRECTORY", str(daemon(tmp_path, os.getpid())))
    assert mps.prepare(False) == {mps.PIPE_DIRECTORY: mps.NOWHERE} and not caplog.messages
    assert mps.prepare(True) == {mps.PIPE_DIRECTORY: str(tmp_path)} and caplog.messages == [mps.USED]
