"""Differences in the metadata of archives and variants, except measurements."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from ingot.model_store.diff.records import Change
from ingot.model_store.format import manifest
from ingot.model_store.format.archive import Archive
from ingot.model_store.format.variant import Variant
from ingot.steps import Steps
from ingot.tensors import Signature, TensorSpec

_SERVING = {
    "format",
    "precision",
    "requires",
    "recipe",
    "batchable",
    "padding",
    "defaults",
    "generation",
    "golden_tolerance",
    "parents",
    "provenance",
}


def of_archives(before: Archive, after: Archive, whole: bool) -> Iterator[Change]:
    """Yield differences in name and signature and, for ``whole`` archives, in the order of the variants."""
    first, second = {"name": before.name}, {"name": after.name}
    first |= _signature(before.signature)
    second |= _signature(after.signature)
    if whole:
        first["preferred variant"], second["preferred variant"] = before.variant().name, after.variant().name
    yield from _changes(first, second)


def of_variants(before: Variant, after: Variant) -> Iterator[Change]:
    """Yield differences in the format, requirements and origin of two variants."""
    yield from _changes(_variant(before), _variant(after))


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[Change]:
    for what in dict.fromkeys((*before, *after)):
        if before.get(what) != after.get(what):
            yield Change(what=what, before=before.get(what), after=after.get(what))


def _signature(signature: Signature) -> dict[str, str]:
    found = {**_specs("input", signature.inputs), **_specs("output", signature.outputs)}
    if signature.batch is not None:
        found["batch"] = signature.batch
    return {**found, **{f"range of {name}": str(bounds) for name, bounds in signature.ranges.items()}}


def _specs(what: str, specs: Sequence[TensorSpec]) -> dict[str, str]:
    return {f"{what} {spec.name}": str(spec) for spec in specs}


def _variant(variant: Variant) -> dict[str, str]:
    serving = variant.serving
    document = serving.model_dump(mode="json", include=_SERVING, by_alias=True)
    document.update(document.pop("provenance"))
    document["measured on"] = serving.evidence.machine
    document["keeps its accuracy budget"] = serving.evidence.holds
    documents = {
        layer.annotations.get(manifest.FILEPATH, ""): layer.digest
        for layer in variant.manifest.layers
        if layer.media_type in (manifest.DOCUMENT, manifest.STEP_FILE)
    }
    if (plan := variant.python_plan()) is not None:
        documents |= {**plan.files, "": f"{plan.file}:{plan.attribute}"}
    return {
        **dict(_flat("", document)),
        **_steps(serving.steps),
        **{f"file {name}" if name else "class": digest for name, digest in documents.items()},
    }


def _steps(steps: Steps | None) -> dict[str, str]:
    """Return the fields of steps by kind and name; labels, of which there may be many, are compared elsewhere."""
    if steps is None:
        return {}
    document = steps.model_dump(mode="json", exclude={"before", "after"})
    found = dict(_flat("steps", document))
    for step in (*steps.before, *steps.after):
        fields = step.model_dump(mode="json", exclude={"kind", "labels", "operations"})
        found |= _flat(f"step {step.kind}", fields)
        for number, operation in enumerate(getattr(step, "operations", ()), 1):
            changed = operation.model_dump(mode="json", exclude={"operation"}, exclude_defaults=True)
            described = " ".join(f"{name}={json.dumps(value)}" for name, value in changed.items())
            found[f"step {step.kind}: operation {number}"] = f"{operation.operation} {described}".strip()
    return {**found, "steps": ", ".join(step.kind for step in (*steps.before, *steps.after))}


def _flat(path: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield the leaves of a JSON document by path, as text, without empty ones."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(f"{path}.{key}" if path else key, item)
    elif value is not None and value not in ("", []):
        yield path, value if isinstance(value, str) else json.dumps(value)
