"""LitServe: one worker process, batches formed by the library."""

import litserve
import numpy as np
from arguments import Engine, parse


class Api(litserve.LitAPI):
    def setup(self, device):
        self.engine = Engine()

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


if __name__ == "__main__":
    options = parse()
    api = Api(max_batch_size=options.batch, batch_timeout=options.delay / 1000)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=options.port, generate_client_file=False, log_level="warning")
