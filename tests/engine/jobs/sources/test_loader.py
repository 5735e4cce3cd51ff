import os
from pathlib import Path

import pytest

from weftline.engine.jobs.rows import Unusable
from weftline.engine.jobs.sources.media import Loader


@pytest.mark.timeout(20)
def test_a_pipe_is_refused_as_a_media_file_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.png")
    with Loader(folder=str(tmp_path)) as loader:
        assert loader.read_all(["a.png"]) == [Unusable("cannot read a.png: it is no regular file")]


def test_a_folder_is_refused_as_a_media_file(tmp_path: Path) -> None:
    (tmp_path / "a.png").mkdir()
    with Loader(folder=str(tmp_path)) as loader:
        assert loader.read_all(["a.png"]) == [Unusable("cannot read a.png: Is a directory")]


def test_reasons_hold_no_passwords() -> None:
    with Loader() as loader:
        found = loader.read_all(["memory://u:SECRET@none/a.png"])[0]
    assert found == Unusable("there is no file memory://none/a.png")
