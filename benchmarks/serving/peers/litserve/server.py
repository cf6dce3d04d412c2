"""LitServe: one worker process, batches formed by the library."""

from typing import Annotated

import litserve
import numpy as np
from arguments import engine, parse
from fastapi import Body, Response


class Json(litserve.LitAPI):
    def setup(self, device):
        self.engine = engine()

    def decode_request(self, request):
        return self.engine.of_json(request)

    def batch(self, inputs):
        return {name: np.stack([sample[name] for sample in inputs]) for name in self.engine.inputs}

    def predict(self, x):
        return self.engine.run(x)

    def unbatch(self, output):
        return list(output)

    def encode_response(self, output):
        return {self.engine.output: output.tolist()}


class Binary(Json):
    def decode_request(self, request: Annotated[bytes, Body()]):
        return self.engine.of_bytes(request)

    def batch(self, inputs):
        return inputs

    def predict(self, x):
        return self.engine.batch(x if isinstance(x, list) else [x])

    def encode_response(self, output):
        return Response(output.tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    options = parse()
    kind = Json if options.format == "json" else Binary
    api = kind(max_batch_size=options.batch, batch_timeout=options.delay / 1000)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=options.port, generate_client_file=False, log_level="warning")
