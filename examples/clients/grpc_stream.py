"""A text that is printed while it is being made, over a stream of Triton's stock client.

    weftline serve examples/streaming_guard.yaml
    python examples/clients/grpc_stream.py

Each response carries what is new; `triton_final_response` says which is the last.
"""

import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton


def main(url: str = "localhost:8001") -> None:
    results: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: results.put(error or result))
        text = np.array([b"It rains today. Write to jane.doe@mail.example.org about it."], np.object_)
        inputs = [triton.InferInput("text", [1], "BYTES").set_data_from_numpy(text)]
        client.async_stream_infer("streaming-guard", inputs, enable_empty_final_response=True)
        while True:
            result = results.get(timeout=60)
            if isinstance(result, Exception):
                raise result
            response = result.get_response()
            if response.parameters["triton_final_response"].bool_param:
                break
            for output in response.outputs:
                if output.name == "answer":
                    print(result.as_numpy("answer")[0].decode(), end="", flush=True)
        print()
        client.stop_stream()


if __name__ == "__main__":
    main(*sys.argv[1:2])
