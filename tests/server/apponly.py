"""A server of FastAPI's routes alone, without the connections that answer inference themselves."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import uvicorn

from ingot.runtime import Repository
from ingot.server.dataplane import DataPlane
from ingot.server.http.app import create_app
from ingot.server.http.protocol import BoundedProtocol
from ingot.server.listening import listen


@contextlib.contextmanager
def serve_app(sources: Sequence[str], max_body_bytes: int) -> Iterator[str]:
    """Serve models from a thread; yields the address."""
    repository = Repository()
    for source in sources:
        repository.add(source).load()
    listener = listen("127.0.0.1", 0)
    app = create_app(DataPlane(repository), max_body_bytes)
    settings = uvicorn.Config(app, http=BoundedProtocol, ws="none", lifespan="off", log_config=None, access_log=False)
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(120)
        repository.close()
