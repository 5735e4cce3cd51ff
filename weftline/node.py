'''Write a node of your own: every name that a node class needs.

A node is a class in a file. The pipeline names it as `file.py:Class`. This one converts text to upper case:

    from weftline.node import BatchNode, Ports, port


    class Shout(BatchNode):
        """Converts text to upper case."""

        @classmethod
        def ports(cls, config, step):
            return Ports(inputs=(port("text", "text"),), outputs=(port("text", "text"),))

        def run(self, batch):
            return {"text": [text.upper() for text in batch["text"]]}

A node that works on a GPU lists the ports whose tensors stay there (`device_ports`). The same class runs on the CPU:

    from weftline.node import BatchNode, Ports, as_torch, port


    class Mirror(BatchNode):
        """Mirrors images left to right."""

        @classmethod
        def ports(cls, config, step):
            return Ports(inputs=(port("image", "image"),), outputs=(port("image", "image"),))

        @classmethod
        def device_ports(cls, config, ports):
            return frozenset({"image"})

        def open(self, context):
            import torch  # loaded here, so that the first request does not wait for it

            self.device = torch.device(context.framework_device)

        def run(self, batch):
            images = [as_torch(image, device=self.device) for image in batch["image"]]
            return {"image": [image.flip(1) for image in images]}

The engine orders torch's current stream after the writers of the inputs and before the readers of the outputs, so that
`run` does not need to synchronise the device.

Importing this module imports no framework. docs/guides/nodes.md is the guide; examples/own_nodes/ has a pipeline to
copy.
'''

from __future__ import annotations

from weftline.errors import MissingPackage, ModelError, StepError
from weftline.fields import LOAD, REQUEST, RESOURCE
from weftline.nodes.contract import (
    Batch,
    BatchNode,
    ConfigError,
    DeviceMemoryLimit,
    NoConfig,
    Node,
    NodeMemory,
    OpenContext,
    Outputs,
    Piece,
    StepContext,
    StreamNode,
)
from weftline.nodes.current import current
from weftline.nodes.detections import Detections
from weftline.nodes.device_tensors import as_array, as_torch, placed, stacked_torch
from weftline.nodes.ports import AUDIO_HZ, Port, Ports, PortType, list_of, port
from weftline.nodes.urgency import USUAL, SequencePart, Urgency
from weftline.shm.device.tensor import DeviceTensor

__all__ = [
    "AUDIO_HZ",
    "LOAD",
    "REQUEST",
    "RESOURCE",
    "USUAL",
    "Batch",
    "BatchNode",
    "ConfigError",
    "Detections",
    "DeviceMemoryLimit",
    "DeviceTensor",
    "MissingPackage",
    "ModelError",
    "NoConfig",
    "Node",
    "NodeMemory",
    "OpenContext",
    "Outputs",
    "Piece",
    "Port",
    "PortType",
    "Ports",
    "SequencePart",
    "StepContext",
    "StepError",
    "StreamNode",
    "Urgency",
    "as_array",
    "as_torch",
    "current",
    "list_of",
    "placed",
    "port",
    "stacked_torch",
]
