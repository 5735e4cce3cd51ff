"""Run as a program: every check of the kernels in Triton's interpreter, which must be asked for before Triton loads.

Prints JSON on its last line: how wrong each check's kernel is, what is allowed, or what was raised; by its name.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from weftline.engine.llm.kernels.checks import all_checks

RANDOM_ROUNDS = 4


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, tuple[float, float, str]] = {}
    for check in all_checks(torch.device("cpu"), RANDOM_ROUNDS):
        try:
            found[check.name] = (check.error(), check.allowed, "")
        except Exception as problem:
            found[check.name] = (float("inf"), check.allowed, f"{type(problem).__name__}: {problem}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
