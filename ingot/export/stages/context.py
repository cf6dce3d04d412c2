"""State shared by the stages of one export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from ingot.export.program import Eager, Runner
from ingot.export.proof.examples import Examples
from ingot.export.proof.parity import prove
from ingot.export.proof.states import Watched
from ingot.export.report import Journal, Rewrite
from ingot.export.rewrite.passes.manager import FxPass, OnnxPass, PassRecord
from ingot.model_store import BlobFolder, Golden, MemoryEvidence, ParityEvidence, ServingDefaults
from ingot.model_store.blobs.descriptor import Descriptor
from ingot.model_store.format.manifest import Division
from ingot.steps import Described
from ingot.tensors import Array, Signature
from ingot.tensors.padding import Padding


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to export; see :func:`ingot.export.export_model` for each."""

    name: str
    source: str
    batch_dim: str | None
    independent: bool = False
    opset: int | None
    capture: str
    fx_rules: tuple[FxPass, ...]
    onnx_rules: tuple[OnnxPass, ...]
    target: str
    device: str
    paddings: Mapping[str, Padding]
    tensor_parallel: Mapping[str, Division] | None = None
    serving: ServingDefaults | None = None
    steps: Described | None = None


@dataclass(kw_only=True)
class Context:
    """One export in progress.

    Attributes:
        options: how to export.
        journal: records what the stages do, for the report.
        reference: the original model, which every later form must equal.
        examples: inputs to compare with. The capture stage adds sizes that break a condition of its graph.
        eager: the original as a module; None for an ONNX file.
        blobs: the files of the archive.
        conditions: conditions on sizes that held at every size tested, where not every declared size was tested.
        narrow: whether the captured graph has conditions that some declared sizes break.
        broken: sizes at which a captured graph is wrong because they break its condition.
        search_limit: a remark that the search for such sizes used up its budget, or empty.
        followed: an ONNX graph of a model that is packed in another format,
            in which the independence of samples is checked; None without one.
        stacks: where the nodes of the ONNX graph come from, by their outputs: stack traces.
        watched: the original, which notes state that it changes; None for an ONNX file.
        memory: the plan of a call's memory; None where there is no captured graph, or it does not run without data.
        deviations: operators whose ONNX form differs from PyTorch within a stated bound, with their places.
    """

    options: Options
    journal: Journal
    reference: Runner
    examples: Examples
    eager: Eager | None = None
    blobs: BlobFolder = field(default_factory=BlobFolder.scratch)
    conditions: tuple[str, ...] = ()
    narrow: bool = False
    broken: list[dict[str, int]] = field(default_factory=list)
    search_limit: str = ""
    followed: tuple[BlobFolder, Descriptor] | None = None
    stacks: Mapping[str, str] = field(default_factory=dict)
    watched: Watched | None = None
    memory: MemoryEvidence | None = None
    deviations: tuple[str, ...] = ()

    def prove(
        self, candidate: Runner, signature: Signature, most: int | None = None
    ) -> tuple[tuple[ParityEvidence, ...], tuple[Golden, ...]]:
        """Compare a candidate with the original; see :func:`ingot.export.proof.parity.prove`.

        Raises:
            ParityError: it differs, or the original changes a state that is not an input and output of the graph.
        """
        exact = _InDouble(self.eager) if self.eager is not None else None
        remark = self._remark if most is None else lambda text: None
        try:
            return prove(self.reference, candidate, signature, self.examples, exact=exact, most=most, remark=remark)
        finally:
            if self.watched is not None:
                self.watched.check()

    def _remark(self, text: str) -> None:
        if text not in self.journal.notes:
            self.journal.note(text)

    def record_rules(self, records: Sequence[PassRecord]) -> str:
        """Add rewrite rules to the report, with their remarks, and return which of them changed the graph."""
        remarks = {(rule.kind, rule.name): rule.remark for rule in self.options.fx_rules}
        remarks |= {(rule.kind, rule.name): rule.remark for rule in self.options.onnx_rules}
        self.journal.rewrites.extend(Rewrite(**asdict(record)) for record in records)
        for record in records:
            if record.rejected:
                self.journal.note(f"rule '{record.rule}' ({record.kind}) was left out: {record.rejected}")
            elif record.matches and (remark := remarks[record.kind, record.rule]):
                noun = "node" if record.matches == 1 else "nodes"
                self.journal.note(f"rule '{record.rule}' changed {record.matches} {noun}: {remark}")
        return ", ".join(f"{item.rule} {item.matches}x" for item in records if item.matches and not item.rejected)


class _InDouble:
    """The original in double precision, built only where rounding is in question."""

    def __init__(self, eager: Eager):
        self._eager = eager

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return self._eager.in_double().run(inputs)
