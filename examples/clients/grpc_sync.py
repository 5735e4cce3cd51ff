"""One question over gRPC with Triton's stock client: nothing here knows Weftline.

weftline serve examples/tabular.yaml
python examples/clients/grpc_sync.py
"""

import sys

import numpy as np
import tritonclient.grpc as triton


def main(url: str = "localhost:8001") -> None:
    with triton.InferenceServerClient(url) as client:
        for port in client.get_model_metadata("tabular").inputs:
            print(f"wants {port.name}: {port.datatype} {list(port.shape)}")
        measures = np.array([4.7, 1.4, 6.1, 2.9], np.float32)
        habitat = np.array(1, np.int64)
        inputs = [
            triton.InferInput("measures", measures.shape, "FP32").set_data_from_numpy(measures),
            triton.InferInput("habitat", habitat.shape, "INT64").set_data_from_numpy(habitat),
        ]
        result = client.infer("tabular", inputs, request_id="flower-1", client_timeout=10)
        print("species", result.as_numpy("species"), "of", result.as_numpy("probabilities").round(2))
        figures = client.get_inference_statistics("tabular").model_stats[0]
        print("answered so far:", figures.inference_stats.success.count)


if __name__ == "__main__":
    main(*sys.argv[1:2])
