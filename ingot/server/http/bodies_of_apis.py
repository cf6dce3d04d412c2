"""The bodies of the APIs of other servers as pydantic models, for /openapi.json."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, RootModel


class OtherRefusal(BaseModel):
    """Body of every status from 400 in the APIs of other servers, each of which has further fields."""

    model_config = ConfigDict(extra="allow")

    error: str | dict[str, Any]


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


class Generating(BaseModel):
    """Fields that completions and chat completions share. A value of another field that changes nothing is accepted."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: dict[str, bool] | None = None
    user: str | None = None


class CompletionsRequest(Generating):
    """Body of /v1/completions; a prompt may be the ids of tokens."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: bool | None = None


class ChatRequest(Generating):
    """Body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class GeneratingUsage(Usage):
    """How many tokens prompts and answers have."""

    completion_tokens: int


class Completion(BaseModel):
    """One answer, and why it ends."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: dict[str, Any] | None


class Completions(BaseModel):
    """Answer of /v1/completions; a stream has events with pieces instead."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[Completion]
    usage: GeneratingUsage


class ChatChoice(BaseModel):
    """One message, and why it ends."""

    index: int
    message: dict[str, Any]
    finish_reason: Literal["stop", "length"]
    logprobs: dict[str, Any] | None


class Chat(BaseModel):
    """Answer of /v1/chat/completions; a stream has events with pieces instead."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: GeneratingUsage


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


class InferenceRequest(BaseModel):
    """Body of /models/{model}; the parameters depend on the model's task. ``inputs`` has files in base64.

    Those of a model without a task are a sample, or a list of samples, by the names of its inputs. With ``stream``, a
    decoder or a class in Python that yields answers with events.
    """

    inputs: str | list[str] | Sentences | Question | list[Question] | Any
    parameters: dict[str, Any] | None = None
    stream: bool | None = None


class Answers(RootModel[list[Any] | dict[str, Any]]):
    """Answer of /models/{model}, whose form depends on the model's task."""
