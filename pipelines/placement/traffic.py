"""Tensor traffic between loads, which becomes transfers when they are on different GPUs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from weftline.pipelines.placement.loads import AUTO, Load

Links = Mapping[int, Mapping[int, int]]
"""By load the loads that it exchanges tensors with, as indexes, and over how many edges."""


def links_of(loads: Sequence[Load], written: Mapping[str, Sequence[str]], edges: Collection[tuple[str, str]]) -> Links:
    """Return the links between loads.

    edges: pairs of steps, giver and reader, whose tensors can stay on a device.

    Tensors of a step whose instances are on several devices travel whatever happens, and link nothing. Light steps on
    `auto` follow their neighbours: what they hand on counts as going from who gave it to who reads it in the end.
    """
    spots = _spots(loads, written)
    readers: dict[str, list[str]] = {}
    for giver, reader in sorted(edges):
        readers.setdefault(giver, []).append(reader)
    links: dict[int, dict[int, int]] = {}
    for giver in sorted(spots):
        for reader in _ends(giver, readers, spots, written):
            here, there = spots[giver], spots[reader]
            if here is not None and there is not None and here != there:
                for one, other in ((here, there), (there, here)):
                    own = links.setdefault(one, {})
                    own[other] = own.get(other, 0) + 1
    return links


def _spots(loads: Sequence[Load], written: Mapping[str, Sequence[str]]) -> dict[str, int | None]:
    """Return by step a load that is where all of its instances are; None where they may be on several devices."""
    spots: dict[str, int | None] = {}
    for index, load in enumerate(loads):
        for name, _ in load.members:
            first = spots.setdefault(name, index)
            apart = first is not None and first != index and not (load.pinned and load.pinned == loads[first].pinned)
            if apart or "cpu" in written[name]:
                spots[name] = None
    return spots


def _ends(
    giver: str,
    readers: Mapping[str, Sequence[str]],
    spots: Mapping[str, int | None],
    written: Mapping[str, Sequence[str]],
) -> Iterator[str]:
    """Yield the readers of a step's outputs, past light steps without a stated device."""
    seen, waiting = {giver}, [*readers.get(giver, ())]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in spots:
            yield name
        elif AUTO in written.get(name, ()):
            waiting += readers.get(name, ())
