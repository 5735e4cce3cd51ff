"""A tabular model behind a FastAPI app as people write it by hand, without batching, for a Python that has FastAPI.

python benchmarks/peers/fastapi_server.py MODEL PORT
"""

import sys

import numpy as np
import onnxruntime
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(sys.argv[1], options)
app = FastAPI()


class Row(BaseModel):
    features: list[float]


@app.post("/predict")
async def predict(row: Row) -> dict[str, list[float]]:
    (found,) = session.run(None, {"features": np.array([row.features], np.float32)})
    return {"probabilities": found[0].tolist()}


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="error")
