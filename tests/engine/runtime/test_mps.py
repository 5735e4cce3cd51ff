"""NVIDIA's multi-process service: used when it was asked for and runs, and never by accident."""

import errno
import os
from pathlib import Path

import pytest

from weftline.engine.runtime import mps
from weftline.errors import ModelError


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


def test_a_pipe_that_this_user_may_not_open_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "control")

    def refuse(*given: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    assert mps.runs(tmp_path)


def test_a_directory_that_the_environment_names_is_left_to_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(mps.PIPE_DIRECTORY, str(daemon(tmp_path, os.getpid())))
    assert mps.prepare(False) == {mps.PIPE_DIRECTORY: str(tmp_path)}
    elsewhere = tmp_path / "mounted"  # the daemon is not found from here
    monkeypatch.setenv(mps.PIPE_DIRECTORY, str(elsewhere))
    assert mps.prepare(False, ["cuda:0"] * 3, {"cuda:0": mps.EXCLUSIVE_PROCESS}) == {mps.PIPE_DIRECTORY: str(elsewhere)}


@pytest.mark.parametrize(
    ("wanted", "running", "fix"),
    [
        (False, False, "start nvidia-cuda-mps-control -d and write gpu: {mps: true}"),
        (True, False, "start nvidia-cuda-mps-control -d and write gpu: {mps: true}"),
        (False, True, "fix: write gpu: {mps: true}"),
        (True, True, None),
    ],
)
def test_an_exclusive_gpu_refuses_a_second_process_without_mps(
    wanted: bool, running: bool, fix: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(mps.PIPE_DIRECTORY, raising=False)
    monkeypatch.setattr(mps, "DEFAULT_DIRECTORY", str(daemon(tmp_path, os.getpid()) if running else tmp_path))
    modes = {"cuda:0": mps.EXCLUSIVE_PROCESS, "cuda:1": mps.EXCLUSIVE_PROCESS, "cuda:2": mps.DEFAULT}
    devices = ["cuda:0", "cuda:1", "cuda:0", "cuda:2", "cuda:2", "cuda:3", "cuda:3"]
    if fix is None:
        assert mps.prepare(wanted, devices, modes) == {mps.PIPE_DIRECTORY: str(tmp_path)}
        return
    with pytest.raises(ModelError) as refused:
        mps.prepare(wanted, devices, modes)
    said = str(refused.value)
    assert "cuda:0: 2 processes share it, but its compute mode is EXCLUSIVE_PROCESS" in said and fix in said
    assert "nvidia-smi -i N -c DEFAULT" in said and "cuda:1" not in said and "cuda:2" not in said
    assert mps.prepare(False, ["cuda:0", "cuda:1"], modes)  # one process on each


def test_a_gpu_that_no_process_may_use_is_refused_whether_or_not_mps_runs() -> None:
    for connects in (False, True):
        (said,) = mps.refusals({"cuda:1": 1}, {"cuda:1": mps.PROHIBITED}, connects, connects)
        assert "PROHIBITED" in said and "nvidia-smi -i N -c DEFAULT" in said


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
