"""The protocol's bodies as pydantic models, for /openapi.json."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, RootModel

from ingot.server.plane.operations import Operation


class Refusal(BaseModel):
    """Body of every status from 400."""

    error: str


class OtherRefusal(BaseModel):
    """Body of every status from 400 in the APIs of other servers, each of which has further fields."""

    model_config = ConfigDict(extra="allow")

    error: str | dict[str, Any]


class Live(BaseModel):
    """Answer of /v2/health/live."""

    live: bool


class Ready(BaseModel):
    """Answer of /v2/health/ready."""

    ready: bool


class ServerMetadata(BaseModel):
    """Answer of /v2. ``build`` (HTTP only) is ``compiled`` or ``pure``."""

    name: str
    version: str
    build: str
    extensions: list[str]


class Models(BaseModel):
    """Answer of /v2/models: every version of every model, each with its name and whether it is ready."""

    models: list[dict[str, str | bool]]


class TensorMetadata(BaseModel):
    """A tensor of a model; -1 is a dynamic dimension."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(BaseModel):
    """Answer of /v2/models/{model}; the property ``values.NAME`` is the range of values of the input NAME.

    ``labels`` are the names of classes, in the order of an output's values.
    """

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    properties: dict[str, str] | None = None
    labels: list[str] | None = None


class ModelStatistics(BaseModel):
    """Answer of /v2/models/{model}/stats: Triton's statistics, and our own under ``ingot``."""

    model_stats: list[dict[str, Any]]


class ModelConfiguration(BaseModel):
    """Answer of /v2/models/{model}/config, as far as Triton's clients read it."""

    name: str
    platform: str
    backend: str
    max_batch_size: int
    input: list[dict[str, Any]]
    output: list[dict[str, Any]]
    instance_group: list[dict[str, Any]]
    model_transaction_policy: dict[str, bool]
    dynamic_batching: dict[str, Any] | None = None


class Region(BaseModel):
    """A region of shared memory; offset and size are in bytes."""

    name: str
    key: str
    offset: int
    byte_size: int


class Registration(BaseModel):
    """Body of /v2/systemsharedmemory/region/{region}/register."""

    key: str
    offset: int = 0
    byte_size: int


class CudaRegion(BaseModel):
    """A region of a GPU's memory; its size is in bytes."""

    name: str
    device_id: int
    byte_size: int


class RawHandle(BaseModel):
    """A ``cudaIpcMemHandle_t`` in Base64."""

    b64: str


class CudaRegistration(BaseModel):
    """Body of /v2/cudasharedmemory/region/{region}/register."""

    raw_handle: RawHandle
    device_id: int
    byte_size: int


class LogSettings(BaseModel):
    """Answer of /v2/logging, and the body that changes some of it."""

    log_file: str | None = None
    log_info: bool | None = None
    log_warning: bool | None = None
    log_error: bool | None = None
    log_verbose_level: int | None = None
    log_format: str | None = None


class ModelReady(BaseModel):
    """Answer of /v2/models/{model}/ready."""

    name: str
    ready: bool


class Tensor(BaseModel):
    """A tensor with its data, nested or flat; with ``parameters.binary_data_size`` the data follows the JSON."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] | None = None
    data: list[Any] | None = None


class RequestedOutput(BaseModel):
    """An output that the client wants; ``parameters.binary_data`` asks for raw bytes."""

    name: str
    parameters: dict[str, Any] | None = None


class InferRequest(BaseModel):
    """Body of .../infer."""

    id: str | None = None
    parameters: dict[str, Any] | None = None
    inputs: list[Tensor]
    outputs: list[RequestedOutput] | None = None


class InferResponse(BaseModel):
    """Answer of .../infer."""

    model_name: str
    model_version: str | None = None
    id: str | None = None
    outputs: list[Tensor]


class EmbeddingsRequest(BaseModel):
    """Body of /v1/embeddings; ``prompt_name`` is this server's, and ``user`` is not used."""

    model: str
    input: str | list[str]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None
    prompt_name: str | None = None


class Usage(BaseModel):
    """How many tokens a request had."""

    prompt_tokens: int
    total_tokens: int


class Embedding(BaseModel):
    """The vector of one text; in base64, its elements are little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(BaseModel):
    """Answer of /v1/embeddings."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class OpenAIModel(BaseModel):
    """Answer of /v1/models/{model}; when a model was made is not known, so ``created`` is 0."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class OpenAIModels(BaseModel):
    """Answer of /v1/models."""

    object: Literal["list"]
    data: list[OpenAIModel]


class EmbedRequest(BaseModel):
    """Body of /embed; ``truncate`` false refuses texts that are too long."""

    inputs: str | list[str]
    normalize: bool | None = None
    truncate: bool | None = None
    truncation_direction: str | None = None
    prompt_name: str | None = None
    dimensions: int | None = None


class Vectors(RootModel[list[list[float]]]):
    """Answer of /embed: a vector for each text."""


class EmbedAllRequest(BaseModel):
    """Body of /embed_all; ``truncate`` false refuses texts that are too long."""

    inputs: str | list[str]
    truncate: bool | None = None
    truncation_direction: str | None = None
    prompt_name: str | None = None


class TokenVectors(RootModel[list[list[list[float]]]]):
    """Answer of /embed_all: for each text, a vector for each token."""


class TokenizeRequest(BaseModel):
    """Body of /tokenize; texts are not cut."""

    inputs: str | list[str]
    add_special_tokens: bool = True
    prompt_name: str | None = None


class Token(BaseModel):
    """A token; ``start`` and ``stop`` are its place in characters, null for a special token."""

    id: int
    text: str
    special: bool
    start: int | None = None
    stop: int | None = None


class Tokens(RootModel[list[list[Token]]]):
    """Answer of /tokenize: the tokens of each text."""


class DecodeRequest(BaseModel):
    """Body of /decode: the ids of one text, or of several."""

    ids: list[int] | list[list[int]]
    skip_special_tokens: bool = True


class Texts(RootModel[list[str]]):
    """Answer of /decode: a text for each list of ids."""


class Sentences(BaseModel):
    """One text, and those that it is compared with."""

    source_sentence: str
    sentences: list[str]


class SimilarityRequest(BaseModel):
    """Body of /similarity; ``parameters`` may have prompt_name, truncate and truncation_direction."""

    inputs: Sentences
    parameters: dict[str, Any] | None = None


class Numbers(RootModel[list[float]]):
    """Answer of /similarity: a cosine for each sentence."""


class PredictRequest(BaseModel):
    """Body of /predict: a text, a pair of texts, or a list of lists of one text or two."""

    inputs: str | list[str] | list[list[str]]
    raw_scores: bool | None = None
    truncate: bool | None = None
    truncation_direction: str | None = None


class Class(BaseModel):
    """A class and its score."""

    label: str
    score: float


class Classes(RootModel[list[Class] | list[list[Class]]]):
    """Answer of /predict: the classes of the text, best first, or of each text of a list."""


class Info(BaseModel):
    """Answer of /info."""

    model_id: str
    model_sha: str | None = None
    model_dtype: str
    model_type: dict[str, Any]
    max_input_length: int
    max_client_batch_size: int
    auto_truncate: bool
    version: str


class RerankRequest(BaseModel):
    """Body of /rerank: ``texts`` as text-embeddings-inference has it, or ``documents`` as Jina and Cohere do."""

    query: str
    texts: list[str] | None = None
    raw_scores: bool | None = None
    return_text: bool | None = None
    truncate: bool | None = None
    truncation_direction: str | None = None
    documents: list[str | dict[str, Any]] | None = None
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    rank_fields: list[str] | None = None
    max_tokens_per_doc: int | None = None


class Ranking(RootModel[list[dict[str, Any]] | dict[str, Any]]):
    """Answer of /rerank: a list of index, score and text, or an object with ``results`` if ``documents`` were sent."""


class Question(BaseModel):
    """A question, and the text that has its answer."""

    question: str
    context: str


FILES = ("image/", "audio/", "application/octet-stream")
"""How the media types of bodies that are files begin."""
_BINARY: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}


class InferenceRequest(BaseModel):
    """Body of /models/{model}; the parameters depend on the model's task. ``inputs`` has files in base64."""

    inputs: str | list[str] | Sentences | Question | list[Question]
    parameters: dict[str, Any] | None = None


class Answers(RootModel[list[Any] | dict[str, Any]]):
    """Answer of /models/{model}, whose form depends on the model's task."""


def _inlined(model: type[BaseModel]) -> dict[str, Any]:
    """Return a model's JSON schema with its references resolved, as ``openapi_extra`` needs it."""
    whole = model.model_json_schema()
    definitions = whole.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return resolve(definitions[node["$ref"].rpartition("/")[2]])
            return {key: resolve(value) for key, value in node.items()}
        return [resolve(value) for value in node] if isinstance(node, list) else node

    return resolve(whole)  # type: ignore[no-any-return]


class GenerateResponse(BaseModel):
    """Answer of .../generate: an output of one element is a value, one of several a list of them."""

    model_config = ConfigDict(extra="allow")

    model_name: str
    model_version: str
    id: str | None = None


# Schemas of bodies that are not models here, as the table of operations names them.
INPUTS, EVENTS, TEXT = "Inputs", "Events", "Text"
IN_WORDS = {INPUTS: "inputs by name", EVENTS: "server-sent events", TEXT: "text"}
_FLAT = {"type": "object", "description": "Inputs by name, id, and parameters"}


def response_model(operation: Operation) -> Any:
    """Return the model of an answer, or None."""
    kind, _, inner = operation.response.partition("[")
    if operation.handler is None or not kind:
        return None
    return list[globals()[inner.rstrip("]")]] if inner else globals()[kind]  # type: ignore[misc]


def extra(operation: Operation) -> dict[str, Any]:
    """Return the parts of the schema that FastAPI cannot derive, since endpoints read and write bodies themselves."""
    found: dict[str, Any] = {}
    if operation.request:
        content = _FLAT if operation.request == INPUTS else _inlined(globals()[operation.request])
        media: dict[str, Any] = {"application/json": {"schema": content}}
        if operation.files:
            media |= {f"{kind.rstrip('/')}/*" if kind.endswith("/") else kind: _BINARY for kind in FILES}
        found["requestBody"] = {"required": True, "content": media}
    if operation.handler is None and operation.response not in ("", TEXT):
        found["responses"] = {"200": _answer(operation.response)}
    return found


def _answer(name: str) -> dict[str, Any]:
    if name == EVENTS:
        events = {"text/event-stream": {"schema": {"type": "string"}}}
        return {"description": "An event for each answer", "content": events}
    return {"description": "The answer", "content": {"application/json": {"schema": _inlined(globals()[name])}}}


def refusals(operation: Operation) -> dict[int | str, dict[str, Any]]:
    """Return the errors of an operation, if their bodies have another form than usual."""
    if operation.refusal is None:
        return {}
    return {status: {**about, "model": OtherRefusal} for status, about in REFUSALS.items()}


REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": Refusal, "description": "The request cannot be answered"},
    "5XX": {"model": Refusal, "description": "The server cannot answer now, or does not support this"},
}
