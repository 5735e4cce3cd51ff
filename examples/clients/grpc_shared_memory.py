"""Tensors through system shared memory, with Triton's stock client: messages carry names and ranges only.

    weftline serve examples/tabular.yaml --shared-memory
    python examples/clients/grpc_shared_memory.py

Worth it for large tensors, on one machine, with the server running as the same user.
"""

import os
import sys

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import shared_memory as shm

FLOWERS = 50


def main(url: str = "localhost:8001") -> None:
    measures = np.random.default_rng(1).uniform(0.5, 7, (FLOWERS, 4)).astype(np.float32)
    habitat = np.arange(FLOWERS, dtype=np.int64) % 2
    size = measures.nbytes + habitat.nbytes
    answer_size = FLOWERS * 3 * 4
    keys = [f"/weftline_example_{os.getpid()}_{end}" for end in ("in", "out")]
    given = shm.create_shared_memory_region("given", keys[0], size)
    answer = shm.create_shared_memory_region("answer", keys[1], answer_size)
    try:
        shm.set_shared_memory_region(given, [measures, habitat])
        with triton.InferenceServerClient(url) as client:
            client.register_system_shared_memory("given", keys[0], size)
            client.register_system_shared_memory("answer", keys[1], answer_size)
            inputs = [
                triton.InferInput("measures", measures.shape, "FP32"),
                triton.InferInput("habitat", habitat.shape, "INT64"),
            ]
            inputs[0].set_shared_memory("given", measures.nbytes)
            inputs[1].set_shared_memory("given", habitat.nbytes, measures.nbytes)
            wanted = triton.InferRequestedOutput("probabilities")
            wanted.set_shared_memory("answer", answer_size)
            result = client.infer("tabular", inputs, outputs=[wanted])
            shape = list(result.get_output("probabilities").shape)
            probabilities = shm.get_contents_as_numpy(answer, np.float32, shape)
            print(f"{FLOWERS} flowers at once; the first is", probabilities[0].round(2))
            client.unregister_system_shared_memory("given")
            client.unregister_system_shared_memory("answer")
    finally:
        shm.destroy_shared_memory_region(given)
        shm.destroy_shared_memory_region(answer)


if __name__ == "__main__":
    main(*sys.argv[1:2])
