"""Descriptors: references of OCI documents to blobs by digest."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

MAX_DOCUMENT_BYTES = 4 << 20  # OCI registries refuse larger manifests
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


class OCIDocument(BaseModel):
    """Fields have the names of OCI; unknown fields are ignored, as OCI requires."""

    model_config = ConfigDict(
        frozen=True, defer_build=True, extra="ignore", populate_by_name=True, alias_generator=to_camel
    )


class Descriptor(OCIDocument):
    """Type, digest and size of a blob."""

    media_type: str = Field(max_length=255)
    digest: Digest
    size: int = Field(ge=0, lt=1 << 63)
    artifact_type: str | None = Field(None, max_length=255)
    annotations: dict[str, str] = {}

    @property
    def hex(self) -> str:
        return self.digest.removeprefix("sha256:")
