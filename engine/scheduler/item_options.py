"""Options of items: request options and call policies of the steps that use one deployment.

Workers open a node with the options of one step. Items of other steps may have different *request options* (prompts,
languages), a different `finite`, and a name of their own, which seeds depend on. Each distinct combination has a number
in the deployment. Workers get it once, when a program opens and after a restart, so that an item carries the number
only. Number 0 is what the node was opened with: its items carry nothing. A number is forgotten with its last step, and
never used twice.

The node of a streaming step may keep data of items, such as cached prompts. There a number belongs to one program, so
that the node can keep the data of programs apart.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import msgspec

from weftline.engine.protocol.messages import SetOptions
from weftline.engine.scheduler.routes import ProgramStep
from weftline.fields import copied
from weftline.pipelines.placement.plan import PlannedStep
from weftline.pipelines.spec.policy import CallPolicy


class _Key(NamedTuple):
    """Values that distinguish two numbers; `options`: the request options, encoded."""

    name: str
    program: int
    options: bytes
    policy: CallPolicy


class OptionNumbers:
    """The numbers in use of one deployment.

    groups: by encoded request options, their batch group, from 1; those that the node was opened with have group 0.
    """

    def __init__(self, deployment: int, opened: PlannedStep) -> None:
        self._deployment, self._opened = deployment, opened
        self._own = _Key(opened.name, 0, _encoded(opened), _policy(opened))
        self._first: int | None = None  # the program of number 0, where numbers belong to programs
        self._messages: dict[_Key, SetOptions] = {}
        self._steps: Counter[int] = Counter()
        self._groups: dict[bytes, int] = {self._own.options: 0}
        self._last = 0

    def join(self, step: ProgramStep, program: int) -> SetOptions | None:
        """Number the options of a step; returns the message that workers need, None if they have these options."""
        planned = step.planned
        if self._first is None:
            self._first = program
        apart = program if self._opened.streams and program != self._first else 0
        key = _Key(step.name, apart, _encoded(planned), _policy(planned))
        if key == self._own:
            return None
        mixed = self._opened.mixed_options or self._opened.streams
        step.group = 0 if mixed else self._group(key.options)
        step.sends_options = key[1:] != self._own[1:]
        known = self._messages.get(key)
        if known is None:
            self._last += 1
            options = {name: planned.options[name] for name in planned.request_options}
            message = SetOptions(self._deployment, self._last, key.name, key.program, options, key.policy)
            self._messages[key] = message
        step.options = (known or message).number
        self._steps[step.options] += 1
        return message if known is None else None

    def leave(self, step: ProgramStep) -> int:
        """Forget a step; returns the number that no step has any more, 0 for none."""
        if not step.options:
            return 0
        self._steps[step.options] -= 1
        if self._steps[step.options]:
            return 0
        del self._steps[step.options]
        self._messages = {key: one for key, one in self._messages.items() if one.number != step.options}
        used = {key.options for key in self._messages} | {self._own.options}
        self._groups = {options: group for options, group in self._groups.items() if options in used}
        return step.options

    def messages(self) -> list[SetOptions]:
        """Return what a worker needs that has opened the deployment."""
        return list(self._messages.values())

    def _group(self, options: bytes) -> int:
        return self._groups.setdefault(options, self._last + 1)


def _encoded(step: PlannedStep) -> bytes:
    return msgspec.msgpack.encode({name: step.options[name] for name in step.request_options}, order="sorted")


def _policy(step: PlannedStep) -> CallPolicy:
    return CallPolicy(**copied(CallPolicy, step))
