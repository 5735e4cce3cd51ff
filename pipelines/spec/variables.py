"""Environment variables in YAML values: `${NAME}` and `${NAME:-default}`.

    model: ${MODELS}/detector.onnx
    otlp: ${COLLECTOR:-http://localhost:4317}

A variable that is unset, or empty where a default is given, takes the default; without one that is a problem. `$${` is
the text `${`. Keys are never expanded, and neither are texts for models (`LITERAL_KEYS`), where `${` may mean anything.

A variable whose name contains KEY, TOKEN, SECRET, PASSWORD, PASSWD or CREDENTIAL is a secret: wherever Weftline prints
or stores a pipeline, its value is written as `${NAME}` again, and it is no part of a job's fingerprint.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weftline.errors import Problem

LITERAL_KEYS = frozenset({"about", "prompt", "template", "when"})
"""Keys below which nothing is expanded: texts for people and models, and expressions."""

_VARIABLE = re.compile(r"\$\$\{|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<default>:-[^{}]*)?\}")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Return whether the value of a variable of that name is kept out of what is printed and handed on."""
    return _SECRET.search(name) is not None


class UnsetVariable(ValueError):
    """A variable is not set and has no default; the message is its name."""


@dataclass(slots=True)
class Variables:
    """The environment that a document is read with.

    secrets: the secret values that were used, each with what stands in its place when it is printed.
    """

    values: Mapping[str, str] = field(default_factory=dict, repr=False)
    secrets: dict[str, str] = field(default_factory=dict, repr=False)

    def expand(self, text: str) -> str:
        """Return `text` with its variables replaced; UnsetVariable for the first one that has no value."""
        return _VARIABLE.sub(self._value, text)

    def _value(self, match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        if name is None:
            return "${"
        value = self.values.get(name)
        if default is not None and not value:
            return default[2:]
        if value is None:
            raise UnsetVariable(name)
        if value and is_secret(name):
            self.secrets[value] = f"${{{name}}}"
        return value


def escaped(value: Any) -> Any:
    """Return plain values as a document writes them, so that reading it expands nothing in them."""
    if isinstance(value, str):
        return value.replace("${", "$${")
    if isinstance(value, Mapping):
        return {key: one if key in LITERAL_KEYS else escaped(one) for key, one in value.items()}
    return [escaped(one) for one in value] if isinstance(value, list | tuple) else value


def without_secrets(value: Any, secrets: Mapping[str, str]) -> Any:
    """Return a text, or plain values with texts in them, with every secret as the variable it came from."""
    if not secrets:
        return value
    if isinstance(value, str):
        for secret in sorted(secrets, key=len, reverse=True):
            value = value.replace(secret, secrets[secret])
        return value
    if isinstance(value, Mapping):
        return {without_secrets(key, secrets): without_secrets(one, secrets) for key, one in value.items()}
    return [without_secrets(one, secrets) for one in value] if isinstance(value, list | tuple) else value


def hide_secrets(problem: Problem, secrets: Mapping[str, str]) -> Problem:
    """Return the problem with every secret in its texts as the variable it came from."""
    if not secrets:
        return problem
    texts = {name: without_secrets(getattr(problem, name), secrets) for name in ("path", "found", "expected", "fix")}
    return dataclasses.replace(problem, **texts)
