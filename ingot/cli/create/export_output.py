"""What ``ingot export`` prints of an archive: what was proved, and what was not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ingot.cli.archives.steps import generating
from ingot.cli.output import note, say, size
from ingot.model_store import Archive, Variant
from ingot.model_store.format.evidence import StepsEvidence
from ingot.steps import Steps

# Reasons why a graph is not bounded that are shown.
_REASONS = 3


def print_archive(archive: Archive, out: Path | None, why: str) -> None:
    """Print what an export has proved of an archive.

    Args:
        archive: the archive, with one variant.
        out: its file.
        why: how its task was found; empty if it was not searched.
    """
    variant = archive.variant()
    evidence = variant.serving.evidence
    if (generation := variant.serving.generation) is not None:
        for title, line in generating(generation, evidence):
            note(f"  {title:14} {line}")
    if (steps := variant.serving.steps) is not None:
        note(f"  {'task':14} {steps.task}{f' ({why})' if why else ''}")
        for title, line in _steps(steps, evidence.steps):
            note(f"  {title:14} {line}")
    for parity in evidence.parity:
        note(
            f"{parity.tensor}: equals the original in {parity.cases} cases, "
            f"largest error {parity.error:.1e} (tolerance {parity.tolerance:.0e})"
        )
    for line in _remarks(variant):
        note(line)
    say(f"{out}: {archive.name}, {variant.name}, {size(variant.size)}")


def _steps(steps: Steps, proof: StepsEvidence | None) -> Iterator[tuple[str, str]]:
    """Yield the proof of steps as lines, each with a title."""
    chain = " -> ".join((*(step.kind for step in steps.before), "graph", *(step.kind for step in steps.after)))
    if proof is None:
        yield "steps", chain
        return
    kind = {"tokenize": "texts", "audio": "sounds", "bytes": "files"}.get(steps.before[0].kind, "pictures")
    if kind == "texts":
        kind += " and pairs" if any(spec.name == "text_pair" for spec in steps.inputs) else ""
        yield "tokenizer", f"the loaded tokenizer stored; {proof.items} hard {kind}: ids equal"
    else:
        equal = f"equal within {proof.deviation:.0e}" if proof.deviation else "equal to the bit"
        yield "processor", f"{proof.reference}; values of {proof.items} hard {kind}: {equal}"
    if not proof.answers:
        yield "steps", chain
        return
    close = f" within {proof.error:.0e}" if proof.error else ""
    if any(step.kind in ("masks", "segments") for step in steps.after):
        close = f" but for {proof.error:.0e} of their pixels" if proof.error else " to the pixel"
    yield "steps", f"{chain}; answers of {proof.answers} {kind} equal to {proof.reference}'s{close}"


def _remarks(variant: Variant) -> Iterator[str]:
    for remark in variant.serving.provenance.notes:
        if not remark.startswith("captured by torch.export, torch"):
            yield f"note: {remark}"
    bounds = variant.serving.evidence.bounds
    for reason in bounds.reasons[:_REASONS] if bounds is not None else ():
        yield f"not bounded by the sizes of its inputs, so it is served in an engine process: {reason}"
