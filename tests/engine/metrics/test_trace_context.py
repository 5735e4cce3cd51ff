"""traceparent headers, as https://www.w3.org/TR/trace-context/ has them."""

from __future__ import annotations

import pytest

from weftline.engine.metrics.trace_context import TraceContext, parse

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CONTEXT = TraceContext(int(TRACE, 16), int(SPAN, 16), True)


def test_what_is_written_is_what_was_read() -> None:
    for header in (f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00", f"00-{'0' * 31}1-{'0' * 15}1-01"):
        assert str(parse(header)) == header


@pytest.mark.parametrize(("flags", "sampled"), [("01", True), ("00", False), ("03", True), ("ff", True), ("02", False)])
def test_only_the_lowest_flag_says_whether_it_is_recorded(flags: str, sampled: bool) -> None:
    found = parse(f"00-{TRACE}-{SPAN}-{flags}")
    assert found is not None and found.sampled is sampled


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    assert parse(f"cc-{TRACE}-{SPAN}-01") == parse(f"cc-{TRACE}-{SPAN}-01-what-the-future-brings") == CONTEXT


@pytest.mark.parametrize(
    "header",
    [
        "",
        "nonsense",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-0x",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f" 00-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00_{TRACE}_{SPAN}_01",
        "0" * 100_000,
    ],
)
def test_what_is_malformed_is_ignored(header: str) -> None:
    assert parse(header) is None
