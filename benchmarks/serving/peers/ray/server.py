"""Ray Serve: one replica, ``serve.batch``."""

import signal

import orjson
import ray
from arguments import Engine, parse
from ray import serve
from starlette.responses import JSONResponse, Response

options = parse()


@serve.deployment(num_replicas=1, max_ongoing_requests=256)
class Served:
    def __init__(self, path):
        self.engine = Engine(path)

    @serve.batch(max_batch_size=options.batch, batch_wait_timeout_s=options.delay / 1000)
    async def predict(self, samples):
        return list(self.engine.batch(samples))

    async def __call__(self, request):
        body = await request.body()
        if request.url.path == "/json":
            row = await self.predict(self.engine.of_json(orjson.loads(body)))
            return JSONResponse({self.engine.output: row.tolist()})
        row = await self.predict(self.engine.of_bytes(body))
        return Response(row.tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    # A short folder: sockets lie in it, and their paths are bounded.
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    serve.start(http_options={"host": "127.0.0.1", "port": options.port}, logging_config={"enable_access_log": False})
    serve.run(Served.bind(options.model), route_prefix="/")
    signal.pause()
