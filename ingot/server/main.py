"""Starting, running and stopping a server: two listeners in one event loop, over one data plane."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import uvicorn
import uvloop

from ingot.errors import IngotError, InternalError, InvalidArgument
from ingot.model_store import Archive, Store
from ingot.model_store.trust import Policy
from ingot.runtime import Repository
from ingot.runtime.pulls import Transferring, logged
from ingot.server.config import ServerConfig
from ingot.server.dataplane import DataPlane
from ingot.server.grpc.front import create_front
from ingot.server.http.fast import FastProtocol
from ingot.server.http.front import Front
from ingot.server.recorder import Recorder

log = logging.getLogger(__name__)

# What recorded requests get to be written at shutdown; a disk that hangs must not hold it up for ever.
_RECORDER_SECONDS = 10.0


class Server:
    """HTTP and gRPC over the models of a repository.

    Args:
        repository: its models are loaded by :meth:`start` once the ports are open, so that health checks see it.
        config: addresses and limits.
    """

    def __init__(self, repository: Repository, config: ServerConfig):
        self.repository = repository
        self.config = config
        self.http_port = 0
        self.grpc_port = 0
        self._plane = DataPlane(repository)

    @property
    def http_url(self) -> str:
        return f"http://{_bracketed(self.config.host)}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"grpc://{_bracketed(self.config.host)}:{self.grpc_port}"

    async def start(self) -> None:
        """Open both ports, then load every model.

        Raises:
            InvalidArgument: a port is taken, the address cannot be bound, or requests cannot be recorded where they
                are to be.
            IngotError: a model cannot be loaded; the ports are closed again.
        """
        self._plane.recorder = self._recorder()
        try:
            await self._start()
        except BaseException:
            self._close_recorder()
            raise

    async def _start(self) -> None:
        listener = _listen(self.config.host, self.config.http_port)
        self.http_port = listener.getsockname()[1]
        front = Front(self._plane, self.config.max_body_bytes, self.config.max_bodies_mb << 20)
        self._http = _Uvicorn(
            uvicorn.Config(
                front,
                http=functools.partial(FastProtocol, front),  # type: ignore[arg-type]  # any callable will do
                interface="asgi3",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=math.ceil(self.config.drain_timeout),
            )
        )
        try:
            self.grpc_port = await self._start_grpc()
        except BaseException:
            listener.close()
            raise
        self._http_task = asyncio.create_task(self._http.serve(sockets=[listener]))
        try:
            for model in self.repository:
                await asyncio.to_thread(model.load)
        except BaseException:
            await self.stop()
            raise
        await self._grpc.set_serving(True)

    async def stop(self) -> None:
        """Stop taking requests, finish those in flight, free the models."""
        self._plane.draining = True
        await self._grpc.set_serving(False)
        self._http.should_exit = True
        await asyncio.gather(self._grpc.stop(self.config.drain_timeout), self._http_task)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.repository.drain(), 1)  # what is left outlived the drain timeout
        await asyncio.to_thread(self.repository.close, 1)
        await asyncio.to_thread(self._close_recorder)

    def _recorder(self) -> Recorder | None:
        config = self.config
        if config.record is None:
            return None
        limit_bytes = config.record_limit_mb << 20
        return Recorder(config.record, config.record_share, config.record_limit, limit_bytes, self.repository.metrics)

    def _close_recorder(self) -> None:
        if self._plane.recorder is not None:
            self._plane.recorder.close(_RECORDER_SECONDS)
            self._plane.recorder = None

    async def _start_grpc(self) -> int:
        config = self.config
        if config.grpc_port:
            check_port("gRPC", config.host, config.grpc_port)  # gRPC's own library would log it to stderr
        bodies = config.max_bodies_mb << 20
        self._grpc = create_front(config.grpc_server, self._plane, config.max_body_bytes, bodies)
        try:
            return await self._grpc.start(config.host, config.grpc_port)
        except OSError as error:
            raise _taken("gRPC", config.host, config.grpc_port, error.strerror or str(error)) from error


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are handled once, for both listeners


def _listen(host: str, port: int, protocol: str = "HTTP") -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise _taken(protocol, host, port, os.strerror(error.errno) if error.errno else str(error)) from error


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host  # IPv6 literals stand in brackets before a port


def check_port(protocol: str, host: str, port: int) -> None:
    """Tell early that a port is taken.

    Raises:
        InvalidArgument: it is; the message says what to do.
    """
    _listen(host, port, protocol).close()


def _taken(protocol: str, host: str, port: int, why: str) -> InvalidArgument:
    option = f"--{protocol.lower()}-port"
    return InvalidArgument(
        f"cannot listen on {host}:{port} for {protocol}: {why}; stop what uses it, or choose another port "
        f"({option} 0 takes any free one)"
    )


def run(server: Server, started: Callable[[], None] = lambda: None) -> None:
    """Run a server in this thread until SIGTERM or Ctrl-C, then drain it. A second signal stops at once.

    Args:
        server: not started yet.
        started: called when every model is ready.

    Raises:
        IngotError: it cannot start.
    """

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_signal(number: int) -> None:
            if stop.is_set():
                os._exit(128 + number)  # at once: an engine call that hangs would hold up any gentler end
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal, number)
        starting = asyncio.create_task(server.start())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        await starting  # a model that is being loaded cannot be interrupted
        if not stop.is_set():
            started()
            await stop.wait()
        log.info("draining")
        await server.stop()
        stopping.cancel()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


class RunningServer:
    """A server in a background thread, as :func:`serve` returns it. Close it, or use it in a ``with`` block."""

    def __init__(self, server: Server):
        self._server = server
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._stop: Callable[[], None] | None = None
        self._failure: BaseException | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ingot-server", daemon=True)
        self._thread.start()
        try:
            self._started.wait()
        except BaseException:  # Ctrl-C while models load must not leave a server behind
            self.close()
            raise
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    @property
    def http_url(self) -> str:
        """Such as ``http://127.0.0.1:8000``."""
        return self._server.http_url

    @property
    def grpc_url(self) -> str:
        """Such as ``grpc://127.0.0.1:8001``."""
        return self._server.grpc_url

    @property
    def models(self) -> list[str]:
        """The names that are served."""
        return sorted({model.name for model in self._server.repository})

    def close(self) -> None:
        """Finish the requests in flight and stop. Closing twice does nothing."""
        if self._stop is not None:
            with contextlib.suppress(RuntimeError):  # its loop has ended
                self._stop()
        self._thread.join()

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        with self._runner:
            self._runner.run(self._main())

    async def _main(self) -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(stop.set)

        self._stop = wake
        try:
            await self._server.start()
        except IngotError as error:
            self._failure = error
        except Exception as error:  # noqa: BLE001 - it belongs to the thread that called serve()
            self._failure = InternalError(f"the server could not start: {error}")
            self._failure.__cause__ = error
        finally:
            self._started.set()
        if self._failure is None:
            await stop.wait()
            await self._server.stop()


def serve(*sources: str | Archive, store: Store | None = None, **settings: Any) -> RunningServer:
    """Serve models from a background thread.

    Args:
        sources: archives, references of the store (``digits:1``) or a registry (``oci://host/digits:1``), archive
            files (``./digits.ingot``) or ``.onnx`` files; ``NAME=SOURCE`` serves one under another name.
        store: where references are looked up; by default the user's.
        settings: fields of :class:`ingot.server.config.ServerConfig`, such as ``http_port=0``.

    Returns:
        The running server, when every model is ready.

    Raises:
        NotFound: a source does not exist.
        InvalidArgument: a port is taken or a setting is wrong.
        Untrusted: ``trust`` is given and asks for a signature that a source does not have.
    """
    return RunningServer(create(sources, store, ServerConfig.of(settings)))


def create(
    sources: Sequence[str | Archive], store: Store | None, config: ServerConfig, transferring: Transferring = logged
) -> Server:
    """Return a server, not started, for some sources.

    Args:
        sources: what is served; what is in a registry is pulled now.
        store: where references are looked up.
        config: the settings.
        transferring: shows how far the pull of an archive is; by default the log tells it.

    Raises:
        InvalidArgument: there are none.
        NotFound: a source does not exist.
        Untrusted: the trust policy asks for a signature that a source does not have.
    """
    if not sources:
        raise InvalidArgument("nothing to serve; name a model such as digits:1, ./digits.ingot or model.onnx")
    policy = Policy.load(config.trust) if config.trust is not None else None
    repository = Repository(store, config.runtime, policy=policy, transferring=transferring)
    for source in sources:
        repository.add(source)
    return Server(repository, config)
