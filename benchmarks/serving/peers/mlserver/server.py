"""MLServer: its own process runs the model (parallel_workers 0, which is faster on one core), adaptive batching on."""

import json
import os
import sys
from pathlib import Path

from arguments import engine, parse

if __name__ == "__main__":
    options = parse()
    work = Path(options.work)
    settings = {
        "host": "127.0.0.1",
        "http_port": options.port,
        "grpc_port": options.grpc_port,
        "metrics_endpoint": None,
        "parallel_workers": 0,
        "debug": False,
    }
    served = {
        "name": options.name,
        "implementation": "server.Served",
        "max_batch_size": options.batch,
        "max_batch_time": options.delay / 1000,
    }
    (work / "settings.json").write_text(json.dumps(settings))
    (work / "model-settings.json").write_text(json.dumps(served))
    os.environ["PYTHONPATH"] += f":{Path(__file__).parent}"
    os.execv(str(Path(sys.executable).parent / "mlserver"), ["mlserver", "start", str(work)])

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse


class Served(MLModel):
    async def load(self):
        self.engine = engine()
        return True

    async def predict(self, payload):
        arrays = {tensor.name: NumpyCodec.decode_input(tensor) for tensor in payload.inputs}
        output = NumpyCodec.encode_output(self.engine.output, self.engine.run(arrays))
        return InferenceResponse(model_name=self.name, outputs=[output])
