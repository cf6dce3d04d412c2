"""The blocking client."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import grpc
import httpx

from ingot.addresses import is_loopback
from ingot.client.access import MAX_RESPONSE_MB, Access, address
from ingot.client.bodies import IDENTITY, read
from ingot.client.grpc import STREAM, GrpcCall, GrpcProtocol
from ingot.client.http import HttpCall, HttpProtocol
from ingot.client.retries import Retries, checked
from ingot.errors import IngotError, InvalidArgument
from ingot.protocol import arguments, proto_codec
from ingot.protocol import open_inference_pb2 as pb
from ingot.protocol.documents import ModelMetadata, Statistics
from ingot.protocol.requests import InferRequest
from ingot.tensors import Array

T = TypeVar("T")


class _Transport(Protocol):
    protocol: Any

    def send(self, call: Any, timeout: float) -> Any: ...
    def stream(self, request: InferRequest, timeout: float) -> Iterator[dict[str, Array]]: ...
    def close(self) -> None: ...


class Client:
    """Sends requests to a server. Use it in a ``with`` block, or close it. Threads may share it.

    Args:
        url: ``http://host:port``, ``https://host``, ``grpc://host:port`` or, with TLS, ``grpcs://host:port``.
        timeout: seconds to wait for each answer, with all retries.
        ca_file: PEM file of the certificates that sign the server's; by default the public authorities'.
        key: an API key or another bearer token, sent with each request.
        cert_file: PEM file of the client's own certificate, for a server that asks for one.
        cert_key_file: PEM file of its key.
        retries: how often a request is sent again that the server refuses for now (503, 429), after the time that the
            server names, or that did not reach it. A step of a sequence is sent again only if it did not reach it.
        max_response_mb: largest answer in MiB; larger ones are refused.

    Waits between retries are at least 0.1, 0.2, 0.4 s and so on, each with up to a quarter more, and never exceed the
    timeout: the error is raised at once instead, and its ``retry_after`` is the server's time in seconds.

    Examples:
        >>> with ingot.serve("./net.ingot", http_port=0, grpc_port=0) as server:
        ...     with ingot.Client(server.http_url, timeout=10, retries=3) as client:
        ...         client.ready("net")
        ...         client.infer("net", {"x": np.ones((2, 4), np.float32)})["scores"].shape
        True
        (2, 3)

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
    ):
        scheme, place = address(url)
        access = Access(key, ca_file, cert_file, cert_key_file)
        self._retries, self._timeout = checked(retries), timeout
        limit = arguments.mebibytes("max_response_mb", max_response_mb)
        with access.reading():
            self._transport: _Transport = (
                _Grpc(scheme, place, access, limit)
                if scheme.startswith("grpc")
                else _Http(url.rstrip("/"), access, limit)
            )
        self._closed = False

    def ready(self, model: str = "") -> bool:
        """Return whether a model, or the whole server, accepts requests; False for an unknown model."""
        name = arguments.text("model", model)
        return bool(self._ask(lambda protocol: protocol.ready(name)))

    def metadata(self, model: str, version: str | int = "") -> ModelMetadata:
        """Return a model's name, versions, platform, inputs and outputs, in the form of the protocol.

        Ingot's servers add ``properties``: which variant of an archive is served, and why.
        """
        named = arguments.text("model", model), arguments.version_text(version)
        found: ModelMetadata = self._ask(lambda protocol: protocol.metadata(*named))
        return found

    def infer(
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
            inputs: an array for each input, in the shape of the model's metadata, batch dimension included; or a tensor
                of another library (DLPack). Datatypes are not converted: FP64 for an FP32 input is refused.
            version: which version; by default the highest.
            outputs: which outputs; by default all.
            parameters: request parameters, such as ``timeout`` in microseconds: flags, numbers of at most 64 bits and
                text.
            binary: send raw tensors; JSON is for servers without the extension, and slower. gRPC is always raw.

        Returns:
            An array for each output, by name. Arrays are read-only views of the answer.

        Raises:
            IngotError: the error that the server reports, by its class.
            Unreached: no connection could be made, so nothing was sent.
            TooLarge: the answer exceeds ``max_response_mb``.
            Unsupported: the answer is compressed.
        """
        request = arguments.request(model, inputs, version, outputs, parameters)
        repeatable = arguments.repeatable(request)
        found: dict[str, Array] = self._ask(
            lambda protocol: protocol.infer(request, binary=binary), repeatable=repeatable
        )
        return found

    def stream(
        self,
        model: str,
        inputs: Mapping[str, Array],
        *,
        version: str | int = "",
        outputs: Sequence[str] = (),
        parameters: Mapping[str, str | float] | None = None,
    ) -> Iterator[dict[str, Array]]:
        """Yield each answer to one request, for models that answer several times; arguments as for :meth:`infer`.

        The server stops computing when the iterator is closed. Over HTTP, an output has its shape if the metadata
        leaves at most one dimension open, and is flat otherwise.

        Raises:
            IngotError: the error that the server reports, or Unavailable if it cannot be reached.
        """
        request = arguments.request(model, inputs, version, outputs, parameters)
        transport = self._open()
        return self._answers(transport, request)

    def _answers(self, transport: _Transport, request: InferRequest) -> Iterator[dict[str, Array]]:
        tries = Retries(self._retries, self._timeout, repeatable=arguments.repeatable(request))
        begun = False
        while True:
            try:
                for answer in transport.stream(request, tries.left if not begun else self._timeout):
                    begun = True
                    yield answer
                return
            except IngotError as error:
                if begun:
                    raise
                time.sleep(tries.wait(error))

    def statistics(self, model: str, version: str | int = "") -> list[Statistics]:
        """Return the entries of ``model_stats`` of the statistics extension, one for each version of the model.

        Raises:
            IngotError: the error that the server reports; servers need not have the extension.
        """
        named = arguments.text("model", model), arguments.version_text(version)
        found: list[Statistics] = self._ask(lambda protocol: protocol.statistics(*named))
        return found

    def metrics(self) -> str:
        """Return the server's metrics in Prometheus' text form; HTTP only.

        Raises:
            Unsupported: the client speaks gRPC.
        """
        return str(self._ask(lambda protocol: protocol.metrics()))

    def close(self) -> None:
        """Close the connection. Closing twice does nothing."""
        self._closed = True
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> _Transport:
        if self._closed:
            raise InvalidArgument("this client is closed; use it in its 'with' block, or create another ingot.Client")
        return self._transport

    def _ask(self, made: Callable[[Any], Any], *, repeatable: bool = True) -> Any:
        transport = self._open()
        call = made(transport.protocol)
        tries = Retries(self._retries, self._timeout, repeatable=repeatable)
        while True:
            try:
                return transport.send(call, tries.left)
            except IngotError as error:
                time.sleep(tries.wait(error))


class _Http:
    def __init__(self, url: str, access: Access, limit: int):
        self.protocol = HttpProtocol(url, limit)
        # A proxy from the environment cannot reach this machine's loopback.
        trust_env = not is_loopback(urlsplit(url).hostname or "")
        headers = {**IDENTITY, **access.headers}
        self._client = httpx.Client(base_url=url, verify=access.context(), trust_env=trust_env, headers=headers)

    def send(self, call: HttpCall[T], timeout: float) -> T:
        try:
            with self._client.stream(
                call.method, call.path, content=call.content, headers=call.headers, timeout=timeout
            ) as head:
                response = read(head, self.protocol.url, call.limit, timeout)
        except httpx.HTTPError as error:
            raise self.protocol.lost(error) from error
        if response.status_code not in call.accept:
            raise self.protocol.failure(response)
        return call.read(response)

    def stream(self, request: InferRequest, timeout: float) -> Iterator[dict[str, Array]]:
        template = request.template
        metadata = self.send(self.protocol.metadata(template.model, template.version), timeout)
        call, events = self.protocol.stream(request, metadata)
        try:
            with self._client.stream(
                call.method, call.path, content=call.content, headers=call.headers, timeout=timeout
            ) as response:
                if response.status_code not in call.accept:
                    raise self.protocol.failure(read(response, self.protocol.url, seconds=timeout))
                for part in response.iter_raw():
                    yield from events.read(part)
        except httpx.HTTPError as error:
            raise self.protocol.lost(error) from error

    def close(self) -> None:
        self._client.close()


class _Grpc:
    def __init__(self, scheme: str, target: str, access: Access, limit: int):
        self.protocol = GrpcProtocol(f"{scheme}://{target}", limit)
        self._metadata = tuple(access.headers.items())
        if scheme == "grpc":
            self._channel = grpc.insecure_channel(target, self.protocol.options)
        else:
            self._channel = grpc.secure_channel(target, access.credentials(), self.protocol.options)

    def send(self, call: GrpcCall[T], timeout: float) -> T:
        method = self._channel.unary_unary(
            call.path,
            request_serializer=type(call.request).SerializeToString,
            response_deserializer=call.answer.FromString,
        )
        try:
            return call.read(method(call.request, timeout=timeout, metadata=self._metadata))
        except grpc.RpcError as error:
            raise self._failure(error) from error

    def stream(self, request: InferRequest, timeout: float) -> Iterator[dict[str, Array]]:
        method = self._channel.stream_stream(
            STREAM,
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )
        answers = method(iter([proto_codec.encode_request(request)]), timeout=timeout, metadata=self._metadata)
        try:
            for message in answers:
                if (outputs := self.protocol.read_event(message)) is not None:
                    yield outputs
        except grpc.RpcError as error:
            raise self._failure(error) from error
        finally:
            answers.cancel()

    def close(self) -> None:
        self._channel.close()

    def _failure(self, error: Any) -> IngotError:
        return self.protocol.failure(error.code(), error.details(), error.trailing_metadata())
