"""BentoML: one worker, its adaptive batching."""

import os
import sys
from pathlib import Path

from arguments import engine, parse

if __name__ == "__main__":
    options = parse()
    os.environ |= {"BENCHMARK_BATCH": str(options.batch), "BENTOML_DO_NOT_TRACK": "True", "BENTOML_HOME": options.work}
    folder = str(Path(__file__).absolute().parent)
    os.chdir(folder)
    command = ["serve", "server:Served", "--host", "127.0.0.1", "--port", str(options.port), "--working-dir", folder]
    os.execv(sys.executable, [sys.executable, "-m", "bentoml", *command, "--quiet"])

import bentoml
import numpy as np


@bentoml.service(workers=1, traffic={"timeout": 60}, metrics={"enabled": False}, logging={"access": {"enabled": False}})
class Served:
    def __init__(self):
        self.engine = engine()

    @bentoml.api(batchable=True, max_batch_size=int(os.environ["BENCHMARK_BATCH"]), max_latency_ms=1000)
    def predict(self, x: np.ndarray) -> np.ndarray:
        return self.engine.run({"x": x.astype(np.float32)})
