"""``ingot inspect``, and the descriptions of archives in JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.cli.checks import check_apart, check_out
from ingot.cli.completion import references
from ingot.cli.options import Json, StoreOption
from ingot.cli.output import duration, note, print_json, printable, say, size, stdout
from ingot.report import units

if TYPE_CHECKING:
    from ingot.model_store import Archive, Variant
    from ingot.model_store.format.evidence import Agreement, MetricEvidence
    from ingot.runtime.loading.replay import Replay


def inspect(
    model: Annotated[
        str,
        typer.Argument(
            help="An archive file, or a reference such as digits:1; #variant selects whose report is written.",
            autocompletion=references,
        ),
    ],
    report: Annotated[
        Path | None, typer.Option(help="Write the export or quantization report to this file: .html, .json or .txt.")
    ] = None,
    replay: Annotated[
        bool,
        typer.Option(
            "--replay", help="Also run each ONNX variant, or the variant after #, on its goldens, as a server does."
        ),
    ] = False,
    store: StoreOption = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also show the bound of a call's memory as a formula of the sizes.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the contents of an archive, after checking every blob's digest.

    In a registry only the digests of documents are checked: nothing else is downloaded. The report is written from data
    in the archive: the quantization report of a quantized variant, the export report of an exported one.

    With --replay the proof in the archive is run again on this machine: the graph runs goldens of tensors, and the
    steps before and after it take part for goldens of raw inputs, such as texts. The exit code is 1 if an answer
    differs.

    Examples:

        ingot inspect digits:1 --json
        ingot inspect oci://registry.local:5000/team/digits:prod
        ingot inspect digits:1#fp32 --report export.html
        ingot inspect sst2.ingot --replay
    """
    from ingot.model_store import Store
    from ingot.model_store.places import locate

    located = locate(model, Store(store))
    if report is not None:
        check_out(report)
        check_apart(report, model=located.name)
    archive = located.open()
    if located.variant is not None:
        archive.variant(located.variant)
    verify(archive)
    if report is not None:
        from ingot.cli.archives.report import write

        note(f"wrote the report of variant '{write(archive, report, located.variant)}' to {report}")
    replayed = [*_replayed(archive, located.variant)] if replay else []
    if as_json:
        print_json({**describe(archive), **({"replayed": [*map(asdict, replayed)]} if replay else {})})
        return
    _print(archive, verbose=verbose)
    for found in replayed:
        parts = [f"golden cases: {found.cases}", *([f"of raw inputs: {found.raw}"] if found.raw else [])]
        apart = f"; largest difference {found.largest:.1e}, tolerance {found.tolerance:.0e}" if found.cases else ""
        say(f" replay  {found.variant}: {', '.join(parts)}{apart}")


def _replayed(archive: Archive, name: str | None) -> Iterator[Replay]:
    """Yield the replays of a variant, or of all whose format cannot run code.

    Raises:
        InvalidArchive: an answer differs.
        Unsupported: a variant cannot be run here.
    """
    from ingot.runtime.loading.replay import replay

    for variant in archive.variants if name is None else [archive.variant(name)]:
        if name is not None or not variant.executable:
            yield replay(variant.unpacked())


def describe(archive: Archive) -> dict[str, Any]:
    """Return the description of an archive for JSON."""
    return {
        "name": archive.name,
        "digest": archive.digest,
        "size": archive.size,
        "signatures": signatures(archive),
        "variants": [
            {
                **variant.serving.model_dump(mode="json", exclude={"name", "schema_version"}),
                "digest": variant.descriptor.digest,
                "size": variant.size,
                "executable": variant.executable,
            }
            for variant in archive.variants
        ],
    }


def verify(archive: Archive) -> None:
    """Check every blob's digest, unless the archive is in a registry: its documents were checked when it was opened.

    Raises:
        InvalidArchive: a blob is missing or damaged.
    """
    from ingot.model_store import BlobFolder
    from ingot.model_store.format.tar import TarBlobs

    if isinstance(archive.blobs, (BlobFolder, TarBlobs)):
        archive.verify()


def signatures(archive: Archive) -> list[dict[str, Any]]:
    """Return the unverified claims of an archive's signatures, for JSON."""
    if not archive.attached:
        return []
    from ingot.model_store.trust import cosign, signing

    return [asdict(claim) for claim in (*signing.describe(archive), *cosign.describe(archive))]


def _print(archive: Archive, *, verbose: bool) -> None:
    from rich.table import Table

    plan = archive.variants[0].python_plan()  # before anything is printed, since the plan may not be valid
    say(f"{archive.name}  {archive.digest}")
    serving = archive.variants[0].serving
    cached = serving.generation is not None
    if cached:
        from ingot.cli.archives.steps import generating

        proved = (variant.serving.evidence for variant in archive.variants if variant.serving.evidence.tokens)
        for title, line in generating(serving.generation, next(proved, serving.evidence)):
            say(f"{title:>7}  {line}")
    if serving.steps is not None:
        from ingot.cli.archives.steps import described

        proofs = (variant.serving.evidence.steps for variant in archive.variants)  # that of the original
        for title, line in described(serving.steps, next(filter(None, proofs), None)):
            say(f"{title:>7}  {line}")
    for title, specs in (("input", archive.signature.inputs), ("output", archive.signature.outputs)):
        for spec in specs:
            if not (cached and spec.name.endswith((".key", ".value"))):
                say(f"{title:>7}  {spec}")
    why = archive.variants[0].serving.provenance.unbatched
    alone = "none: one request at a time" + (f", as {why}" if why else "")
    say(f"  batch  {'rows of any lengths' if cached else archive.signature.batch or alone}")
    for symbol, bounds in archive.signature.ranges.items():
        say(f"  range  {symbol} = {bounds}")
    if (defaults := archive.variants[0].serving.defaults) is not None:
        for title, pairs in (("states", defaults.states), ("repeat", defaults.repeat)):
            if pairs:
                say(f"{title:>7}  {','.join(f'{name}={output}' for name, output in pairs.items())}")
        if defaults.labels:
            say(f" labels  {len(defaults.labels)} names of classes")
    if plan is not None:
        kind = "class" if plan.interface == "class" else "handler"
        say(f"{kind:>7}  {plan.attribute} of {plan.file}, with {units.counted(len(plan.files), 'file')}")
        held = f" (one of {units.counted(len(plan.wheels), 'wheel')} in the archive)" if plan.wheels else ""
        for requirement in plan.requirements:
            say(f"  needs  {requirement}{held}")
        for permission in plan.permissions:
            say(f"  needs  the permission {permission} (--permit)")
    for line in _paddings(archive):
        say(f"padding  {line}")
    table = Table("variant", "size", "latency by batch", "evidence")
    for variant in archive.variants:
        table.add_row(variant.name, size(variant.size), _latency(variant, archive), _evidence(variant, verbose=verbose))
    stdout().print(table, markup=False)
    for claim in signatures(archive):
        say(f"signed by {claim['keyid']}, {claim['created']}, as {claim['name']} (not checked: ingot trust verify)")
    provenance = archive.variant().serving.provenance
    say(f"from {provenance.source}, {provenance.created}; preferred: {archive.variant().name}")


def _paddings(archive: Archive) -> Iterator[str]:
    """Yield how each dimension is padded, in the form of ``--pad``, with the restrictions of the padding."""
    # Only the original has this evidence, and quantized variants come before it.
    tried = {dim for variant in archive.variants for dim in variant.serving.evidence.tried_paddings}
    for dim, padding in archive.variants[0].serving.padding.items():
        values = ",".join(f"{name}={value:g}" for name, value in padding.values.items())
        facts = [f"{dim}:{values}" + (f"@{','.join(map(str, padding.buckets))}" if padding.buckets else "")]
        if padding.masks:
            facts.append(f"not of rows that {' or '.join(padding.masks)} hides whole")
        if dim in tried:
            facts.append("shown by examples; its graph does not prove it for all values")
        yield "; ".join(facts)


def _latency(variant: Variant, archive: Archive) -> str:
    """Return the latencies by batch; for an original, those measured together with a variant made from it."""
    evidence = variant.serving.evidence
    baselines = [item.serving.evidence.baseline for item in archive.variants if _made_from(item, variant)]
    speedups = evidence.speedups()
    return "\n".join(
        f"{item.rows}: {duration(item.seconds)}" + (f" ({speedups[item.rows]:.2f}x)" if item.rows in speedups else "")
        for item in (baselines[0] if baselines else evidence.latency)
    )


def _made_from(variant: Variant, original: Variant) -> bool:
    """Return whether a variant was made from an original, and has measurements of it."""
    return original.descriptor.digest in variant.serving.parents and bool(variant.serving.evidence.baseline)


def _evidence(variant: Variant, *, verbose: bool) -> str:
    evidence = variant.serving.evidence
    lines = [f"{item.tensor}: error {item.error:.1e} in {item.cases} cases" for item in evidence.parity]
    if evidence.metric is not None:
        lines.append(_metric(evidence.metric))
    if variant.executable:
        lines.append(f"can run its author's code (format {variant.serving.format})")
    if evidence.holds is False:
        lines.append("exceeds its accuracy budget")
    if evidence.bounds is not None:
        lines += [f"not bounded: {reason}" for reason in evidence.bounds.reasons[:3]]
        lines += [f"memory of a call: {call}" for call in evidence.bounds.calls if not call.measured]
        if (loose := evidence.bounds.loosest) is not None:
            lines.append(f"not used to limit requests and batches: {loose}")
        if verbose and evidence.bounds.peak:
            lines.append(f"bound of a call's memory in bytes: {evidence.bounds.peak}")
    if evidence.memory is not None:
        fixed, row = size(evidence.memory.fixed), size(evidence.memory.per_row)
        lines.append(f"memory plan of a call on a GPU, at the examples' sizes: {fixed}, {row} per sample")
    lines += [f"stated bound: {deviation}" for deviation in evidence.deviations]
    needs = {name: variant.serving.requires.get(name, "") for name in ("device", "engine", "inference_precision")}
    lines += [f"{name.replace('_', ' ')}: {value}" for name, value in needs.items() if value not in ("", "onnxruntime")]
    return "\n".join(map(printable, lines + [_agreement(item, variant) for item in evidence.agreement]))


def _metric(item: MetricEvidence) -> str:
    held = "held-out " if item.held_out else "" if item.data else "generated "
    return f"{item.name}: {item.after.value:.4f}, the original {item.before.value:.4f}, on {item.rows} {held}samples"


def _agreement(item: Agreement, variant: Variant) -> str:
    what = "top class" if variant.serving.generation is None else "most likely token"
    top1 = f", same {what} {item.top1:.2%}" if item.top1 is not None else ""
    return f"{item.tensor} against the original's: cosine {item.cosine:.4f}{top1}"
