"""The documents of an archive: OCI index and manifest, ModelPack configuration, and ``serving.json``.

An archive is an OCI index that lists one manifest per variant. A manifest's layers are raw blobs:

    index (tag or archive file)
    └── manifest of a variant        artifactType: ModelPack
        ├── config                   ModelPack configuration (schema-strict)
        ├── model.onnx               the graph, without tensors of 1 MiB and more
        ├── <hex>, <hex>, ...        one blob per large tensor; the graph refers to it by digest
        ├── serving.json             signature, requirements, evidence and provenance, which ModelPack lacks
        ├── tokenizer.json, ...      files of the steps before and after the graph
        └── goldens.safetensors      inputs and outputs that the server replays before it reports ready

All are parsed into strict models before anything is allocated or written. Specification:
docs/reference/archive-format.md.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from ingot.errors import InvalidArchive, InvalidArgument
from ingot.model_store.blobs.descriptor import Descriptor, Digest, OCIDocument
from ingot.model_store.format.evidence import Evidence, Provenance, Record
from ingot.model_store.format.generation import Generation
from ingot.model_store.references import valid_name
from ingot.steps import Steps
from ingot.tensors import Signature
from ingot.tensors.padding import Padding

INDEX: Final = "application/vnd.oci.image.index.v1+json"
MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
MODEL_MANIFEST: Final = "application/vnd.cncf.model.manifest.v1+json"
MODEL_CONFIG = "application/vnd.cncf.model.config.v1+json"
WEIGHT = "application/vnd.cncf.model.weight.v1.raw"
DOCUMENT = "application/vnd.cncf.model.doc.v1.raw"
SERVING = "application/vnd.ingot.serving.v1+json"
GOLDENS = "application/vnd.ingot.goldens.v1+safetensors"
STEP_FILE = "application/vnd.ingot.step.v1.raw"

LAYOUT = b'{"imageLayoutVersion": "1.0.0"}'

REF_NAME = "org.opencontainers.image.ref.name"
FILEPATH = "org.cncf.model.filepath"
VARIANT = "ai.ingot.variant"

MAX_LAYERS = 100_000

Format = Literal["onnx", "aoti", "pt2", "partitioned", "python"]
"""Format of a variant's first weight layer: an ONNX graph, an AOTInductor package, a PyTorch program, or a plan.

See :class:`~ingot.model_store.format.partition.PartitionPlan` and
:class:`~ingot.model_store.format.partition.PythonPlan` for the last two. All but the first can run their author's code
when they are loaded.
"""
Division = Literal["colwise", "rowwise"]
"""How the weights of a layer are divided over processes: by its outputs or by its inputs, as PyTorch calls it."""
Document = TypeVar("Document", bound=BaseModel)


class OCILayout(OCIDocument):
    """The file ``oci-layout``."""

    image_layout_version: Literal["1.0.0"]


class Index(OCIDocument):
    """An OCI image index: the variants of an archive, or the tags of a repository.

    It only has fields that every registry tool preserves: skopeo drops others when it copies an index, which would
    change the archive's digest.
    """

    schema_version: Literal[2] = 2
    media_type: Literal["application/vnd.oci.image.index.v1+json"] = INDEX
    manifests: tuple[Descriptor, ...] = Field((), max_length=10_000)


class Manifest(OCIDocument):
    """An OCI image manifest of one variant."""

    schema_version: Literal[2] = 2
    media_type: Literal["application/vnd.oci.image.manifest.v1+json"] = MANIFEST
    artifact_type: Literal["application/vnd.cncf.model.manifest.v1+json"] = MODEL_MANIFEST
    config: Descriptor
    layers: tuple[Descriptor, ...] = Field(max_length=MAX_LAYERS)

    def layer(self, media_type: str) -> Descriptor | None:
        return next((layer for layer in self.layers if layer.media_type == media_type), None)


class ModelDescriptor(OCIDocument):
    """ModelPack: the model's name."""

    name: str
    created_at: str


class ModelDetails(OCIDocument):
    """ModelPack: the model's kind."""

    format: str
    precision: str
    quantization: str | None = None


class ModelFS(OCIDocument):
    """ModelPack: the layers; raw layers are their own diff ids."""

    type: Literal["layers"] = "layers"
    diff_ids: tuple[Digest, ...]


class ModelConfig(OCIDocument):
    """The ModelPack configuration; its schema allows no additional fields."""

    descriptor: ModelDescriptor
    config: ModelDetails
    modelfs: ModelFS


class ServingDefaults(Record):
    """How a model is served unless the server's settings of the same names say otherwise.

    ``labels`` are the names of classes, in the order of an output's values. ``states`` and ``repeat`` have an output,
    or a control such as ``@start``, for each input that clients do not send, or not again.
    """

    labels: tuple[str, ...] = Field((), max_length=1_000_000)
    states: dict[str, str] = Field(default_factory=dict)
    repeat: dict[str, str] = Field(default_factory=dict)
    repeat_until: str = ""


class Serving(Record, populate_by_name=True):
    """``serving.json``: the properties that the runtime needs and ModelPack lacks.

    ``batchable`` (``joins`` in JSON) is whether requests may share a batch. The signature, which all variants share,
    describes the model; in a variant that computes quantization ranges per call, samples of a call affect each other.
    ``padding`` describes, by dimension, how inputs may be enlarged without changing the outputs.
    ``tensor_parallel`` is how the weights of layers may be divided over several processes, by their modules' names.
    ``defaults`` are settings of the model's server. ``steps`` make the graph's inputs of raw ones, such as texts, and
    answers of its outputs. ``generation`` is how a decoder is run.
    """

    schema_version: Literal[1] = 1
    name: str
    variant: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    format: Format
    precision: str
    signature: Signature
    requires: dict[str, str] = Field(default_factory=dict)
    recipe: dict[str, Any] | None = None
    parents: tuple[Digest, ...] = ()
    golden_tolerance: float = Field(1e-3, gt=0, le=1)
    batchable: bool = Field(True, alias="joins")
    padding: dict[str, Padding] = Field(default_factory=dict)
    tensor_parallel: dict[str, Division] | None = None
    defaults: ServingDefaults | None = None
    steps: Steps | None = None
    generation: Generation | None = None
    provenance: Provenance
    evidence: Evidence = Evidence()
    features: tuple[str, ...] = ()

    @field_validator("name")
    @classmethod
    def _nameable(cls, name: str) -> str:
        return valid_name(name)

    @field_validator("features")
    @classmethod
    def _known(cls, features: tuple[str, ...]) -> tuple[str, ...]:
        # Lists features that a reader must support, so that an older one refuses the variant.
        if features:
            raise ValueError(f"it needs a newer Ingot, for: {', '.join(features)}")
        return features

    @model_validator(mode="after")
    def _padded(self) -> Serving:
        for dim, padding in self.padding.items():
            padding.check(dim, self.signature)
        if self.steps is not None:
            self.steps.check(self.signature)
        if self.generation is not None:
            self.generation.check(self.signature)
        return self


def encode(document: BaseModel) -> bytes:
    """Return a document as JSON; equal documents produce equal bytes, and so equal digests."""
    return document.model_dump_json(by_alias=True, exclude_none=True).encode()


def decode(kind: type[Document], raw: bytes, where: str) -> Document:
    """Parse and validate a document.

    Raises:
        InvalidArchive: it is not valid; the message names ``where`` and the first fault.
    """
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(str(part) for part in fault["loc"])
        raise InvalidArchive(f"{where} is not valid{f' at {path!r}' if path else ''}: {fault['msg']}") from error
    except InvalidArgument as error:
        raise InvalidArchive(f"{where} is not valid: {error}") from error
