"""The asynchronous client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import grpc
import grpc.aio
import httpx

from ingot.addresses import is_loopback
from ingot.client.access import MAX_RESPONSE_MB, Access, address
from ingot.client.bodies import IDENTITY, aread
from ingot.client.grpc import STREAM, GrpcCall, GrpcProtocol
from ingot.client.http import HttpCall, HttpProtocol
from ingot.client.retries import Retries, checked
from ingot.errors import DeadlineExceeded, IngotError, InvalidArgument
from ingot.protocol import arguments, proto_codec
from ingot.protocol import open_inference_pb2 as pb
from ingot.protocol.documents import ModelMetadata, Statistics
from ingot.protocol.requests import InferRequest
from ingot.tensors import Array

T = TypeVar("T")


class _Transport(Protocol):
    protocol: Any

    async def send(self, call: Any, timeout: float) -> Any: ...
    def stream(self, request: InferRequest, timeout: float) -> AsyncGenerator[dict[str, Array], None]: ...
    async def close(self) -> None: ...


class AsyncClient:
    """Sends requests to a server from an event loop. Use it in an ``async with`` block, or close it.

    Cancelling a task cancels its request on the server.

    Args:
        url: ``http://host:port``, ``https://host``, ``grpc://host:port`` or, with TLS, ``grpcs://host:port``.
        timeout: seconds to wait for each answer, with all retries.
        ca_file: PEM file of the certificates that sign the server's; by default the public authorities'.
        key: an API key or another bearer token, sent with each request.
        cert_file: PEM file of the client's own certificate, for a server that asks for one.
        cert_key_file: PEM file of its key.
        retries: how often a request is sent again that the server refuses for now (503, 429), or that did not reach it.
        max_response_mb: largest answer in MiB; larger ones are refused.
        connections: most connections over HTTP; more requests wait. gRPC has one connection for all.

    Examples:
        >>> async def shapes(url):
        ...     async with ingot.AsyncClient(url, retries=3) as client:
        ...         rows = [np.ones((1, 4), np.float32)] * 10
        ...         answers = await asyncio.gather(*(client.infer("net", {"x": row}) for row in rows))
        ...         return [answer["scores"].shape for answer in answers]
        >>> with ingot.serve("./net.ingot", http_port=0, grpc_port=0) as server:
        ...     len(asyncio.run(shapes(server.grpc_url)))
        10

    Raises:
        InvalidArgument: the URL or the key has another form, or a file cannot be read; of the methods: an argument has
            a wrong type, or the client is closed.
    """

    def __init__(
        self,
        url: str,
        timeout: float = 60.0,
        ca_file: str | Path | None = None,
        key: str | None = None,
        cert_file: str | Path | None = None,
        cert_key_file: str | Path | None = None,
        *,
        retries: int = 0,
        max_response_mb: int = MAX_RESPONSE_MB,
        connections: int = 100,
    ):
        scheme, place = address(url)
        access = Access(key, ca_file, cert_file, cert_key_file)
        self._retries, self._timeout = checked(retries), timeout
        limit = arguments.mebibytes("max_response_mb", max_response_mb)
        with access.reading():
            self._transport: _Transport = (
                _Grpc(scheme, place, access, limit)
                if scheme.startswith("grpc")
                else _Http(url.rstrip("/"), access, limit, connections)
            )
        self._closed = False

    async def ready(self, model: str = "") -> bool:
        """Return whether a model, or the whole server, accepts requests; False for an unknown model."""
        name = arguments.text("model", model)
        return bool(await self._ask(lambda protocol: protocol.ready(name)))

    async def metadata(self, model: str, version: str | int = "") -> ModelMetadata:
        """Return a model's metadata; see :meth:`ingot.Client.metadata`."""
        named = arguments.text("model", model), arguments.version_text(version)
        found: ModelMetadata = await self._ask(lambda protocol: protocol.metadata(*named))
        return found

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Array],
        *,
        version: str | int = "",
        outputs: Sequence[str] = (),
        parameters: Mapping[str, str | float] | None = None,
        binary: bool = True,
    ) -> dict[str, Array]:
        """Send a request and return its outputs.

        Args:
            model: its name on the server.
            inputs: an array or a tensor of another library (DLPack) for each input, batch dimension included.
            version: which version; by default the highest.
            outputs: which outputs; by default all.
            parameters: request parameters, such as ``timeout`` in microseconds: flags, numbers and text.
            binary: send raw tensors; JSON is for servers without the extension, and slower. gRPC is always raw.

        Returns:
            An array for each output, by name. Arrays are read-only views of the answer.

        Raises:
            IngotError: as :meth:`ingot.Client.infer` raises it.
        """
        request = arguments.request(model, inputs, version, outputs, parameters)
        repeatable = arguments.repeatable(request)
        found: dict[str, Array] = await self._ask(
            lambda protocol: protocol.infer(request, binary=binary), repeatable=repeatable
        )
        return found

    async def stream(
        self,
        model: str,
        inputs: Mapping[str, Array],
        *,
        version: str | int = "",
        outputs: Sequence[str] = (),
        parameters: Mapping[str, str | float] | None = None,
    ) -> AsyncGenerator[dict[str, Array], None]:
        """Yield each answer to one request; arguments and errors as for :meth:`ingot.Client.stream`.

        The server stops computing when the generator is closed, or its task is cancelled. Wrap a generator that may be
        left early in ``contextlib.aclosing``.
        """
        request = arguments.request(model, inputs, version, outputs, parameters)
        transport = self._open()
        tries = Retries(self._retries, self._timeout, repeatable=arguments.repeatable(request))
        begun = False
        while True:
            try:
                async with contextlib.aclosing(transport.stream(request, tries.left)) as answers:
                    async for answer in answers:
                        begun = True
                        yield answer
                return
            except IngotError as error:
                if begun:
                    raise
                await asyncio.sleep(tries.wait(error))

    async def statistics(self, model: str, version: str | int = "") -> list[Statistics]:
        """Return the entries of ``model_stats`` of the statistics extension, one for each version of the model.

        Raises:
            IngotError: the error that the server reports; servers need not have the extension.
        """
        named = arguments.text("model", model), arguments.version_text(version)
        found: list[Statistics] = await self._ask(lambda protocol: protocol.statistics(*named))
        return found

    async def metrics(self) -> str:
        """Return the server's metrics in Prometheus' text form; HTTP only.

        Raises:
            Unsupported: the client speaks gRPC.
        """
        return str(await self._ask(lambda protocol: protocol.metrics()))

    async def close(self) -> None:
        """Close the connections. Closing twice does nothing."""
        self._closed = True
        await self._transport.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _open(self) -> _Transport:
        if self._closed:
            raise InvalidArgument(
                "this client is closed; use it in its 'async with' block, or create another ingot.AsyncClient"
            )
        return self._transport

    async def _ask(self, made: Callable[[Any], Any], *, repeatable: bool = True) -> Any:
        transport = self._open()
        call = made(transport.protocol)
        tries = Retries(self._retries, self._timeout, repeatable=repeatable)
        while True:
            try:
                return await transport.send(call, tries.left)
            except IngotError as error:
                await asyncio.sleep(tries.wait(error))


class _Http:
    def __init__(self, url: str, access: Access, limit: int, connections: int):
        self.protocol = HttpProtocol(url, limit)
        # A proxy from the environment cannot reach this machine's loopback.
        trust_env = not is_loopback(urlsplit(url).hostname or "")
        self._client = httpx.AsyncClient(
            base_url=url,
            verify=access.context(),
            trust_env=trust_env,
            headers={**IDENTITY, **access.headers},
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        )

    async def send(self, call: HttpCall[T], timeout: float) -> T:
        try:
            async with (
                asyncio.timeout(timeout),
                self._client.stream(
                    call.method, call.path, content=call.content, headers=call.headers, timeout=None
                ) as head,
            ):
                response = await aread(head, self.protocol.url, call.limit)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self.protocol.url} did not answer in time") from error
        except httpx.HTTPError as error:
            raise self.protocol.lost(error) from error
        if response.status_code not in call.accept:
            raise self.protocol.failure(response)
        return call.read(response)

    async def stream(self, request: InferRequest, timeout: float) -> AsyncGenerator[dict[str, Array], None]:
        template = request.template
        metadata = await self.send(self.protocol.metadata(template.model, template.version), timeout)
        call, events = self.protocol.stream(request, metadata)
        try:
            async with self._client.stream(
                call.method, call.path, content=call.content, headers=call.headers, timeout=timeout
            ) as response:
                if response.status_code not in call.accept:
                    raise self.protocol.failure(await aread(response, self.protocol.url, seconds=timeout))
                async for part in response.aiter_raw():
                    for answer in events.read(part):
                        yield answer
        except httpx.HTTPError as error:
            raise self.protocol.lost(error) from error

    async def close(self) -> None:
        await self._client.aclose()


class _Grpc:
    def __init__(self, scheme: str, target: str, access: Access, limit: int):
        self.protocol = GrpcProtocol(f"{scheme}://{target}", limit)
        self._metadata = tuple(access.headers.items())
        self._target = target
        self._credentials = None if scheme == "grpc" else access.credentials()
        self._opened: grpc.aio.Channel | None = None

    @property
    def _channel(self) -> grpc.aio.Channel:
        # It belongs to the event loop, which need not run where the client is created.
        if self._opened is None:
            self._opened = (
                grpc.aio.insecure_channel(self._target, self.protocol.options)
                if self._credentials is None
                else grpc.aio.secure_channel(self._target, self._credentials, self.protocol.options)
            )
        return self._opened

    async def send(self, call: GrpcCall[T], timeout: float) -> T:
        method = self._channel.unary_unary(
            call.path,
            request_serializer=type(call.request).SerializeToString,
            response_deserializer=call.answer.FromString,
        )
        try:
            return call.read(await method(call.request, timeout=timeout, metadata=self._metadata))
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from error

    async def stream(self, request: InferRequest, timeout: float) -> AsyncGenerator[dict[str, Array], None]:
        method = self._channel.stream_stream(
            STREAM,
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )
        answers = method(iter([proto_codec.encode_request(request)]), timeout=timeout, metadata=self._metadata)
        try:
            async for message in answers:
                if (outputs := self.protocol.read_event(message)) is not None:
                    yield outputs
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from error
        finally:
            answers.cancel()

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    def _failure(self, error: grpc.aio.AioRpcError) -> IngotError:
        return self.protocol.failure(error.code(), error.details(), error.trailing_metadata())
