"""Tiny vision-language models, made once for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.llm.vision import tiny_vision


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], object]:
    """Return the tiny model of a family."""
    base: Path = tmp_path_factory.mktemp("vision")
    made: dict[str, tiny_vision.TinyVision] = {}

    def get(family: str) -> tiny_vision.TinyVision:
        if family not in made:
            torch.set_num_threads(1)
            (base / family).mkdir()
            made[family] = tiny_vision.make(family, base / family)
        return made[family]

    return get
