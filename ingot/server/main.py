"""Runs servers: for the command line until a signal, and for a program in a background thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Unpack

import numpy as np
import uvloop

from ingot.config.configuration import Configuration
from ingot.config.keywords import ServerSettings
from ingot.errors import IngotError, InternalError, InvalidArgument
from ingot.faults import attempt_async
from ingot.model_store import Archive, Store
from ingot.model_store.blobs.folder import remove_scratch
from ingot.protocol import arguments
from ingot.report.units import written
from ingot.runtime.gpu.device_tensors import resident
from ingot.runtime.loading.downloads import Transferring, logged
from ingot.server.lifecycle import Server
from ingot.server.listeners import Ports
from ingot.serving import Repository
from ingot.serving.reconfiguration import Reconfiguration
from ingot.serving.rollout import Rollouts
from ingot.serving.takeover import Rollout
from ingot.tensors import Array
from ingot.tensors.dlpack import to_array

log = logging.getLogger(__name__)

# How long the event loop waits for the interpreter lock while a worker's thread runs Python. With Python's default of
# 5 ms, a request that arrives meanwhile is read that much later; engines compute without the lock.
_SWITCH_SECONDS = 50e-6
# Seconds for closing connections, models and the recorder, in addition to the delay and the time for draining.
_STOP_SECONDS = 15.0
# PyTorch's nn.Module by name: a server does not import torch.
_MODULE = ("torch.nn.modules.module", "Module")


class Hangups(Protocol):
    """SIGHUP before the event loop runs: ``pending`` is whether there was one, ``closed`` whether the terminal was."""

    @property
    def pending(self) -> bool: ...

    @property
    def closed(self) -> bool: ...


class _NoHangups(NamedTuple):
    pending: bool = False
    closed: bool = False


def run(
    server: Server,
    started: Callable[[], None] = lambda: None,
    hangups: Hangups = _NoHangups(),  # noqa: B008 - immutable
) -> None:
    """Run a server in this thread until SIGTERM or Ctrl-C, then drain it. A second signal stops at once.

    The process also ends if it has not drained within its limits, even if an engine call blocks the event loop. SIGHUP
    reloads the models, and stops the server if it comes from a terminal that was closed. If the parent process ignores
    it, as nohup does, it stays ignored.

    Args:
        server: not started.
        started: called when every model is ready.
        hangups: SIGHUP until now; a pending one reloads the models once they are ready.

    Raises:
        IngotError: the server cannot start.
    """

    sys.setswitchinterval(_SWITCH_SECONDS)

    async def main() -> None:
        stop, reload = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, lambda: (stop if hangups.closed else reload).set())
            if hangups.pending:
                reload.set()
        with _forced_end(server.config.ready_delay + server.config.drain_timeout + _STOP_SECONDS, hangups):
            starting = asyncio.create_task(server.start())
            stopping = asyncio.create_task(stop.wait())
            if not await _ended_first(starting, stopping):
                log.info("stopped while models were loaded")
                return
            starting.result()
            if not stop.is_set():
                started()
                tasks = [asyncio.create_task(_reload_at(reload, server)), asyncio.create_task(server.warm())]
                await stop.wait()
                for task in tasks:
                    task.cancel()
            log.info("draining")
            await server.stop()
            stopping.cancel()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def _reload_at(signalled: asyncio.Event, server: Server) -> None:
    """Reload the models whenever an event is set; a signal during a reload causes another."""
    while True:
        await signalled.wait()
        signalled.clear()
        log.info("SIGHUP: reloading")
        done = await attempt_async("the models could not be reloaded", server.rollouts.reload())
        if isinstance(done, IngotError):
            log.error("the models could not be reloaded: %s", done)


@contextlib.contextmanager
def _forced_end(limit: float, hangups: Hangups) -> Iterator[None]:
    """End the process at a second SIGINT or SIGTERM, and ``limit`` seconds after the first signal that stops it.

    Signal handlers run between Python instructions of the main thread, so an engine call in the event loop delays them.
    The wakeup file descriptor receives the number of a signal at once: a thread reads it, and passes it on to the loop.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    loop_writer = signal.set_wakeup_fd(writer)

    def watch() -> None:
        first, end = 0, math.inf
        while True:
            if not select.select([reader], [], [], None if not first else max(0.0, end - time.monotonic()))[0]:
                log.critical("the server did not stop within %s; the process ends", written(limit))
                logging.shutdown()
                remove_scratch()
                os._exit(128 + first)
            numbers = os.read(reader, 256)
            if not numbers:  # the server has stopped
                os.close(reader)
                return
            for number in numbers:
                if first and number in (signal.SIGINT, signal.SIGTERM):
                    remove_scratch()
                    os._exit(128 + number)
                stops = number in (signal.SIGINT, signal.SIGTERM) or (number == signal.SIGHUP and hangups.closed)
                if stops and not first:
                    first, end = number, time.monotonic() + limit
            os.write(loop_writer, numbers)

    threading.Thread(target=watch, name="ingot-signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(loop_writer)
        os.close(writer)


class RunningServer:
    """A server in a background thread, as :func:`serve` returns it. Close it, or use it in a ``with`` block.

    Examples:
        >>> with ingot.serve("./net.ingot", http_port=0, grpc_port=0) as server:
        ...     server.models
        ...     server.infer("net", {"x": np.ones((2, 4), np.float32)})["scores"].shape
        ['net']
        (2, 3)
    """

    def __init__(self, server: Server):
        self._server = server
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._stop: Callable[[], None] | None = None
        self._failure: BaseException | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ingot-server", daemon=True)
        self._thread.start()
        with contextlib.ExitStack() as on_interrupt:  # Ctrl-C while models load must not leave a server behind
            on_interrupt.callback(self.close)
            self._started.wait()
            on_interrupt.pop_all()
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
    def torchserve_urls(self) -> dict[str, str]:
        """The addresses of TorchServe's APIs by name, such as ``inference``; empty without ``torchserve``."""
        return {} if self._server.torchserve is None else dict(self._server.torchserve.urls)

    @property
    def models(self) -> list[str]:
        """The names that are served."""
        return sorted({model.name for model in self._server.repository})

    @property
    def rollouts(self) -> Rollouts:
        """Changes what is served; to be called in ``loop``."""
        return self._server.rollouts

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The server's event loop."""
        return self._runner.get_loop()

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        version: str | int = "",
        outputs: Sequence[str] = (),
        parameters: Mapping[str, str | float] | None = None,
    ) -> dict[str, Array]:
        """Infer in this process, without a connection; requests of clients share the batch.

        Metrics count the request with the protocol ``python``. Keys and limits of clients do not apply.

        Args:
            model: its name.
            inputs: an array for each input, with its batch dimension: numpy's, or a tensor of another library (DLPack),
                also on a GPU. They must not change until the answer is there.
            version: which version; by default the highest.
            outputs: which outputs; by default all.
            parameters: request parameters, such as ``timeout`` in microseconds.

        Raises:
            InvalidArgument: an argument has a wrong type, the inputs do not fit the model, or the server is closed.
            IngotError: what the model raises.
        """
        request = arguments.request(model, inputs, version, outputs, parameters, _tensor)
        if self._server.plane.recorder is not None:  # which reads them after the answer
            request.inputs = {name: np.array(array) for name, array in request.inputs.items()}
        answer = self._server.plane.infer(request, "python")
        try:
            future = asyncio.run_coroutine_threadsafe(answer, self.loop)
        except RuntimeError as error:
            answer.close()
            raise InvalidArgument("this server is closed; infer in its 'with' block") from error
        try:
            return {name: array for name, _, array in future.result().outputs}
        finally:
            future.cancel()  # no effect unless this thread was interrupted
            del future  # its error has this frame: a cycle would keep the inputs until it is collected

    def reload(self, name: str | None = None) -> list[Rollout]:
        """Reload the models whose source has changed; see :meth:`Rollouts.reload`.

        Args:
            name: ``name`` or ``name:version``; None for all that are loaded.

        Raises:
            NotFound: there is no such model, or it is unloaded.
        """
        return asyncio.run_coroutine_threadsafe(self.rollouts.reload(name), self.loop).result().models

    def status(self) -> list[dict[str, Any]]:
        """Return the state of each served name and version: its digest, its history, and why a change failed."""
        return self.rollouts.status()

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
        starting = asyncio.create_task(self._server.start())
        stopping = asyncio.create_task(stop.wait())
        try:
            if not await _ended_first(starting, stopping):
                return
            error = starting.exception()  # raised in the thread that called serve()
            if error is not None and not isinstance(error, IngotError):
                self._failure = InternalError(f"the server could not start: {error}")
                self._failure.__cause__ = error
            else:
                self._failure = error
        finally:
            self._started.set()
        if self._failure is None:
            await stopping
            await self._server.stop()
        stopping.cancel()


def _tensor(name: str, value: Any) -> Any:
    """Return a tensor of another library: one of a GPU where it is."""
    found = resident(name, value)
    return to_array(name, value) if found is None else found


async def _ended_first(starting: asyncio.Task[None], stopping: asyncio.Task[Any]) -> bool:
    """Wait until a server's start has ended; cancel it if the server is to stop before. Return whether it has ended."""
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        return True
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await starting
    return False


def serve(
    *sources: str | os.PathLike[str] | Archive,
    store: Store | None = None,
    config: str | os.PathLike[str] | None = None,
    **settings: Unpack[ServerSettings],
) -> RunningServer:
    """Serve models from a background thread.

    Examples:
        >>> with ingot.serve("./net.ingot", "second=./net.ingot", http_port=0, grpc_port=0, slo="1s") as server:
        ...     server.models
        ['net', 'second']

    Args:
        sources: archives, references of the store (``digits:1``) or a registry (``oci://host/digits:1``), archive
            files (``./digits.ingot``) or ``.onnx`` files; ``NAME=SOURCE`` serves one under another name. Files may be
            paths. An archive is served under the last part of its name, as version 1, in its fastest variant.
        store: where references are looked up; by default the user's.
        config: an ``ingot.toml`` with settings and further models; by default that of ``INGOT_CONFIG``, if it is set.
        settings: those of docs/reference/settings.md, such as ``http_port=0`` or ``slo="50ms"``.

    Returns:
        The running server, when every model is ready.

    Raises:
        NotFound: a source or ``config`` does not exist.
        InvalidArgument: a port is taken, a setting is wrong, or a source has a wrong type.
        Untrusted: the policy of ``trust`` requires a signature that a source does not have.
    """

    def read() -> Configuration:
        return Configuration.of(settings, config)

    return RunningServer(create(sources, store, read))


def create(
    sources: Sequence[str | os.PathLike[str] | Archive],
    store: Store | None,
    read: Callable[[], Configuration],
    transferring: Transferring = logged,
    *,
    ends_process: bool = False,
    ports: Ports | None = None,
) -> Server:
    """Return a server, not started, for some sources.

    Args:
        sources: of the models; those in a registry are pulled now.
        store: where references are looked up.
        read: returns the settings, and further models; called again at a reload.
        transferring: shows the progress of a pull; by default the log does.
        ends_process: whether the process ends if an engine call blocks it for good.
        ports: see :class:`Server`; with them, the models may come later by a reload.

    Raises:
        InvalidArgument: there are no sources, or one has a wrong type.
        NotFound: a source does not exist.
        Untrusted: the trust policy requires a signature that a source does not have.
    """
    configuration = read()
    if not sources and not configuration.models and ports is None:
        raise InvalidArgument(
            "nothing to serve; name a model such as digits:1, ./digits.ingot or model.onnx, here or as a [[model]] of "
            "the configuration file"
        )
    config = configuration.server
    known = [_source(source) for source in sources]
    policy = None
    if config.trust is not None:
        from ingot.model_store.trust.policy import Policy  # which most servers do not need

        policy = Policy.load(config.trust)
    repository = Repository(store, config.runtime, policy=policy, transferring=transferring)
    for source in known:
        repository.add(source)
    for model in configuration.models:
        with _placed(model.place):
            repository.add(model.address, model.runtime(config))
    server = Server(repository, config, ends_process=ends_process, ports=ports)
    if configuration.pipelines:
        server.rollouts.prepare_pipelines(configuration.pipelines)
    if configuration.path is not None or ports is not None:
        server.rollouts.reconfigure = Reconfiguration(server.rollouts, configuration, read).apply
    return server


@contextlib.contextmanager
def _placed(place: str) -> Iterator[None]:
    """Begin the message of an error with the place of a model in the configuration file."""
    try:
        yield
    except IngotError as error:
        error.args = (f"{place}: {error}", *error.args[1:])
        raise


def _source(source: object) -> str | Archive:
    if isinstance(source, Archive):
        return source
    if isinstance(source, str | os.PathLike) and isinstance(path := os.fspath(source), str):
        return path
    remedy = "give paths, references such as digits:1, or Archives"
    if isinstance(source, list | tuple | set):
        remedy = f"{remedy}, one by one: serve('digits:1', 'other:1')"
    elif any((base.__module__, base.__name__) == _MODULE for base in type(source).__mro__):
        remedy = "export the module first, and serve the archive: serve(ingot.export_model(module, example))"
    raise InvalidArgument(f"an object of type {type(source).__name__} cannot be served; {remedy}")
