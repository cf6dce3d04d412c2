"""SageMaker's ``model.tar.gz`` and MLflow's folders, whose code runs as a handler."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ingot.importing import custom_handlers
from ingot.importing.mar_manifest import MANIFEST, MarModel
from ingot.importing.members import Members
from ingot.importing.record import Candidate, Consent, Imported
from ingot.model_store.references import name_from
from ingot.runtime.engines.python.torchserve.ts import mlflow, sagemaker


class _Form(NamedTuple):
    """The handler of a form, its file, and that of its requirements; whether the file has the settings."""

    handler: str
    file: str
    requirements: str
    configures: bool


_FORMS = (
    _Form("sagemaker", sagemaker.SCRIPT, "code/requirements.txt", configures=False),
    _Form("mlflow", mlflow.MODEL, "requirements.txt", configures=True),
)
FILES = tuple(form.file for form in _FORMS)
"""The files of which one shows that a folder is of one of these."""


def candidates(members: Members, scratch: Path, consent: Consent) -> tuple[Candidate, ...]:
    """Return the model of an archive, which may be in one folder of it; none of another archive.

    Args:
        members: its files.
        scratch: an empty folder for unpacked files.
        consent: the user's consent.
    """
    found = ((form, base) for form in _FORMS for base in _bases(members, form.file))
    return tuple(_candidate(members, form, base, scratch, consent) for form, base in found)[:1]


def _bases(members: Members, file: str) -> Iterator[str]:
    for name in members.sizes:
        base = name.removesuffix(file)
        if f"/{name}".endswith(f"/{file}") and base.count("/") <= 1 and base + MANIFEST not in members.sizes:
            yield base


def _candidate(members: Members, form: _Form, base: str, scratch: Path, consent: Consent) -> Candidate:
    name = members.path.resolve().name.partition(".")[0]

    def read() -> Imported:
        requirements = form.requirements if base + form.requirements in members.sizes else None
        config = form.file if form.configures else None
        model = MarModel(modelName=name, handler=form.handler, requirementsFile=requirements, configFile=config)
        folder = scratch / "model"
        found = custom_handlers.read(members, base, model, folder, consent)
        (folder / MANIFEST).parent.mkdir(exist_ok=True)
        (folder / MANIFEST).write_text(json.dumps({"model": {"modelName": name, "handler": form.file}}))
        return found

    return Candidate(str(members.path), name_from(name), None, read, called=name)
