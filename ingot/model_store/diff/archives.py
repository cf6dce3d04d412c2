"""``diff``: the differences between two archives, variant by variant."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from ingot.errors import missing_package
from ingot.model_store.diff import facts, measured
from ingot.model_store.diff.answers import OpenGraph
from ingot.model_store.diff.records import Diff, Side, VariantDiff
from ingot.model_store.diff.stages import compare_steps
from ingot.model_store.diff.tensors import about, compare
from ingot.model_store.format import manifest
from ingot.model_store.format.archive import Archive
from ingot.model_store.format.variant import Variant

Progress = Callable[[str], None]


def diff(
    before: Archive,
    after: Archive,
    *,
    variants: tuple[str | None, str | None] = (None, None),
    labels: tuple[str, str] | None = None,
    progress: Progress = lambda step: None,
    open_graph: OpenGraph | None = None,
) -> Diff:
    """Compare two archives. Variants are matched by name; blobs and tensors of equal digests are not read.

    Args:
        before: the archive to compare with.
        after: the other archive.
        variants: names of the variants to compare with each other; with one name, the variant of that name in both
            archives; with none, all variants.
        labels: names of the two in messages and the result; by default name and digest.
        progress: called at the beginning of each step.
        open_graph: opens the graphs that answer raw inputs; without it, steps are not run.

    Raises:
        NotFound: an archive has no variant of that name.
        InvalidArchive: a part that is read is missing or damaged.
    """
    names = labels or (f"{before.name}@{before.digest}", f"{after.name}@{after.digest}")
    pairs = list(_pairs(before, after, variants))
    whole = variants == (None, None)
    first = _blobs(before, [one for one, _ in pairs if one is not None], whole)
    second = _blobs(after, [other for _, other in pairs if other is not None], whole)
    found = []
    for one, other in pairs:
        progress(f"Comparing variant {(other or one or before.variant()).name}")
        variant = _variant(one, other, first, names, progress)
        if open_graph is not None and variant.state == "changed" and one is not None and other is not None:
            progress(f"Comparing the steps of variant {variant.name}")
            variant = variant.model_copy(update={"steps": compare_steps(one, other, open_graph)})
        found.append(variant)
    return Diff(
        before=Side(label=names[0], digest=before.digest, size=sum(first.values())),
        after=Side(label=names[1], digest=after.digest, size=sum(second.values())),
        shared=sum(size for digest, size in second.items() if digest in first),
        changes=tuple(facts.of_archives(before, after, whole)),
        variants=tuple(found),
    )


def _pairs(
    before: Archive, after: Archive, variants: tuple[str | None, str | None]
) -> Iterator[tuple[Variant | None, Variant | None]]:
    first, second = variants
    if first is not None or second is not None:
        yield before.variant(first or second), after.variant(second or first)
        return
    known, others = ({variant.name: variant for variant in archive.variants} for archive in (before, after))
    for name in dict.fromkeys((*others, *known)):
        yield known.get(name), others.get(name)


def _blobs(archive: Archive, variants: Sequence[Variant], whole: bool) -> dict[str, int]:
    """Return the sizes of all blobs by digest."""
    found = {archive.descriptor.digest: archive.descriptor.size} if whole else {}
    for variant in variants:
        for item in (*variant.manifest.layers, variant.manifest.config, variant.descriptor):
            found[item.digest] = item.size
    return found


def _shared(variant: Variant, held: Collection[str]) -> int:
    weights = (layer for layer in variant.manifest.layers if layer.media_type == manifest.WEIGHT)
    return sum(layer.size for layer in weights if layer.digest in held)


def _variant(
    before: Variant | None, after: Variant | None, held: Collection[str], labels: tuple[str, str], progress: Progress
) -> VariantDiff:
    found: dict[str, Any] = {"name": "", "state": "changed"}
    if before is not None:
        found |= {"name": before.name, "size_before": before.size, "state": "removed"}
    if after is not None:
        found |= {"name": after.name, "size_after": after.size, "state": "added", "shared": _shared(after, held)}
    if before is not None and after is not None:
        found |= {"name": _both(before, after), "state": "unchanged", "same_model": True}
        if before.descriptor.digest != after.descriptor.digest:
            found |= {"state": "changed"} | _changed(before, after, labels, progress)
    return VariantDiff(**found)


def _both(before: Variant, after: Variant) -> str:
    return before.name if before.name == after.name else f"{before.name} and {after.name}"


def _changed(before: Variant, after: Variant, labels: tuple[str, str], progress: Progress) -> dict[str, Any]:
    one, other = before.serving.evidence, after.serving.evidence
    with about(labels[0]):
        expected = before.goldens()
    with about(labels[1]):
        actual = after.goldens()
    cases, goldens = measured.goldens(expected, actual)
    notes = list(measured.doubts(one, other))
    if expected and actual and not cases:
        notes.append("the golden answers are to different inputs")
    found = {
        "changes": tuple(facts.of_variants(before, after)),
        "measures": tuple(measured.measures(one, other)),
        "latency": tuple(measured.latencies(one, other)),
        "golden_cases": cases,
        "goldens": tuple(goldens),
    }
    graph = _graph(before, after, labels, notes, progress)
    return {**found, **graph, "notes": tuple(notes)}


def _graph(
    before: Variant, after: Variant, labels: tuple[str, str], notes: list[str], progress: Progress
) -> dict[str, Any]:
    """Return the differences between the models themselves; reasons why a difference is not known go to ``notes``."""
    if before.graph.digest == after.graph.digest:
        return {"same_model": True}
    if not (before.has_graphs and after.has_graphs):
        formats = dict.fromkeys((before.serving.format, after.serving.format))
        notes.append(f"tensors and operators are compared for ONNX graphs only; the format is {' and '.join(formats)}")
        return {"same_model": False}
    try:
        from ingot.model_store.diff.graphs import read_graph
    except ImportError as error:
        notes.append(str(missing_package(str(error.name), "comparing tensors and operators", "export")))
        return {"same_model": False}
    graph = compare(read_graph(before, labels[0]), read_graph(after, labels[1]), progress)
    if graph.same:
        notes.append("the graphs differ in the names, attributes or order of their nodes alone")
    return {"same_model": False, "graph": graph}
