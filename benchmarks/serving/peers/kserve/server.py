"""KServe's SDK: no batching (its agent, a separate process, would do that)."""

import logging
import sys

from arguments import Engine, parse

options = parse()
sys.argv[1:] = []  # which the SDK reads when it is imported

import kserve  # noqa: E402
from kserve import InferOutput, InferRequest, InferResponse  # noqa: E402


class Served(kserve.Model):
    def __init__(self, name, path):
        super().__init__(name)
        self.engine = Engine(path)
        self.ready = True

    async def predict(self, payload: InferRequest, headers=None, response_headers=None):
        rows = self.engine.run({tensor.name: tensor.as_numpy() for tensor in payload.inputs})
        output = InferOutput(self.engine.output, list(rows.shape), "FP32")
        binary = payload.from_grpc or bool(payload.use_binary_outputs)
        output.set_data_from_numpy(rows, binary_data=binary)
        return InferResponse(payload.id or "1", self.name, [output], use_binary_outputs=binary)


if __name__ == "__main__":
    logging.disable(logging.INFO)  # a line for each request
    server = kserve.ModelServer(
        http_port=options.port, grpc_port=options.grpc_port, workers=1, enable_latency_logging=False
    )
    server.start([Served(options.name, options.model)])
