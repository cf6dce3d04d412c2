"""The same weights in OpenVINO GenAI, in its own environment: its packages need other versions than these.

``python -m benchmarks.generation`` runs this file with that environment's Python. It reads requests as JSON and writes
the seconds of the clock and of CPU time.
"""

import json
import sys
import time

import numpy as np
import openvino
import openvino_genai


def main() -> None:
    """Answer all requests by continuous batching, at most as many at a time as there are clients."""
    asked = json.load(sys.stdin)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs, scheduler.enable_prefix_caching = asked["clients"], False
    scheduler.cache_size = 1  # GB, enough for all requests at a time
    precisions = dict.fromkeys(("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION"), "f32")
    properties = {"INFERENCE_NUM_THREADS": asked["threads"], **precisions}
    pipeline = openvino_genai.ContinuousBatchingPipeline(asked["folder"], scheduler, "CPU", properties)
    prompts = [openvino.Tensor(np.array([prompt])) for prompt in asked["prompts"]]
    configs = [_config(tokens) for tokens in asked["tokens"]]
    pipeline.generate(prompts[:1], [_config(4)])
    began, spent = time.perf_counter(), time.process_time()
    found = pipeline.generate(prompts, configs)
    seconds, cpu = time.perf_counter() - began, time.process_time() - spent
    lengths = [len(answer.m_generation_ids[0]) for answer in found]
    if lengths != asked["tokens"]:
        raise SystemExit(f"answers have {lengths} tokens instead of {asked['tokens']}")
    json.dump({"clock": seconds, "cpu": cpu}, sys.stdout)


def _config(tokens: int) -> openvino_genai.GenerationConfig:
    return openvino_genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)


if __name__ == "__main__":
    main()
