"""The life cycle of a server: open the ports, load the models, serve, drain, free the models."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING

from ingot._build import BUILD
from ingot._version import __version__
from ingot.config import ServerConfig
from ingot.config.exposure import OFF, listed
from ingot.runtime.engines.ort import ort_arena
from ingot.runtime.machine import memory
from ingot.runtime.watchdog import Watchdog
from ingot.server.access.audit import check_writable
from ingot.server.access.auth_file import AuthFile
from ingot.server.listeners import Listeners, Ports
from ingot.server.management.listener import Management
from ingot.server.net.listening import bracketed
from ingot.server.net.tls import Tls
from ingot.server.observation import records
from ingot.server.plane.dataplane import DataPlane
from ingot.server.plane.recorder import Recorder
from ingot.server.triton.logs import LogSettings
from ingot.server.triton.shared_memory import SharedMemory
from ingot.serving import Repository
from ingot.serving.rollout import Rollouts

if TYPE_CHECKING:
    from ingot.server.torchserve.listeners import TorchServe

# Time to write recorded requests at shutdown; a disk that hangs must not block it forever.
_RECORDER_SECONDS = 10.0


class Server:
    """HTTP and gRPC over the models of a repository, which ``rollouts`` changes while they are served.

    Args:
        repository: its models are loaded by :meth:`start` once the ports are open, so that health checks see them load.
        config: addresses and limits.
        ends_process: whether the process ends if an engine call blocks it for good.
        ports: of another system, which calls ``plane`` for each request; by default both ports of ``config``.

    Raises:
        NotFound: there is no file of --auth.
        InvalidArgument: that file, the certificate or its key, or the audit log cannot be used.
    """

    def __init__(
        self, repository: Repository, config: ServerConfig, *, ends_process: bool = False, ports: Ports | None = None
    ):
        self.repository = repository
        self.config = config
        repository.metrics.server_info.labels(__version__, BUILD, config.replica_name).set(1)
        records.count_lost(repository.metrics.log_records_lost.inc)
        self._tls = Tls.load(config.tls_cert, config.tls_key, config.tls_client_ca)
        # Before models are loaded; the listeners open these again.
        if config.auth is not None:
            AuthFile.load(config.auth)
        if config.audit_log is not None:
            os.close(check_writable(config.audit_log))
        self._memory: SharedMemory | None = None
        if config.shared_memory is not None:
            self._memory = SharedMemory(listed(config.shared_memory), config.max_body_bytes)
            repository.metrics.shared_regions.set_function(self._memory.__len__)
        self.plane = DataPlane(repository, self._memory, LogSettings(changeable=config.log_control))
        self._watchdog = Watchdog(repository.held, config.engine_timeout, repository.metrics, ends_process=ends_process)
        self._ports: Ports = ports or Listeners(self.plane, config, self._tls)
        self.rollouts = Rollouts(repository, config, self.plane.forget)
        managed = config.management != OFF
        self.management = Management(self.plane, self.rollouts, config, self._tls) if managed else None
        self.torchserve: TorchServe | None = None
        if config.torchserve:
            from ingot.server.torchserve.listeners import TorchServe  # which most servers do not need

            self.torchserve = TorchServe(self.plane, self.rollouts, config, self._tls)

    @property
    def http_url(self) -> str:
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://{bracketed(self.config.host)}:{self._ports.http_port}"

    @property
    def grpc_url(self) -> str:
        scheme = "grpc" if self._tls is None else "grpcs"
        return f"{scheme}://{bracketed(self.config.host)}:{self._ports.grpc_port}"

    async def start(self) -> None:
        """Open both ports, then load every model.

        Raises:
            InvalidArgument: a port is taken, the address cannot be bound, or the folder for recorded requests cannot be
                used.
            DeadlineExceeded: a model takes longer than ``load_timeout``.
            IngotError: a model cannot be loaded; the ports are closed again.
        """
        self.repository.metrics.started.set_to_current_time()
        self.repository.calls.loop = asyncio.get_running_loop()
        self.plane.recorder = self._recorder()
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._close_recorder)
            await self._ports.start()
            on_error.pop_all()
        self._watchdog.start()
        ort_arena.share(memory.engine_limit())
        async with contextlib.AsyncExitStack() as on_late_error:
            on_late_error.push_async_callback(self._stop)
            if self.management is not None:
                await self.management.start(self._ports.http_port, self._ports.audit)
            if self.torchserve is not None and isinstance(self._ports, Listeners):
                await self.torchserve.start(self._ports)
            await self.rollouts.start()
            await self._ports.set_serving(True)
            on_late_error.pop_all()

    async def warm(self) -> None:
        """Prepare what the first requests other than inference would wait for, once the server has started."""
        if isinstance(self._ports, Listeners):
            await self._ports.warm()

    async def stop(self) -> None:
        """Refuse new requests, finish those in flight, free the models."""
        self.plane.draining = True
        self.rollouts.stop()
        await self._ports.set_serving(False)
        # A load balancer polls readiness, and sends requests here until its next poll.
        await asyncio.sleep(self.config.ready_delay)
        await self._stop()

    async def _stop(self) -> None:
        self.plane.draining = True
        self.rollouts.stop()
        opened = (self.torchserve, self.management, self._ports)
        stopping = [each.stop(self.config.drain_timeout) for each in opened if each is not None]
        await asyncio.gather(*stopping)
        self.rollouts.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.repository.drain(), 1)  # requests that outlived the drain timeout
        await asyncio.to_thread(self.repository.close, 1)
        self._watchdog.stop()
        self.plane.logs.close()
        if self._memory is not None:
            self._memory.close()
        await asyncio.to_thread(self._close_recorder)

    def _recorder(self) -> Recorder | None:
        config = self.config
        if config.record is None:
            return None
        limit_bytes = config.record_limit_mb << 20
        return Recorder(config.record, config.record_share, config.record_limit, limit_bytes, self.repository.metrics)

    def _close_recorder(self) -> None:
        if self.plane.recorder is not None:
            self.plane.recorder.close(_RECORDER_SECONDS)
            self.plane.recorder = None
