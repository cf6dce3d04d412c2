"""What both protocols call: the server's whole behaviour, free of HTTP and gRPC."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ingot
from ingot.errors import Code, IngotError, InternalError, InvalidArgument, Unsupported
from ingot.runtime import Model, Repository
from ingot.server.recorder import Recorder
from ingot.tensors import Array, DType, Signature, TensorSpec

log = logging.getLogger(__name__)

# More inputs or outputs than any model has; a request is refused before time is spent on each of millions.
MAX_TENSORS = 1024

EXTENSIONS = ("binary_tensor_data",)

Parameters = Mapping[str, Any]
_UNSUPPORTED = {
    "shared_memory_region": "shared memory",
    "classification": "the classification extension",
}


@dataclass(frozen=True)
class InferRequest:
    """One inference request, decoded. ``outputs`` empty means all."""

    model: str
    inputs: tuple[tuple[str, Array], ...]
    version: str = ""
    id: str = ""
    outputs: tuple[str, ...] = ()
    parameters: Parameters = field(default_factory=dict)


@dataclass(frozen=True)
class InferResponse:
    """One answer; ``outputs`` are in the order asked for, else in the model's."""

    model: str
    version: str
    id: str
    outputs: tuple[tuple[str, DType, Array], ...]


@dataclass(frozen=True)
class ModelMetadata:
    """What the metadata endpoints tell of a model."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    properties: Mapping[str, str]


class DataPlane:
    """Health, metadata and inference over a repository of models; ``recorder``, if there is one, keeps some of it."""

    def __init__(self, repository: Repository):
        self.repository = repository
        self.recorder: Recorder | None = None
        self.metrics = repository.metrics
        self.draining = False

    @property
    def ready(self) -> bool:
        """Whether every model answers and the server takes new requests."""
        return not self.draining and self.repository.ready

    def server_metadata(self) -> dict[str, Any]:
        """Return the server's name, version and the protocol extensions that work."""
        return {"name": "ingot", "version": ingot.__version__, "extensions": list(EXTENSIONS)}

    def model_ready(self, name: str, version: str = "") -> bool:
        """Tell whether a model answers.

        Raises:
            NotFound: no such model or version is served.
        """
        return self.repository.get(name, version).ready and not self.draining

    def signature(self, name: str, version: str = "") -> Signature:
        """Return what a model takes and gives.

        Raises:
            NotFound: no such model or version is served.
            Unavailable: it is still loading.
        """
        return self.repository.get(name, version).signature

    def count_error(self, protocol: str, error: IngotError) -> None:
        """Count an answer that is an error, and log it if it is our fault; both protocols call this for every one."""
        self.metrics.errors.labels(protocol, error.code.value).inc()
        if error.code is Code.INTERNAL:
            log.error("%s: %s", protocol, error)

    def model_metadata(self, name: str, version: str = "") -> ModelMetadata:
        """Describe a model.

        Raises:
            NotFound: no such model or version is served.
            Unavailable: it is still loading.
        """
        model = self.repository.get(name, version)
        versions = (model.version,) if version else tuple(self.repository.versions(name))
        signature = model.signature
        return ModelMetadata(name, versions, model.platform, signature.inputs, signature.outputs, model.properties)

    async def infer(self, request: InferRequest, protocol: str) -> InferResponse:
        """Answer one request.

        Args:
            request: the decoded request.
            protocol: ``http`` or ``grpc``, for the metrics.

        Raises:
            IngotError: any of the kinds that :meth:`ingot.runtime.Model.infer` names, or NotFound.
        """
        began = time.perf_counter()
        model = self.repository.get(request.model, request.version)
        labels = (model.name, model.version, protocol)
        code = "cancelled"
        try:
            response = await self._infer(model, request)
            code = "ok"
        except IngotError as error:
            code = error.code.value
            raise
        except Exception as error:
            code = "internal"
            log.exception("a request to model %s failed", request.model)
            raise InternalError(f"{type(error).__name__}: {error}") from error
        finally:
            self.metrics.requests.labels(*labels, code).inc()
            self.metrics.request_seconds.labels(*labels).observe(time.perf_counter() - began)
        return response

    async def _infer(self, model: Model, request: InferRequest) -> InferResponse:
        inputs = dict(request.inputs)
        if len(inputs) < len(request.inputs):
            [(twice, _)] = Counter(name for name, _ in request.inputs).most_common(1)
            raise InvalidArgument(f"input '{twice}' stands twice in the request")
        wanted = self._wanted(model, request)
        outputs = await model.infer(inputs, _timeout(request.parameters))
        if self.recorder is not None:
            self.recorder.offer(model.name, model.version, inputs, outputs)
        return InferResponse(
            model.name,
            model.version,
            request.id,
            tuple((spec.name, spec.dtype, outputs[spec.name]) for spec in wanted),
        )

    def _wanted(self, model: Model, request: InferRequest) -> tuple[TensorSpec, ...]:
        specs = {spec.name: spec for spec in model.signature.outputs}
        for name in request.outputs:
            if name not in specs:
                raise InvalidArgument(f"unknown output '{name}'; the model gives {', '.join(specs)}")
        if len(set(request.outputs)) < len(request.outputs):
            raise InvalidArgument("an output is asked for twice")
        return tuple(specs[name] for name in request.outputs) or tuple(specs.values())


def check_parameters(where: str, parameters: Parameters) -> None:
    """Refuse a tensor's parameters that would change the answer and are not supported; others may be ignored.

    Raises:
        Unsupported: names the extension.
    """
    for name, extension in _UNSUPPORTED.items():
        if name in parameters:
            raise Unsupported(f"{where} asks for {extension}, which this server does not have")


def _timeout(parameters: Parameters) -> float | None:
    """Return the request's ``timeout`` parameter, which is in microseconds, in seconds."""
    value = parameters.get("timeout")
    if value is None or value == 0:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidArgument(f"parameter 'timeout' is {value!r}; it must be a whole number of microseconds")
    return value / 1e6
