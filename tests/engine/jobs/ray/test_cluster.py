"""How many replicas machines hold, and addresses that are refused before anything is started."""

from __future__ import annotations

import pytest

from weftline.engine.jobs.ray.cluster import Need, capacity, connected
from weftline.errors import InputError


@pytest.mark.parametrize(
    ("nodes", "need", "fits"),
    [
        ([{"CPU": 4.0}], Need(1), 4),
        ([{"CPU": 4.0}], Need(3), 1),
        ([{"CPU": 4.0}, {"CPU": 2.0}], Need(3), 1),
        ([{"CPU": 8.0, "GPU": 2.0}], Need(1, 1), 2),
        ([{"CPU": 8.0, "GPU": 2.0}], Need(1, 0.5), 4),
        ([{"CPU": 8.0, "GPU": 2.0}], Need(1, 0.6), 2),  # one share on each device, and the rest of it stays empty
        ([{"CPU": 1.0, "GPU": 8.0}], Need(1, 1), 1),
        ([{"CPU": 64.0}, {"CPU": 1.0, "GPU": 1.0}], Need(1, 1), 1),
        ([{"CPU": 64.0}], Need(1, 1), 0),
        ([], Need(1), 0),
    ],
)
def test_as_many_replicas_fit_as_one_machine_after_the_other_holds(
    nodes: list[dict[str, float]], need: Need, fits: int
) -> None:
    assert capacity(nodes, need) == fits


def test_the_client_protocol_is_refused_with_what_to_do() -> None:
    pytest.importorskip("ray")
    with pytest.raises(InputError, match=r"ray://head:10001.*not supported(?s:.*)--address auto"):
        connected("ray://head:10001").__enter__()
