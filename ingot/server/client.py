"""A client for any Open Inference Protocol server, over HTTP or gRPC, with one interface."""

from __future__ import annotations

import contextlib
import re
import ssl
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

import grpc
import httpx
import orjson

from ingot import errors
from ingot.errors import InvalidArgument, Unavailable
from ingot.server import arguments
from ingot.server.access.exposure import is_loopback
from ingot.server.grpc import codec as grpc_codec
from ingot.server.grpc import open_inference_pb2 as pb
from ingot.server.http import codec as http_codec
from ingot.server.requests import InferRequest
from ingot.tensors import Array

_BY_STATUS = {status: errors.CLASSES[code] for code, status in http_codec.STATUS.items()}
_BY_STATUS[http_codec.TOO_SLOW] = errors.DeadlineExceeded
_PUSHBACK = "grpc-retry-pushback-ms"  # with RESOURCE_EXHAUSTED: the client may retry
_BY_GRPC_STATUS = {status: errors.CLASSES[code] for code, status in grpc_codec.STATUS.items()}


class _Transport(Protocol):
    def ready(self, model: str) -> bool: ...
    def metadata(self, model: str, version: str) -> dict[str, Any]: ...
    def infer(self, request: InferRequest, binary: bool) -> dict[str, Array]: ...
    def metrics(self) -> str: ...
    def close(self) -> None: ...


class Client:
    """Sends requests to a server. Use it in a ``with`` block, or close it.

    Args:
        url: ``http://host:port``, ``https://host``, ``grpc://host:port`` or, with TLS, ``grpcs://host:port``.
        timeout: seconds to wait for each answer.
        ca_file: PEM file of the certificates that sign the server's; by default the public authorities'.
        key: an API key or another bearer token, sent with each request.
        cert_file: PEM file of the client's own certificate, for a server that asks for one.
        cert_key_file: PEM file of its key.

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
    ):
        scheme, place = _address(url)
        access = _Access(key, ca_file, cert_file, cert_key_file)
        try:
            self._transport: _Transport = (
                _Grpc(scheme, place, timeout, access)
                if scheme.startswith("grpc")
                else _Http(url.rstrip("/"), timeout, access)
            )
        except (OSError, ssl.SSLError) as error:
            files = " or ".join(str(file) for file in (ca_file, cert_file, cert_key_file) if file is not None)
            raise InvalidArgument(f"{files} cannot be used as a file of certificates: {error}") from error
        self._closed = False

    def ready(self, model: str = "") -> bool:
        """Return whether a model, or the whole server, accepts requests; False for an unknown model."""
        return self._open().ready(arguments.text("model", model))

    def metadata(self, model: str, version: str | int = "") -> dict[str, Any]:
        """Return a model's name, versions, platform, inputs and outputs, in the form of the protocol.

        Ingot's servers add ``properties``: which variant of an archive is served, and why.
        """
        return self._open().metadata(arguments.text("model", model), arguments.version_text(version))

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
        """Infer.

        Args:
            model: its name on the server.
            inputs: an array for each input, with its batch dimension.
            version: which version; by default the highest.
            outputs: which outputs; by default all.
            parameters: request parameters, such as ``timeout`` in microseconds: flags, numbers of at most 64 bits and
                text.
            binary: send raw tensors; JSON is for servers without the extension, and slower. gRPC is always raw.

        Raises:
            IngotError: the error that the server reports, or Unavailable if it cannot be reached.
        """
        return self._open().infer(arguments.request(model, inputs, version, outputs, parameters), binary)

    def metrics(self) -> str:
        """Return the server's metrics in Prometheus' text form; HTTP only.

        Raises:
            Unsupported: the client speaks gRPC.
        """
        return self._open().metrics()

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


def _address(url: str) -> tuple[str, str]:
    """Return a URL's scheme, and its host with the port.

    Raises:
        InvalidArgument: it is not a server's address.
    """
    forms = "write http://host:port or grpc://host:port"
    try:
        parts = urlsplit(arguments.text("url", url))
        port = parts.port
    except ValueError as error:  # of urlsplit's
        raise InvalidArgument(f"'{url}' is not a server's address: {error}; {forms}") from error
    if parts.scheme not in ("http", "https", "grpc", "grpcs") or not parts.hostname:
        raise InvalidArgument(f"'{url}' is not a server's address; {forms}")
    if port is None and parts.scheme.startswith("grpc"):
        raise InvalidArgument(
            f"'{url}' names no port; write {parts.scheme}://host:port, such as {parts.scheme}://{parts.netloc}:8001"
        )
    return parts.scheme, parts.netloc


def _bearer(key: str) -> str:
    """Return a key that a header can carry.

    Raises:
        InvalidArgument: it has another form; the message does not contain it.
    """
    key = key.strip() if isinstance(key, str) else ""
    if not key.isascii() or not key.isprintable() or not key or " " in key:
        raise InvalidArgument("the key is not a text of printable ASCII characters without blanks")
    return key


class _Access:
    """What a client proves its identity with, and the server's with."""

    def __init__(
        self, key: str | None, ca_file: str | Path | None, cert: str | Path | None, cert_key: str | Path | None
    ):
        if (cert is None) != (cert_key is None):
            raise InvalidArgument("give both files of the client's certificate: cert_file and cert_key_file")
        self.headers = {} if key is None else {"authorization": f"Bearer {_bearer(key)}"}
        self._ca_file = ca_file
        self._pair = None if cert is None or cert_key is None else (cert, cert_key)

    def context(self) -> ssl.SSLContext | bool:
        """Return what httpx verifies the server by."""
        if self._ca_file is None and self._pair is None:
            return True
        context = ssl.create_default_context(cafile=self._ca_file)
        if self._pair is not None:
            context.load_cert_chain(*self._pair)
        return context

    def credentials(self) -> grpc.ChannelCredentials:
        """Return the same for gRPC."""
        roots = None if self._ca_file is None else Path(self._ca_file).read_bytes()
        cert, key = (None, None) if self._pair is None else (Path(file).read_bytes() for file in self._pair)
        return grpc.ssl_channel_credentials(roots, key, cert)


class _Http:
    def __init__(self, url: str, timeout: float, access: _Access):
        # A proxy from the environment cannot reach this machine's loopback.
        trust_env = not is_loopback(urlsplit(url).hostname or "")
        self._client = httpx.Client(
            base_url=url, timeout=timeout, verify=access.context(), trust_env=trust_env, headers=access.headers
        )

    def ready(self, model: str) -> bool:
        if model:  # gRPC responds in the same way for a model that is not ready and one that does not exist
            return self._send("GET", f"{_path(model, '')}/ready", accept=(200, 404, 503)).status_code == 200
        return self._send("GET", "/v2/health/ready", accept=(200, 503)).status_code == 200

    def metadata(self, model: str, version: str) -> dict[str, Any]:
        answer = self._send("GET", _path(model, version))
        with _parsing(str(self._client.base_url)):
            metadata: dict[str, Any] = orjson.loads(answer.content)
            return metadata

    def infer(self, request: InferRequest, binary: bool) -> dict[str, Array]:
        body, length = http_codec.encode_request(request, binary=binary)
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if length is not None:
            headers = {**headers, "Content-Type": "application/octet-stream", http_codec.HEADER_LENGTH: str(length)}
        answer = self._send("POST", f"{_path(request.template.model, request.template.version)}/infer", body, headers)
        header_length = answer.headers.get(http_codec.HEADER_LENGTH)
        with _parsing(str(self._client.base_url)):
            return http_codec.decode_response(answer.content, int(header_length) if header_length else None)

    def metrics(self) -> str:
        return self._send("GET", "/metrics").text

    def close(self) -> None:
        self._client.close()

    def _send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        accept: Sequence[int] = (200,),
    ) -> httpx.Response:
        try:
            answer = self._client.request(method, path, content=body, headers=headers)
        except httpx.TimeoutException as error:
            raise errors.DeadlineExceeded(f"{self._client.base_url} did not answer in time") from error
        except httpx.HTTPError as error:
            raise _unreachable(str(self._client.base_url), str(error)) from error
        if answer.status_code in accept:
            return answer
        kind = _BY_STATUS.get(answer.status_code, errors.InternalError)
        text = f"the server answered {answer.status_code}: {_error_text(answer)}"
        base = str(self._client.base_url).rstrip("/")
        if answer.status_code == 400 and "speaks gRPC" in text:
            raise InvalidArgument(f"{base} is a server's gRPC port; write {base.replace('http', 'grpc', 1)}")
        if answer.status_code == 404 and base.endswith("/v2"):  # a proxy may serve it under such a path
            text = f"{text}; the client adds /v2 itself: give the address as {base.removesuffix('/v2')}"
        raise kind(text)


class _Grpc:
    def __init__(self, scheme: str, target: str, timeout: float, access: _Access):
        self._metadata = tuple(access.headers.items())
        self._url = f"{scheme}://{target}"
        self._timeout = timeout
        options = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
        if scheme == "grpc":
            self._channel = grpc.insecure_channel(target, options)
        else:
            self._channel = grpc.secure_channel(target, access.credentials(), options)

    def ready(self, model: str) -> bool:
        if model:
            request = pb.ModelReadyRequest(name=model)
            return bool(self._call("ModelReady", request, pb.ModelReadyResponse).ready)
        return bool(self._call("ServerReady", pb.ServerReadyRequest(), pb.ServerReadyResponse).ready)

    def metadata(self, model: str, version: str) -> dict[str, Any]:
        request = pb.ModelMetadataRequest(name=model, version=version)
        answer = self._call("ModelMetadata", request, pb.ModelMetadataResponse)

        def tensors(specs: Any) -> list[dict[str, Any]]:
            return [{"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)} for spec in specs]

        return {
            "name": answer.name,
            "versions": list(answer.versions),
            "platform": answer.platform,
            "inputs": tensors(answer.inputs),
            "outputs": tensors(answer.outputs),
            **({"properties": dict(answer.properties)} if answer.properties else {}),
        }

    def infer(self, request: InferRequest, binary: bool) -> dict[str, Array]:
        answer = self._call("ModelInfer", grpc_codec.encode_request(request), pb.ModelInferResponse)
        with _parsing(self._url):
            return grpc_codec.decode_response(answer)

    def metrics(self) -> str:
        raise errors.Unsupported("metrics are served over HTTP; use the server's http:// address")

    def close(self) -> None:
        self._channel.close()

    def _call(self, method: str, request: Any, answer: Any) -> Any:
        call = self._channel.unary_unary(
            f"/{grpc_codec.SERVICE}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        try:
            return call(request, timeout=self._timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            status, details = error.code(), error.details()
            if status is grpc.StatusCode.UNAVAILABLE and re.search("connect|resolving", str(details), re.IGNORECASE):
                raise _unreachable(self._url, str(details).rpartition("last error: ")[2]) from error
            kind = _BY_GRPC_STATUS.get(status.value[0], errors.InternalError)
            trailers: Any = error.trailing_metadata() or ()
            if kind is errors.TooLarge and any(name == _PUSHBACK for name, _ in trailers):
                kind = errors.TooManyRequests
            raise kind(f"the server answered {status.name}: {details}") from error


@contextlib.contextmanager
def _parsing(url: str) -> Iterator[None]:
    """Report a response that cannot be read as the server's error, not the caller's."""
    try:
        yield
    except (InvalidArgument, ValueError, KeyError, TypeError, IndexError) as error:
        raise errors.InternalError(
            f"{url} sent a response that is not of the Open Inference Protocol: {error}"
        ) from error


def _unreachable(url: str, why: str) -> Unavailable:
    """Return the error for a connection that failed, with a remedy.

    gRPC reports the cause only in its text, so the text is read, for both protocols.
    """
    if re.search("mismatch|Hostname Verification", why):
        remedy = "ask by a name or address that the server's certificate is made for"
    elif re.search("self.signed|issuer", why):
        remedy = "--ca-file, in Python ca_file, must be the certificate that vouches for the server's"
    elif "CERTIFICATE_VERIFY_FAILED" in why:
        remedy = "the server needs another certificate"
    elif re.search("refused|not known|resolving", why):
        remedy = "is it running?"
    else:
        other = "HTTP" if url.startswith("grpc") else "gRPC"
        remedy = f"is it running, is TLS as the server has it (https://, grpcs://), or is it the {other} port?"
    return Unavailable(f"no server answers at {url}: {why}; {remedy}")


def _path(model: str, version: str) -> str:
    path = f"/v2/models/{quote(model, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def _error_text(answer: httpx.Response) -> str:
    try:
        return str(orjson.loads(answer.content)["error"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        if "html" in answer.headers.get("content-type", ""):
            return "a web page; this is not an Open Inference Protocol server, or a proxy answers in its place"
        return answer.text[:200]
