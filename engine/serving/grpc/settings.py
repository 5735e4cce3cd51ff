"""TraceSetting and LogSettings methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weftline.engine.serving.grpc.protos import V2
from weftline.engine.serving.grpc.service import Unary
from weftline.engine.serving.v2.settings import LogSettings, LogValue, TraceSettings
from weftline.errors import InputError


class GrpcSettings:
    """The two settings methods. check_model: raises UnknownModel for an unknown model."""

    def __init__(self, trace: TraceSettings, logs: LogSettings, check_model: Callable[[str], object]) -> None:
        self._trace = trace
        self._logs = logs
        self._check_model = check_model

    def methods(self) -> dict[str, Unary]:
        return {"TraceSetting": self.trace, "LogSettings": self.logs}

    async def trace(self, request: Any) -> Any:
        if request.model_name:
            self._check_model(request.model_name)
        changes = {name: tuple(setting.value) for name, setting in request.settings.items()}
        if changes:
            self._trace.set(changes, request.model_name)
        response = V2.TraceSettingResponse()
        for name, values in self._trace.get(request.model_name).items():
            response.settings[name].value.extend(values)
        return response

    async def logs(self, request: Any) -> Any:
        self._logs.set({name: _value(name, setting) for name, setting in request.settings.items()})
        response = V2.LogSettingsResponse()
        for name, value in self._logs.get().items():
            setting = response.settings[name]
            if isinstance(value, bool):
                setting.bool_param = value
            elif isinstance(value, int):
                setting.uint32_param = value
            else:
                setting.string_param = value
        return response


def _value(name: str, setting: Any) -> LogValue:
    choice = setting.WhichOneof("parameter_choice")
    if choice is None:
        raise InputError(f"{name!r:.80}: found no value")
    value: LogValue = getattr(setting, choice)
    return value
