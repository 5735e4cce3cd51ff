"""What every test shares: the two tiers, hypothesis without a clock, quick collections of garbage, and Ctrl-C.

Tests marked `slow` are the slow tier. `slow(but_first=2)` on a parametrised test leaves its first two cases in the fast
tier, as a sentinel. With `--tools-required` a run fails when a missing program or package made a test be skipped.
"""

import gc
import re
import signal
from collections import Counter

import pytest
from hypothesis import settings

settings.register_profile("weftline", deadline=None)
settings.load_profile("weftline")
gc.disable()  # until the tests are collected

# A shell starts what it puts in the background with Ctrl-C ignored, and whatever that starts inherits it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

MISSING_TOOL = re.compile(r"not installed|not built|there is no|could not import|is missing|No module named")
"""What the reason of a skip says when a program or package is missing, rather than a GPU or a right."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tools-required", action="store_true", help="Fail when a test is skipped for a missing tool.")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Take the mark `slow` off the first cases of tests that say `but_first`."""
    seen: Counter[str] = Counter()
    for item in items:
        for mark in [one for one in item.own_markers if one.name == "slow" and "but_first" in one.kwargs]:
            name = item.nodeid.partition("[")[0]
            seen[name] += 1
            if seen[name] <= mark.kwargs["but_first"]:
                item.own_markers.remove(mark)


def pytest_collection_finish() -> None:
    """Leave what collecting the tests has made, millions of objects, out of later collections of garbage."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _objects_of_earlier_files_are_frozen() -> None:
    """Leave what earlier files have left out of later collections of garbage, which some tests make for each case."""
    gc.collect()
    gc.freeze()


class MissingTools:
    """Collects the skips of a run that a missing tool caused, and fails the run when there are any."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._look(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._look(report)

    def _look(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
        if MISSING_TOOL.search(reason):
            self.found.append(f"{report.nodeid}: {reason}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.found and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.found:
            terminalreporter.write_line(f"MISSING TOOL {line}", red=True)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--tools-required"):
        config.pluginmanager.register(MissingTools(), "missing-tools")
