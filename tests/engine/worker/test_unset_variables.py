"""Exceptions that follow from unset environment variables say that workers do not inherit them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weftline.engine.worker.faults import failure
from weftline.errors import ModelError
from weftline.nodes.user_code import load

CODE = """
import os

LEVEL = os.environ.get("MY_LEVEL")
KIND = os.environ.get("MY_KIND", "all")

def level(text):
    return LEVEL.upper()

def kind(text):
    return KIND + None

def lookup(text):
    return {}.get(text).upper()

class Client:
    def __init__(self):
        raise RuntimeError("set the MY_API_KEY environment variable")

def subscript(text):
    return os.environ["MY_SECRET"]

def getenv(text):
    return os.getenv("MY_SECRET").upper()

def get(text):
    return os.environ.get("MY_SECRET") + text

def library(text):
    return Client()

def chained(text):
    try:
        return os.environ["MY_SECRET"]
    except KeyError as error:
        raise ValueError("no secret") from error

def key(text):
    return {}["MY_SECRET"]

def usual(text):
    raise ValueError("MY_SECRET is too long")

def nothing(text):
    return os.getenv("HOME").upper() + None
"""
HINT = "workers do not inherit environment variables; pass it as an argument, key: ${NAME}"


def message(folder: Path, name: str) -> str:
    (folder / "steps.py").write_text(CODE)
    with pytest.raises(Exception) as caught:
        load(f"steps.py:{name}", folder, "function")("a")
    return failure(caught.value).message


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("subscript", "MY_SECRET"), ("getenv", "MY_SECRET"), ("get", "MY_SECRET"), ("library", "MY_API_KEY"),
        ("chained", "MY_SECRET"), ("level", "MY_LEVEL"),
    ],
)  # fmt: skip
def test_an_unset_variable_is_named_with_the_remedy(tmp_path: Path, name: str, variable: str) -> None:
    assert f"({variable}: {HINT.replace('NAME', variable)})" in message(tmp_path, name)


@pytest.mark.parametrize("name", ["key", "usual", "kind", "lookup"])
def test_other_exceptions_say_nothing_about_variables(tmp_path: Path, name: str) -> None:
    assert "inherit" not in message(tmp_path, name)


def test_a_variable_that_is_set_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "x")
    assert "HOME" in os.environ and "inherit" not in message(tmp_path, "nothing")


def test_the_cause_of_a_model_that_did_not_open_counts() -> None:
    try:
        try:
            os.environ["MY_SECRET"]
        except KeyError as error:
            raise ModelError("Client() failed") from error
    except ModelError as error:
        assert "MY_SECRET: workers do not inherit" in failure(error).message
