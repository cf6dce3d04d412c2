"""The model that is loaded: its inputs, the bytes of its requests, and its server's statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import quote, urlsplit

import httpx

from ingot.bench.grpc import header_block
from ingot.bench.payload import Payload, completions, payload, raw
from ingot.bench.plan import Arrivals, Plan, Tls, Wire
from ingot.client.access import MAX_RESPONSE_MB, Access, address
from ingot.client.blocking import Client
from ingot.client.bodies import IDENTITY, read
from ingot.errors import IngotError, InvalidArgument, Unavailable
from ingot.protocol import json_codec, proto_codec
from ingot.protocol.arguments import request as infer_request
from ingot.tensors import Array

Protocol = Literal["binary", "json", "grpc", "grpc-stream", "torchserve", "openai"]
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """A client's key and certificate, and the authorities that it trusts; see :class:`ingot.Client`."""

    key: str | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    cert_key_file: Path | None = None

    def tls(self) -> Tls:
        """Return the part that a process of the generator needs."""
        files = (self.ca_file, self.cert_file, self.cert_key_file)
        ca, cert, key = (None if file is None else str(file) for file in files)
        return Tls(ca_file=ca, cert_file=cert, cert_key_file=key)


class Target:
    """A model on a server, and how it is called.

    Args:
        url: of the server; ``grpc://`` or ``grpcs://`` for the gRPC protocols.
        model: its name.
        version: empty for the server's choice.
        protocol: how requests are sent; by default raw tensors over the protocol of the URL.
        credentials: of the client.
        timeout: seconds to wait for an answer.

    Raises:
        InvalidArgument: the URL does not fit the protocol.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        version: str = "",
        protocol: Protocol | None = None,
        credentials: Credentials | None = None,
        timeout: float = 60.0,
    ):
        self.url, self.model, self.version, self.timeout = url.rstrip("/"), model, version, timeout
        self._credentials = credentials or Credentials()
        scheme, place = address(url)
        over_grpc = scheme.startswith("grpc")
        self.protocol: Protocol = protocol or ("grpc" if over_grpc else "binary")
        if over_grpc != self.protocol.startswith("grpc"):
            form = f"http://{place}" if over_grpc else "grpc://HOST:PORT, with the gRPC port"
            raise InvalidArgument(f"--protocol {self.protocol} needs another address than {url}; write {form}")
        parts = urlsplit(url)
        self._host, self._netloc = parts.hostname or "", parts.netloc
        self._tls = scheme in ("https", "grpcs")
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        self._headers = Access(self._credentials.key, None, None, None).headers
        self._client: Client | None = None

    @property
    def wire(self) -> Wire:
        return {"grpc": "grpc", "grpc-stream": "grpc-stream"}.get(self.protocol, "http")  # type: ignore[return-value]

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *_: object) -> None:
        if self._client is not None:
            self._client.close()

    @property
    def client(self) -> Client:
        """A client of the server, which is closed with the target."""
        if self._client is None:
            known = self._credentials
            files = known.cert_file, known.cert_key_file
            self._client = Client(self.url, self.timeout, known.ca_file, known.key, *files)
        return self._client

    def payload(self, data: Path | None, shapes: Mapping[str, tuple[int, ...]], batch: int, seed: int) -> Payload:
        """Return the request to send; see :func:`ingot.bench.payload.payload`. For TorchServe, the file is the body."""
        if self.protocol == "torchserve":
            if data is None:
                raise InvalidArgument("TorchServe does not describe a model's inputs: give the body with --data FILE")
            return raw(data)
        if self.protocol == "openai":
            name = f"{self.model}:{self.version}" if self.version else self.model
            return completions(name, data, seed)
        return payload(self.client.metadata(self.model, self.version), data, shapes, batch, seed)

    def check(self, payload: Payload) -> None:
        """Send the first request once.

        Raises:
            IngotError: it is not answered.
        """
        first = payload.requests[0]
        if isinstance(first, bytes):
            headers = {**IDENTITY, **self._headers, "Content-Type": payload.media}
            try:
                with httpx.stream("POST", self.url + self._path, content=first, headers=headers) as head:
                    answer = read(head, self.url, MAX_RESPONSE_MB << 20, self.timeout)
            except httpx.HTTPError as error:
                raise Unavailable(f"{self.url} did not answer: {error}") from error
            if answer.status_code != 200:
                raise IngotError(f"{self.url} answered {answer.status_code}: {answer.text[:300]}")
            return
        try:
            self.client.infer(self.model, first, version=self.version, binary=self.protocol != "json")
        except IngotError as error:
            if self.protocol == "binary" and "server answered 500" in str(error):
                text = f"{error}; if it does not take raw tensors over HTTP, as MLServer, use --protocol json"
                raise type(error)(text) from error
            raise

    def plan(self, payload: Payload, *, arrivals: Arrivals = "poisson", seed: int = 1) -> Plan:
        """Return a plan that sends requests one after the other from one client."""
        if self.wire == "http":
            bodies = tuple(self._http(item, payload.media) for item in payload.requests)
            header = b""
        else:
            bodies = tuple(self._message(item) for item in payload.requests if not isinstance(item, bytes))
            method = "ModelInfer" if self.wire == "grpc" else "ModelStreamInfer"
            header = header_block(
                [
                    (":method", "POST"),
                    (":scheme", "https" if self._tls else "http"),
                    (":path", f"/{proto_codec.SERVICE}/{method}"),
                    (":authority", self._netloc),
                    ("te", "trailers"),
                    ("content-type", "application/grpc"),
                    ("user-agent", "ingot-bench"),
                    *self._headers.items(),
                ]
            )
        return Plan(
            host=self._host,
            port=self._port,
            tls=self._credentials.tls() if self._tls else None,
            wire=self.wire,
            requests=bodies,
            streams=self.protocol == "openai",
            header=header,
            clients=1,
            arrivals=arrivals,
            seed=seed,
            timeout=self.timeout,
        )

    def statistics(self) -> ServerCounts | None:
        """Return the model's counters so far; None if the server keeps none."""
        if self.protocol in ("torchserve", "openai"):  # a decoder's batches are steps
            return None
        try:
            entries = self.client.statistics(self.model, self.version)
        except IngotError:
            return None
        return sum((ServerCounts.of(entry) for entry in entries), ServerCounts())

    @property
    def _path(self) -> str:
        if self.protocol == "openai":
            return "/v1/completions"
        model, version = quote(self.model, safe=""), quote(self.version, safe="")
        if self.protocol == "torchserve":
            return f"/predictions/{model}" + (f"/{version}" if version else "")
        return f"/v2/models/{model}" + (f"/versions/{version}" if version else "") + "/infer"

    def _http(self, item: Mapping[str, Array] | bytes, media: str) -> bytes:
        headers = {"Host": self._netloc, **self._headers}
        if isinstance(item, bytes):
            body = item
        else:
            request = infer_request(self.model, item, self.version, (), None)
            body, length = json_codec.encode_request(request, binary=self.protocol == "binary")
            media = "application/json"
            if length is not None:
                media = "application/octet-stream"
                headers[json_codec.HEADER_LENGTH] = str(length)
        headers |= {"Content-Type": media, "Content-Length": str(len(body))}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"POST {self._prefix}{self._path} HTTP/1.1\r\n{lines}\r\n".encode() + body

    def _message(self, item: Mapping[str, Array]) -> bytes:
        request = infer_request(self.model, item, self.version, (), None)
        message = proto_codec.encode_request(request).SerializeToString()
        return b"\0" + len(message).to_bytes(4, "big") + message


@dataclass(frozen=True, kw_only=True)
class ServerCounts:
    """Counters of a model since its server started; times are in seconds.

    Attributes:
        requests: that succeeded.
        samples: inferred.
        calls: of the engine.
        seconds: total time of requests by stage.
    """

    requests: int = 0
    samples: int = 0
    calls: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)

    STAGES = ("queue", "compute_input", "compute_infer", "compute_output")

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> ServerCounts:
        """Read an entry of the statistics extension."""
        stats = entry.get("inference_stats", {})
        return cls(
            requests=int(stats.get("success", {}).get("count", 0)),
            samples=int(entry.get("inference_count", 0)),
            calls=int(entry.get("execution_count", 0)),
            seconds={stage: int(stats.get(stage, {}).get("ns", 0)) / 1e9 for stage in cls.STAGES},
        )

    def __add__(self, other: ServerCounts) -> ServerCounts:
        return self._combined(other, 1)

    def __sub__(self, other: ServerCounts) -> ServerCounts:
        return self._combined(other, -1)

    def _combined(self, other: ServerCounts, sign: int) -> ServerCounts:
        return ServerCounts(
            requests=self.requests + sign * other.requests,
            samples=self.samples + sign * other.samples,
            calls=self.calls + sign * other.calls,
            seconds={
                stage: self.seconds.get(stage, 0.0) + sign * other.seconds.get(stage, 0.0) for stage in self.STAGES
            },
        )
