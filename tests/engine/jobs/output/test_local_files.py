from __future__ import annotations

from pathlib import Path

import msgspec

from tests.engine.jobs.output import jobs
from weftline.engine.jobs.output.local_files import LocalFiles
from weftline.engine.jobs.output.store import Store


def test_a_folder_is_removed_and_what_its_links_lead_to_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.png").write_bytes(b"mine")
    (tmp_path / "out" / "media").mkdir(parents=True)
    (tmp_path / "out" / "media" / "link").symlink_to(tmp_path / "mine")
    LocalFiles(tmp_path / "out").remove_folder("media/")
    assert not (tmp_path / "out" / "media").exists()
    assert (tmp_path / "mine" / "a.png").read_bytes() == b"mine"


def test_restart_does_not_follow_a_link_among_the_pictures(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    with Store.open(out, jobs.MANIFEST, suffix=".jsonl") as store:
        jobs.commit_rest(store)
    pictures = next(path for path in (tmp_path / "out").rglob("part-00001") if path.is_dir())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.png").write_bytes(b"mine")
    (pictures / "link").symlink_to(tmp_path / "mine")
    (pictures.parent / "part-00009").symlink_to(tmp_path / "mine")
    Store.open(out, msgspec.structs.replace(jobs.MANIFEST, schema="other"), suffix=".jsonl", restart=True).close()
    assert not pictures.exists()
    assert (tmp_path / "mine" / "a.png").read_bytes() == b"mine"
