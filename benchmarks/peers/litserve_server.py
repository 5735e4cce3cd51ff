"""A tabular model behind LitServe with its defaults, for a Python that has litserve.

python benchmarks/peers/litserve_server.py MODEL PORT
"""

import sys

import litserve
import numpy as np
import onnxruntime


class Tabular(litserve.LitAPI):
    def setup(self, device):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(sys.argv[1], options)

    def decode_request(self, request):
        return np.array([request["features"]], np.float32)

    def predict(self, rows):
        return self.session.run(None, {"features": rows})[0]

    def encode_response(self, found):
        return {"probabilities": found[0].tolist()}


if __name__ == "__main__":
    server = litserve.LitServer(Tabular(), accelerator="cpu")
    server.run(host="127.0.0.1", port=int(sys.argv[2]), generate_client_file=False, log_level="error")
