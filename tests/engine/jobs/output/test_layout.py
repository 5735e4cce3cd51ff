from __future__ import annotations

import posixpath

import hypothesis.strategies as st
from hypothesis import given

from weftline.engine.jobs.output import layout as naming
from weftline.engine.jobs.output.layout import ResultLayout


@given(st.integers(0, 10**7), st.integers(0, 12), st.sampled_from([".parquet", ".jsonl", ".arrow"]))
def test_names_are_recognised(part: int, revision: int, suffix: str) -> None:
    layout = ResultLayout("", "", suffix)
    data = layout.data_base(part)
    assert naming.is_data(data, suffix) and naming.is_data(data) and not naming.is_data(data, ".csv")
    assert naming.staged_of(posixpath.basename(naming.staged(data))) == data
    for one in (data, naming.staged(data), layout.manifest, layout.record(part)):
        assert naming.is_being_written(posixpath.basename(naming.being_written(one)))
        assert posixpath.dirname(naming.being_written(one)) == posixpath.dirname(one)
    assert naming.part_of_record(posixpath.basename(layout.record(part))) == part
    assert naming.is_errors(layout.errors_base(part, revision))
    assert naming.is_media_folder(layout.media_base(part, revision))
    assert not any(naming.is_being_written(one) or naming.staged_of(one) for one in (data, "_errors.jsonl"))
