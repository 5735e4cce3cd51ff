"""A tabular model behind BentoML with its defaults, for a Python that has bentoml.

TABULAR_MODEL=MODEL python -m bentoml serve bentoml_server:Tabular --working-dir benchmarks/peers --port PORT
"""

import os

import bentoml
import numpy as np
import onnxruntime


@bentoml.service
class Tabular:
    def __init__(self) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(os.environ["TABULAR_MODEL"], options)

    @bentoml.api
    def predict(self, features: list[float]) -> dict[str, list[float]]:
        (found,) = self.session.run(None, {"features": np.array([features], np.float32)})
        return {"probabilities": found[0].tolist()}
