"""mosec: one worker process behind its Rust front, batches formed there."""

import sys

import orjson
from arguments import engine, parse
from mosec import Server, Worker


class Json(Worker):
    def __init__(self):
        self.engine = engine()

    def deserialize(self, data):
        return self.engine.of_json(orjson.loads(data))

    def serialize(self, data):
        return orjson.dumps({self.engine.output: data}, option=orjson.OPT_SERIALIZE_NUMPY)

    def forward(self, data):
        return self.engine.batch(data) if isinstance(data, list) else self.engine.batch([data])[0]


class Binary(Json):
    def deserialize(self, data):
        return self.engine.of_bytes(data)

    def serialize(self, data):
        return data.tobytes()


if __name__ == "__main__":
    options = parse()
    sys.argv[1:] = ["--address", "127.0.0.1", "--port", str(options.port), "--log-level", "warning"]
    if options.capacity:
        sys.argv += ["--capacity", str(options.capacity)]
    server = Server()
    worker = Json if options.format == "json" else Binary
    server.append_worker(worker, max_batch_size=options.batch, max_wait_time=round(options.delay))
    server.run()
