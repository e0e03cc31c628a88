"""OpenVINO GenAI's continuous batching inside this process, under its own Python.

    python openvino_driver.py MODEL.gguf THREADS

Works come as lines of JSON, answers go back as such. Prefix caching is on, as in the engines
that it is measured beside; a step may hold as many prompt tokens as theirs. Everything else is
what OpenVINO chooses by itself, 8-bit keys and values among it.
"""

import json
import os
import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai

CACHE_GB = 2
STEP_TOKENS = 2048
SEQUENCES = 160


def pipeline(model, threads):
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    scheduler.max_num_batched_tokens = STEP_TOKENS
    scheduler.max_num_seqs = SEQUENCES
    scheduler.enable_prefix_caching = True
    return openvino_genai.ContinuousBatchingPipeline(
        model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
    )


def config(tokens):
    asked = openvino_genai.GenerationConfig()
    asked.max_new_tokens = tokens
    asked.ignore_eos = True
    asked.do_sample = False
    return asked


class Live:
    """A request that has not ended."""

    def __init__(self, handle, answer):
        self.handle = handle
        self.answer = answer

    def read(self):
        if not self.handle.can_read():
            return
        new = sum(len(output.generated_ids) for output in self.handle.read().values())
        self.answer["stamps"].append(time.perf_counter())
        self.answer["counts"].append((self.answer["counts"] or [0])[-1] + new)


def answered(engine, work, first_id):
    waiting = sorted(range(len(work["prompts"])), key=lambda index: work["arrivals"][index])
    answers: list[dict[str, Any]] = [{"stamps": [], "counts": []} for _ in waiting]
    live: list[Live] = []
    start = time.perf_counter()
    while waiting or live:
        while waiting and start + work["arrivals"][waiting[0]] <= time.perf_counter():
            index = waiting.pop(0)
            answers[index]["began"] = time.perf_counter()
            prompt = openvino.Tensor(np.array([work["prompts"][index]], dtype=np.int64))
            handle = engine.add_request(first_id + index, prompt, config(work["tokens"][index]))
            live.append(Live(handle, answers[index]))
        if not live:
            time.sleep(max(0.0, start + work["arrivals"][waiting[0]] - time.perf_counter()))
            continue
        engine.step()
        for one in live:
            one.read()
        running = openvino_genai.GenerationStatus.RUNNING
        live = [one for one in live if one.handle.get_status() == running]
    return answers


def main(out):
    engine = pipeline(sys.argv[1], int(sys.argv[2]))
    print("{}", file=out, flush=True)
    first_id = 0
    for line in sys.stdin:
        work = json.loads(line)
        print(json.dumps({"answers": answered(engine, work, first_id)}), file=out, flush=True)
        first_id += len(work["prompts"])


if __name__ == "__main__":
    # What the engine prints is no answer.
    answers_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(answers_to)
