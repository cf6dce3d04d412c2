"""The operations of a server, each stated once: HTTP, gRPC, OpenAPI, access rules and the reference read this table."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

from ingot._build import BUILD
from ingot._version import __version__
from ingot.errors import IngotError
from ingot.server.access.gate import INFER, METRICS
from ingot.server.plane import handlers
from ingot.server.plane.apis import chat, completions, huggingface, openai, reranking, tei, tokens
from ingot.server.plane.dataplane import DataPlane
from ingot.server.plane.handlers import Call
from ingot.serving.control import Control

Handler = Callable[[Call], Awaitable[Any]]
Refusal = Callable[[IngotError], tuple[int, dict[str, Any]]]


class Condition(NamedTuple):
    """The precondition of an operation: as text for the reference, as a check of a listener, and as extensions."""

    text: str
    holds: Callable[[DataPlane, Control | None], bool]
    extensions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        name: as in the OpenAPI document.
        http: each method and path; none for an operation of gRPC only.
        grpc: the method; empty for an operation of HTTP only.
        handler: returns the answer as JSON; None if each protocol serves the operation itself, as bodies are not JSON
            objects: inference, its streams, files, metrics.
        scope: the right that a client needs; empty for none. The management listener asks for ``manage`` instead.
        needs: when it works; otherwise OpenAPI leaves it out, and it answers with an error.
        request: the schema of the body (``http/schema.py``); empty for any JSON object, None if no body is read.
        response: the schema of the answer; empty for any JSON.
        hidden: paths that the OpenAPI document leaves out.
        files: whether the body may be a file of a picture or a sound instead of JSON, by its content type.
        probe: whether HTTP answers 503 with ``"ready": false``.
        refusal: of an operation of another server's API: returns the status and the body of an error in its form.
    """

    name: str
    http: tuple[str, ...] = ()
    grpc: str = ""
    handler: Handler | None = None
    _: KW_ONLY
    scope: str = INFER
    needs: Condition | None = None
    request: str | None = None
    response: str = ""
    hidden: tuple[str, ...] = ()
    files: bool = False
    probe: bool = False
    refusal: Refusal | None = None

    def holds(self, plane: DataPlane, control: Control | None) -> bool:
        """Return whether it works on a listener."""
        return self.needs is None or self.needs.holds(plane, control)


MANAGED = Condition(
    "the management listener",
    lambda plane, control: control is not None,
    ("model_repository", "model_repository(unload_dependents)"),
)
_SHARED = Condition("`--shared-memory`", lambda plane, control: plane.reader is not None, ("system_shared_memory",))
_CUDA = Condition("`--shared-memory` and a GPU", lambda plane, control: plane.shares_cuda, ("cuda_shared_memory",))
_LOGGED = Condition(
    "`--log-control`, or the management listener",
    lambda plane, control: plane.logs.changeable or control is not None,
    ("logging",),
)
_PAGE = Condition("`--page`", lambda plane, control: False)  # for people: OpenAPI never lists it
_ALWAYS = (
    "binary_tensor_data",
    "classification",
    "generate",
    "model_configuration",
    "schedule_policy",
    "sequence",
    "statistics",
)


async def _server_metadata(call: Call) -> dict[str, Any]:
    """Return the server's name, version and build, and the extensions that work."""
    conditions = [
        condition for condition in (MANAGED, _SHARED, _CUDA, _LOGGED) if condition.holds(call.plane, call.control)
    ]
    working = (name for condition in conditions for name in condition.extensions)
    extensions = sorted((*_ALWAYS, *working))
    return {"name": "ingot", "version": __version__, "build": BUILD, "extensions": extensions}


def _of_model(method: str, end: str = "") -> tuple[str, str]:
    """Return an operation's paths for a model, and for one of its versions."""
    return f"{method} /v2/models/{{model}}{end}", f"{method} /v2/models/{{model}}/versions/{{version}}{end}"


def _managed(name: str, route: str, handler: Handler, grpc: str = "", *, alias: bool = False) -> Operation:
    """Return an operation of management; ``alias`` is whether Triton's path with a repository's name works too."""
    method, end = route.split()
    hidden = (f"{method} /v2/repository/{{repository}}{end}",) if alias else ()
    return Operation(
        name,
        (f"{method} /v2/repository{end}", *hidden),
        grpc,
        handler,
        needs=MANAGED,
        request="" if method == "POST" else None,
        hidden=hidden,
    )


def _texts(name: str, end: str, handler: Handler, refusal: Refusal, request: str | None, response: str) -> Operation:
    """Return an operation of an API that serves one model: below the model's address, and at the root."""
    method, end = end.split()
    paths = (f"{method} {end}", f"{method} /models/{{model}}{end}")
    return Operation(name, paths, handler=handler, refusal=refusal, request=request, response=response)


_SYSTEM, _CUDA_REGION = "/v2/systemsharedmemory", "/v2/cudasharedmemory"

OPERATIONS = (
    Operation("live", ("GET /v2/health/live",), "ServerLive", handlers.live, scope="", response="Live"),
    Operation(
        "ready", ("GET /v2/health/ready",), "ServerReady", handlers.ready, scope="", response="Ready", probe=True
    ),
    Operation(
        "server_metadata",
        ("GET /v2", "GET /v2/"),
        "ServerMetadata",
        _server_metadata,
        response="ServerMetadata",
        hidden=("GET /v2/",),
    ),
    Operation("models", ("GET /v2/models",), "", handlers.models, response="Models"),
    Operation("all_statistics", ("GET /v2/models/stats",), "", handlers.statistics, response="ModelStatistics"),
    Operation(
        "statistics", _of_model("GET", "/stats"), "ModelStatistics", handlers.statistics, response="ModelStatistics"
    ),
    Operation(
        "configuration",
        _of_model("GET", "/config"),
        "ModelConfig",
        handlers.configuration,
        response="ModelConfiguration",
    ),
    Operation("model_metadata", _of_model("GET"), "ModelMetadata", handlers.model_metadata, response="ModelMetadata"),
    Operation(
        "model_ready", _of_model("GET", "/ready"), "ModelReady", handlers.model_ready, response="ModelReady", probe=True
    ),
    Operation("infer", _of_model("POST", "/infer"), "ModelInfer", request="InferRequest", response="InferResponse"),
    Operation("stream_infer", (), "ModelStreamInfer"),
    Operation("generate_one", _of_model("POST", "/generate"), request="Inputs", response="GenerateResponse"),
    Operation("generate_stream", _of_model("POST", "/generate_stream"), request="Inputs", response="Events"),
    Operation(
        "embeddings",
        ("POST /v1/embeddings",),
        handler=openai.embeddings,
        refusal=openai.refusal,
        request="EmbeddingsRequest",
        response="Embeddings",
    ),
    Operation(
        "completions",
        ("POST /v1/completions",),
        handler=completions.completions,
        refusal=openai.refusal,
        request="CompletionsRequest",
        response="Completions",
    ),
    Operation(
        "chat",
        ("POST /v1/chat/completions",),
        handler=chat.chat,
        refusal=openai.refusal,
        request="ChatRequest",
        response="Chat",
    ),
    Operation(
        "openai_models", ("GET /v1/models",), handler=openai.models, refusal=openai.refusal, response="OpenAIModels"
    ),
    Operation(
        "openai_model",
        ("GET /v1/models/{model}",),
        handler=openai.model,
        refusal=openai.refusal,
        response="OpenAIModel",
    ),
    _texts("embed", "POST /embed", tei.embed, tei.refusal, "EmbedRequest", "Vectors"),
    _texts("embed_all", "POST /embed_all", tokens.embed_all, tei.refusal, "EmbedAllRequest", "TokenVectors"),
    _texts("tokenize", "POST /tokenize", tokens.tokenize, tei.refusal, "TokenizeRequest", "Tokens"),
    _texts("decode", "POST /decode", tokens.decode, tei.refusal, "DecodeRequest", "Texts"),
    _texts("similarity", "POST /similarity", tei.similarity, tei.refusal, "SimilarityRequest", "Numbers"),
    _texts("predict", "POST /predict", tei.predict, tei.refusal, "PredictRequest", "Classes"),
    _texts("info", "GET /info", tei.info, tei.refusal, None, "Info"),
    Operation(
        "rerank",
        ("POST /rerank", "POST /v1/rerank", "POST /v2/rerank", "POST /models/{model}/rerank"),
        handler=reranking.rerank,
        refusal=reranking.refusal,
        request="RerankRequest",
        response="Ranking",
    ),
    Operation(
        "answer",
        ("POST /models/{model}",),
        handler=huggingface.answer,
        refusal=huggingface.refusal,
        request="InferenceRequest",
        files=True,
        response="Answers",
    ),
    Operation("log_settings", ("GET /v2/logging",), "LogSettings", handlers.log_settings, response="LogSettings"),
    Operation(
        "change_log_settings",
        ("POST /v2/logging",),
        "",
        handlers.change_log_settings,
        needs=_LOGGED,
        request="LogSettings",
    ),
    _managed("index", "POST /index", handlers.index, "RepositoryIndex", alias=True),
    _managed("load", "POST /models/{model}/load", handlers.load, "RepositoryModelLoad", alias=True),
    _managed("unload", "POST /models/{model}/unload", handlers.unload, "RepositoryModelUnload", alias=True),
    _managed("status", "GET /status", handlers.status),
    _managed("canary", "POST /models/{model}/canary", handlers.canary),
    _managed("stop_canary", "DELETE /models/{model}/canary", handlers.stop_canary),
    _managed("reload", "POST /reload", handlers.reload),
    Operation("root", ("GET /",), scope="", needs=_PAGE),
    Operation("page", ("GET /ui", "GET /ui/{file}"), scope="", needs=_PAGE),
    Operation(
        "memory_status",
        (f"GET {_SYSTEM}/status", f"GET {_SYSTEM}/region/{{region}}/status"),
        "SystemSharedMemoryStatus",
        handlers.memory_status,
        needs=_SHARED,
        response="list[Region]",
    ),
    Operation(
        "register_memory",
        (f"POST {_SYSTEM}/region/{{region}}/register",),
        "SystemSharedMemoryRegister",
        handlers.register_memory,
        needs=_SHARED,
        request="Registration",
    ),
    Operation(
        "unregister_memory",
        (f"POST {_SYSTEM}/unregister", f"POST {_SYSTEM}/region/{{region}}/unregister"),
        "SystemSharedMemoryUnregister",
        handlers.unregister_memory,
        needs=_SHARED,
    ),
    Operation(
        "cuda_memory_status",
        (f"GET {_CUDA_REGION}/status", f"GET {_CUDA_REGION}/region/{{region}}/status"),
        "CudaSharedMemoryStatus",
        handlers.cuda_memory_status,
        needs=_CUDA,
        response="list[CudaRegion]",
    ),
    Operation(
        "register_cuda_memory",
        (f"POST {_CUDA_REGION}/region/{{region}}/register",),
        "CudaSharedMemoryRegister",
        handlers.register_cuda_memory,
        needs=_CUDA,
        request="CudaRegistration",
    ),
    Operation(
        "unregister_cuda_memory",
        (f"POST {_CUDA_REGION}/unregister", f"POST {_CUDA_REGION}/region/{{region}}/unregister"),
        "CudaSharedMemoryUnregister",
        handlers.unregister_cuda_memory,
        needs=_CUDA,
    ),
    Operation("metrics", ("GET /metrics",), scope=METRICS, response="Text"),
)

METHODS: Mapping[str, Operation] = {operation.grpc: operation for operation in OPERATIONS if operation.grpc}
"""The operations by their methods of gRPC."""


def _pattern(route: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\{\w+\}", "[^/]*", route.split()[1]))


_PATHS = [
    (_pattern(route), operation.scope)
    for operation in OPERATIONS
    for route in operation.http
    if operation.scope != INFER
]


def scope_of_path(path: str) -> str:
    """Return the right that a request to a path needs; a path without an operation needs that of inference."""
    return next((scope for pattern, scope in _PATHS if pattern.fullmatch(path)), INFER)


_FORMS = [
    (_pattern(route), operation.refusal)
    for operation in OPERATIONS
    for route in operation.http
    if operation.refusal is not None
]


def refusal_of_path(path: str) -> Refusal | None:
    """Return the form of errors of the API that a path belongs to; None for that of the Open Inference Protocol.

    It is needed for errors without an operation too: a wrong method, a wrong key, a path below ``/v1`` that no
    operation has, which only OpenAI's clients ask for.
    """
    found = next((refusal for pattern, refusal in _FORMS if pattern.fullmatch(path)), None)
    return openai.refusal if found is None and path.startswith("/v1/") else found
