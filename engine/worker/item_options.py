"""Options of items: the configs of the steps that share a node of this worker.

A node is opened with the options of one step. Items of other steps name theirs by a number (SetOptions), and the host
of the node sets `node.config` to the config of the items for each call. A step that is alone at its node sends no
numbers, and its config is never touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from weftline.engine.protocol.messages import DropOptions, Item, SetOptions, StepToOpen
from weftline.errors import StepError
from weftline.nodes.contract import Node
from weftline.pipelines.check.options import request_options, to_config
from weftline.pipelines.spec.policy import CallPolicy


@dataclass(frozen=True, slots=True)
class ItemOptions:
    """Options of the items of one step; fields as in SetOptions.

    config:  the node's whole config: the options that it was opened with, and these request options.
    digest:  the request options, encoded; empty where the node has none.
    invalid: why they are no config of the node; '' if they are.
    """

    name: str
    config: Any
    policy: CallPolicy
    digest: bytes = b""
    program: int = 0
    invalid: str = ""


class OptionSets:
    """The options of one hosted step's items, by number.

    any:   other options than those of the opening were set at some time.
    stage: number of all items of the current dispatch, where it is of a chain; else 0.
    """

    def __init__(self, step: StepToOpen, node: Node) -> None:
        self._options, self._node_class = step.options, type(node)
        own = {} if node.config is None else request_options(self._node_class, node.config)
        self._sets = {0: ItemOptions(step.name, node.config, step.policy, _encoded(own))}
        self.any = False
        self.stage = 0

    def set(self, message: SetOptions) -> None:
        """Add the options of a step."""
        digest = _encoded(message.options)
        invalid, config = "", next((one.config for one in self._sets.values() if one.digest == digest), None)
        if config is None:
            try:
                config = to_config(self._node_class, {**self._options, **message.options})
            except Exception as error:  # they were checked: the node class has changed since
                invalid = str(error)
        self._sets[message.number] = ItemOptions(message.name, config, message.policy, digest, message.program, invalid)
        self.any = True

    def drop(self, message: DropOptions) -> None:
        """Forget options that no item has any more."""
        for number in message.numbers:
            self._sets.pop(number, None)

    def of(self, item: Item) -> ItemOptions:
        """Return the options of an item of the current dispatch; StepError: they were not set."""
        number = self.stage or number_of(item)
        found = self._sets.get(number)
        if found is None:
            raise StepError(f"step {self._sets[0].name} has no options {number} of items: expected a SetOptions before")
        if found.invalid:
            raise StepError(f"step {found.name}: its options cannot be used: {found.invalid}")
        return found

    def select(self, node: Node, items: Sequence[Item]) -> Sequence[Any]:
        """Set the node's config for a call with these items; returns each item's, empty where they are equal.

        StepError: they differ, and the node takes no mixed ones.
        """
        configs = [self.of(item).config for item in items]
        node.config = configs[0]
        if all(one is configs[0] for one in configs):
            return ()
        if not node.mixed_options:
            raise StepError("items with different options came in one call, and the node takes no mixed ones")
        return configs

    def digest(self, number: int) -> bytes:
        """Return request options by number, encoded; empty for a number that was not set."""
        return self._sets[number].digest if number in self._sets else b""


def number_of(item: Item) -> int:
    """Return the number of an item's options, which is in its metadata."""
    return 0 if item.metadata is None else item.metadata.options


def _encoded(options: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode(options, order="sorted") if options else b""
