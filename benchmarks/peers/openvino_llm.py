"""OpenVINO GenAI's continuous batching on the requests of `benchmarks.llm`, for a Python that has openvino-genai.

    optimum-cli export openvino --model examples/models/shapes-chat --task text-generation-with-past \
        --weight-format fp32 EXPORTED
    python benchmarks/peers/openvino_llm.py EXPORTED ASKS.json

ASKS.json is [[prompt token ids, tokens wanted], ...]; `benchmarks.llm --openvino` writes it and runs this. Prints one
line of JSON: seconds, seconds to each first token, and the answers. Numbers are float32, keys and values too.
"""

import json
import sys
import time

import numpy as np
import openvino as ov
import openvino_genai as genai


def main() -> None:
    folder, asks_file, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with open(asks_file, encoding="utf-8") as file:  # noqa: PTH123 - runs anywhere
        asks = json.load(file)
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1
    scheduler.max_num_batched_tokens = 512
    scheduler.max_num_seqs = len(asks)
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    exact = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    pipe = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", exact)
    answer(pipe, asks[:2])
    print(json.dumps(answer(pipe, asks)))


def answer(pipe, asks) -> dict:
    started, first = time.perf_counter(), {}
    handles, answers = [], [[] for _ in asks]
    for at, (prompt, count) in enumerate(asks):
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = count, True, False
        handles.append(pipe.add_request(at, ov.Tensor(np.array([prompt], dtype=np.int64)), config))
    while pipe.has_non_finished_requests():
        pipe.step()
        for at, handle in enumerate(handles):
            while handle.can_read():
                for output in handle.read().values():
                    answers[at] += list(output.generated_ids)
                    first.setdefault(at, time.perf_counter() - started)
    return {"seconds": time.perf_counter() - started, "first_s": list(first.values()), "answers": answers}


if __name__ == "__main__":
    main()
