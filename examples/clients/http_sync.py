"""One question over REST with Triton's stock client: nothing here knows Weftline.

weftline serve examples/tabular.yaml --http-port 8000
python examples/clients/http_sync.py
"""

import sys

import numpy as np
import tritonclient.http as triton


def main(url: str = "localhost:8000") -> None:
    with triton.InferenceServerClient(url) as client:
        for port in client.get_model_metadata("tabular")["inputs"]:
            print(f"wants {port['name']}: {port['datatype']} {port['shape']}")
        inputs = [triton.InferInput("measures", [4], "FP32"), triton.InferInput("habitat", [], "INT64")]
        inputs[0].set_data_from_numpy(np.array([4.7, 1.4, 6.1, 2.9], np.float32))
        inputs[1].set_data_from_numpy(np.array(1, np.int64))
        result = client.infer("tabular", inputs, request_id="flower-1")
        print("species", result.as_numpy("species"), "of", result.as_numpy("probabilities").round(2))
        figures = client.get_inference_statistics("tabular")["model_stats"][0]
        print("answered so far:", figures["inference_stats"]["success"]["count"])


if __name__ == "__main__":
    main(*sys.argv[1:2])
