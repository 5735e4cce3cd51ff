"""Trace and log settings: validation and effects."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import pytest

from weftline.engine.serving.backend import Ask
from weftline.engine.serving.v2.settings import SILENT, LogSettings, LogValue, TraceSettings
from weftline.errors import InputError


def traced(settings: TraceSettings, caplog: pytest.LogCaptureFixture, model: str, count: int) -> int:
    caplog.clear()
    with caplog.at_level(logging.INFO, "weftline.ingress.trace"):
        for _ in range(count):
            settings.note(Ask(model, {}), (), 1.0)
    return len(caplog.records)


def test_every_rate_th_request_is_traced_until_the_count_is_used_up(caplog: pytest.LogCaptureFixture) -> None:
    settings = TraceSettings()
    assert traced(settings, caplog, "a", 5) == 0 and not settings.active
    settings.set({"trace_level": ["TIMESTAMPS"], "trace_rate": ["3"], "trace_count": ["2"]})
    assert settings.active and traced(settings, caplog, "a", 3) == 1
    assert traced(settings, caplog, "b", 100) == 1
    assert settings.get()["trace_count"] == ("0",)


def test_settings_of_a_model_stand_before_those_of_all(caplog: pytest.LogCaptureFixture) -> None:
    settings = TraceSettings()
    settings.set({"trace_level": ["TIMESTAMPS"], "trace_rate": ["1"]})
    settings.set({"trace_level": ["OFF"]}, "quiet")
    assert traced(settings, caplog, "quiet", 4) == 0 and traced(settings, caplog, "loud", 4) == 4
    settings.set({"trace_level": []}, "quiet")
    assert traced(settings, caplog, "quiet", 4) == 4
    settings.set({"trace_level": []})
    assert traced(settings, caplog, "loud", 4) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"trace_rate": ["0"]},
        {"trace_rate": ["x"]},
        {"trace_rate": ["1", "2"]},
        {"trace_rate": ["9" * 5000]},
        {"trace_rate": ["²"]},
        {"trace_count": ["-2"]},
        {"trace_level": ["TENSORS"]},
        {"trace_file": ["/etc/passwd"]},
        {"trace_file": []},
        {"trace_mode": ["opentelemetry"]},
        {"log_frequency": ["5"]},
        {"nothing": []},
    ],
)
def test_a_wrong_trace_setting_changes_nothing(wrong: Mapping[str, Sequence[str]]) -> None:
    settings = TraceSettings()
    before = settings.get()
    with pytest.raises(InputError):
        settings.set({"trace_level": ["TIMESTAMPS"], **wrong})
    assert settings.get() == before and not settings.active


@pytest.mark.parametrize(
    ("wanted", "level"),
    [
        ({"log_verbose_level": 2}, logging.DEBUG),
        ({"log_info": True}, logging.INFO),
        ({"log_info": False}, logging.WARNING),
        ({"log_info": False, "log_warning": False}, logging.ERROR),
        ({"log_info": False, "log_warning": False, "log_error": False}, SILENT),
        ({"log_format": "default"}, logging.INFO),
    ],
)
def test_log_switches_come_to_a_level(wanted: Mapping[str, LogValue], level: int) -> None:
    logger = logging.Logger("one", logging.INFO)
    settings = LogSettings(logger)
    settings.set(wanted)
    assert logger.level == level
    assert settings.get()["log_verbose_level"] == int(level == logging.DEBUG)


@pytest.mark.parametrize(
    "wrong",
    [
        {"log_file": "/etc/passwd"},
        {"log_file": ""},
        {"log_format": "ISO8601"},
        {"log_info": 1},
        {"log_verbose_level": True},
        {"log_verbose_level": "1"},
        {"nothing": True},
    ],
)
def test_a_wrong_log_setting_changes_nothing(wrong: Mapping[str, LogValue]) -> None:
    logger = logging.Logger("one", logging.WARNING)
    with pytest.raises(InputError):
        LogSettings(logger).set({"log_verbose_level": 1, **wrong})
    assert logger.level == logging.WARNING
