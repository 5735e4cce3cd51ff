"""The GPU's check of sleep, on a CPU: it is right where answers stay, and notices a weight that did not come back."""

from __future__ import annotations

import pytest
import torch

from weftline.engine.gpu_check.running import Wrong
from weftline.engine.llm.gpu import models
from weftline.engine.llm.gpu.sleep import check_sleep
from weftline.engine.llm.runner import Runner

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    family, given = models.SHAPES["small"]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
    monkeypatch.setattr(models, "SHAPES", {"small": (family, {**given, **sizes})})


def test_a_model_that_says_the_same_after_each_sleep_is_right() -> None:
    found = check_sleep(True, CPU, kv_bytes=1 << 20)
    assert list(found) == ["small, sleep 1", "small, sleep 2"]
    assert all("given back, asleep in" in line for line in found.values())


def test_a_weight_that_does_not_come_back_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    wake = Runner.wake

    def forgets(self: Runner) -> None:
        wake(self)
        self.model.model.layers[0].mlp.down_proj.weight.data.zero_()

    monkeypatch.setattr(Runner, "wake", forgets)
    with pytest.raises(Wrong, match="small: it answers otherwise after sleep 1"):
        check_sleep(True, CPU, kv_bytes=1 << 20)
