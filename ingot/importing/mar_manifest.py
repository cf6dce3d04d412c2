"""``MAR-INF/MANIFEST.json``, as far as it is read."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class Record(BaseModel):
    """A part of the manifest, whose keys are in camel case; unknown ones are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, protected_namespaces=())


MANIFEST = "MAR-INF/MANIFEST.json"
WORKFLOW = "WAR-INF/MANIFEST.json"
"""The manifest of a workflow; torch-workflow-archiver writes it."""


class Workflow(Record):
    """The workflow of a ``.war`` archive."""

    workflow_name: str = Field(min_length=1, max_length=255)
    spec_file: str = Field(min_length=1, max_length=255)
    handler: str | None = None


class MarModel(Record):
    """The model of an archive."""

    model_name: str = Field(min_length=1, max_length=255)
    model_version: str | int | float | None = None
    serialized_file: str | None = None
    model_file: str | None = None
    handler: str | None = None
    requirements_file: str | None = None
    config_file: str | None = None
    source_vocab: str | None = None
