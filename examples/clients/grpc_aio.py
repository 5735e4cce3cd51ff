"""A hundred questions at a time over one gRPC connection, with Triton's stock asyncio client; they share batches.

weftline serve examples/tabular.yaml
python examples/clients/grpc_aio.py
"""

import asyncio
import sys
from typing import Any

import numpy as np
import tritonclient.grpc.aio as triton


async def ask(client: Any, measures: np.ndarray, place: int) -> int:
    habitat = np.array(place % 2, np.int64)
    inputs = [
        triton.InferInput("measures", measures.shape, "FP32").set_data_from_numpy(measures),
        triton.InferInput("habitat", habitat.shape, "INT64").set_data_from_numpy(habitat),
    ]
    result = await client.infer("tabular", inputs, request_id=f"flower-{place}")
    return int(result.as_numpy("species"))


async def main(url: str = "localhost:8001") -> None:
    flowers = np.random.default_rng(1).uniform(0.5, 7, (100, 4)).astype(np.float32)
    async with triton.InferenceServerClient(url) as client:
        species = await asyncio.gather(*(ask(client, one, place) for place, one in enumerate(flowers)))
        for kind, count in zip(*np.unique(species, return_counts=True), strict=True):
            print(f"species {kind}: {count} flowers")
        everything = (await client.get_inference_statistics()).model_stats  # of all models, with their steps
        steps = next(one for one in everything if one.name.startswith("tabular."))
        print(f"{steps.inference_count} answers took {steps.execution_count} calls of {steps.name}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2]))
