"""The same question with nothing but the standard library: v2's REST protocol is JSON.

weftline serve examples/tabular.yaml --http-port 8000
python examples/clients/http_json.py
"""

import json
import sys
import urllib.request


def main(url: str = "http://localhost:8000") -> None:
    body = {
        "inputs": [
            {"name": "measures", "datatype": "FP32", "shape": [4], "data": [4.7, 1.4, 6.1, 2.9]},
            {"name": "habitat", "datatype": "INT64", "shape": [], "data": [1]},
        ]
    }
    request = urllib.request.Request(f"{url}/v2/models/tabular/infer", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=10) as response:
        for output in json.load(response)["outputs"]:
            print(output["name"], output["data"])


if __name__ == "__main__":
    main(*sys.argv[1:2])
