"""KServe's SDK: no batching (its agent, a process of its own, would do that)."""

import kserve
from arguments import Engine, parse
from kserve import InferOutput, InferRequest, InferResponse


class Served(kserve.Model):
    def __init__(self, name, path):
        super().__init__(name)
        self.engine = Engine(path)
        self.ready = True

    async def predict(self, payload: InferRequest, headers=None, response_headers=None):
        rows = self.engine.run({tensor.name: tensor.as_numpy() for tensor in payload.inputs})
        output = InferOutput(self.engine.output, list(rows.shape), "FP32")
        output.set_data_from_numpy(rows, binary_data=payload.request_outputs is not None or payload.from_grpc)
        return InferResponse(payload.id, self.name, [output])


if __name__ == "__main__":
    options = parse()
    server = kserve.ModelServer(
        http_port=options.port, grpc_port=options.grpc_port, workers=1, enable_latency_logging=False
    )
    server.start([Served(options.name, options.model)])
