"""Open Inference Protocol v2, independent of the transport.

The gRPC server, the REST server and the clients share this package.
A request has four representations on its way from the network to the scheduler:

    bytes          as received; large tensors stay views of them
    InferRequest   v2 tensors, from protobuf (`protobuf.py`) or JSON
    Ask            port values and options (`request.py`)
    Request        the scheduler's, with inputs in an arena

A response takes the same way back: Answer, InferResponse (`response.py`), bytes.
"""
