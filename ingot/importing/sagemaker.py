"""SageMaker's ``model.tar.gz``: a folder with ``code/inference.py``, which runs as a handler."""

from __future__ import annotations

import json
from pathlib import Path

from ingot.importing import custom_handlers
from ingot.importing.mar_manifest import MANIFEST, MarModel
from ingot.importing.members import Members
from ingot.importing.record import Candidate, Consent, Imported
from ingot.model_store.references import name_from
from ingot.runtime.engines.python.torchserve.ts.sagemaker import SCRIPT

_REQUIREMENTS = "code/requirements.txt"


def base_of(members: Members) -> str | None:
    """Return the prefix of the names of the files, empty or one folder; None for another archive."""
    found = [name.removesuffix(SCRIPT) for name in members.sizes if f"/{name}".endswith(f"/{SCRIPT}")]
    return next((base for base in found if base.count("/") <= 1 and base + MANIFEST not in members.sizes), None)


def candidate(members: Members, base: str, scratch: Path, consent: Consent) -> Candidate:
    """Return the model of an archive.

    Args:
        members: its files.
        base: the prefix of their names.
        scratch: an empty folder for unpacked files.
        consent: the user's consent.
    """
    name = members.path.resolve().name.partition(".")[0]

    def read() -> Imported:
        requirements = _REQUIREMENTS if base + _REQUIREMENTS in members.sizes else None
        model = MarModel(modelName=name, handler="sagemaker", requirementsFile=requirements)
        folder = scratch / "model"
        found = custom_handlers.read(members, base, model, folder, consent)
        (folder / MANIFEST).parent.mkdir(exist_ok=True)
        (folder / MANIFEST).write_text(json.dumps({"model": {"modelName": name, "handler": SCRIPT}}))
        return found

    return Candidate(str(members.path), name_from(name), None, read, called=name)
