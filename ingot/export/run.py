"""One run of the export pipeline: capture, rewrite, lower, rewrite, pack, with a proof after each stage."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import onnx_ir as ir

from ingot.errors import ExportError, InvalidArgument, ParityError
from ingot.export import arguments
from ingot.export.capture import assumptions, counterexamples, exported, ladder
from ingot.export.lower import aoti, packed, partition
from ingot.export.lower import onnx as lower_onnx
from ingot.export.lower import program as lower_program
from ingot.export.lower.packed import Packed
from ingot.export.lower.translations import TRANSLATIONS
from ingot.export.program import Captured, Eager, Program, Runner
from ingot.export.proof import caches, extremes, misdeclared, padded
from ingot.export.proof.examples import Examples
from ingot.export.proof.parity import prove, rows_touch, tolerance
from ingot.export.report import Journal, Rewrite, graphs, page, view
from ingot.export.rewrite.passes.manager import FxPass, OnnxPass, PassManager, PassRecord
from ingot.export.source.subject import Subject
from ingot.model_store import Archive, BlobFolder, Evidence, Golden, ParityEvidence, Provenance, Serving, add_variant
from ingot.model_store.format import onnx_graph
from ingot.padding import Padding, declared
from ingot.runtime import Engine, devices, load_engine, profile
from ingot.tensors import Array, Signature, TensorSpec, symbols

# Cases that each rewrite rule is proved on; the end of a stage is proved on all.
_CASES_OF_A_RULE = 2
# Elements of the inputs of a case.
_LARGEST_CASE = 1 << 26
# FLOPs of a call whose time is measured.
_MOST_TIMED = 3e11

LOWERINGS: dict[str, Callable[[Program, BlobFolder, Options], Packed]] = {
    "aoti": lambda program, blobs, options: aoti.pack(program, blobs, device=options.device),
    "pt2": lambda program, blobs, options: lower_program.pack(program, blobs),
    "partitioned": lambda program, blobs, options: partition.pack(
        program, blobs, opset=options.opset, translations=TRANSLATIONS
    ),
}
"""Targets other than ONNX, whose graph is rewritten before it is packed."""


@dataclass(frozen=True)
class Options:
    """How to export; each is described at :func:`ingot.export.export_model`."""

    name: str
    source: str
    batch_dim: str | None
    opset: int | None
    capture: str
    fx_rules: tuple[FxPass, ...]
    onnx_rules: tuple[OnnxPass, ...]
    target: str
    device: str
    paddings: Mapping[str, Padding] = field(default_factory=dict)


@dataclass(frozen=True)
class Original:
    """What everything is held against, and inputs to ask it."""

    runner: Runner
    examples: Examples
    eager: Eager | None = None

    def prove(
        self, candidate: Runner, signature: Signature, most: int | None = None
    ) -> tuple[tuple[ParityEvidence, ...], tuple[Golden, ...]]:
        """Hold a candidate against the original; see :func:`ingot.export.proof.parity.prove`."""
        exact = _InDouble(self.eager) if self.eager is not None else None
        return prove(self.runner, candidate, signature, self.examples, exact=exact, most=most)


class _InDouble:
    """The original in double precision, which is made only where rounding is in question."""

    def __init__(self, eager: Eager):
        self._eager = eager

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return self._eager.in_double().run(inputs)


class Run:
    """One export.

    Args:
        original: what the result must equal.
        options: how to export.
        journal: keeps what is done.
    """

    def __init__(self, original: Original, options: Options, journal: Journal):
        self._original = original
        self._options = options
        self._journal = journal
        self._blobs = BlobFolder.scratch()
        self._unproved: list[str] = []
        self._short = ""

    def from_module(self, subject: Subject) -> Archive:
        """Export a module.

        Raises:
            ExportError: it cannot be captured or lowered.
            ParityError: no form of it is equal.
        """
        journal, options = self._journal, self._options
        journal.note(*subject.notes)
        journal.note(*(f"fixed in the graph: {constant}" for constant in subject.eager.arguments.constants))
        loose = arguments.outside_parameters(subject.eager.module, list(subject.eager.arguments.fixed))
        journal.note(*(f"'{name}' is no parameter of forward, whose **kwargs may ignore it" for name in loose))
        captured = self._capture(subject)
        journal.note(*captured.log)
        if isinstance(captured, ladder.Legacy):
            if options.target != "onnx":
                raise InvalidArgument(f"TorchScript goes to ONNX only, not to target '{options.target}'")
            return self.from_onnx(captured.model, captured.signature)
        journal.graphs.append(graphs.of_fx("FX graph as captured", captured.exported.graph))
        journal.note(*_unused(captured, subject))
        to_onnx = options.target == "onnx"
        program = self._rewrite_program(captured, subject, tidy=not to_onnx)
        if program is not captured:
            journal.graphs.append(graphs.of_fx("FX graph rewritten", program.exported.graph))
        if not to_onnx:
            with journal.stage("lower", f"Translating to {options.target}"):
                lowered = LOWERINGS[options.target](program, self._blobs, options)
            with contextlib.suppress(Exception):  # what ONNX would lack is a remark, which not every program can give
                journal.outside_opset = lower_onnx.outside(program, options.opset, TRANSLATIONS)
            return self._archive(lowered, packed.precision_of(program), program.signature)
        with journal.stage("lower", "Translating to ONNX"):
            try:
                model = lower_onnx.lower(program, options.opset, TRANSLATIONS, remark=journal.note)
            except ExportError:
                tidied = self._rewrite_program(program, subject) if program is captured else program
                if tidied is program:
                    raise
                model = lower_onnx.lower(program := tidied, options.opset, TRANSLATIONS, remark=journal.note)
        return self.from_onnx(model, program.signature)

    def from_onnx(self, model: ir.Model, signature: Signature) -> Archive:
        """Rewrite an ONNX model and pack it.

        Raises:
            ExportError: it does not load.
            ParityError: it is not equal to the original.
        """
        # The rules and their proofs then handle a small graph, whatever the weights.
        onnx_graph.externalize(model, self._blobs)
        self._journal.graphs.append(graphs.of_onnx("ONNX graph as translated", model))
        model, modified = self._rewrite_model(model, signature)
        if modified:
            self._journal.graphs.append(graphs.of_onnx("ONNX graph rewritten", model))
        precision = packed.precision(_weights(model), signature)
        graph, weights = onnx_graph.pack(model, self._blobs)
        requires = {"engine": "onnxruntime", "opset": str(model.opset_imports.get("", 0))}
        return self._archive(Packed(graph, weights, "onnx", requires), precision, signature)

    def _capture(self, subject: Subject) -> ladder.Captured:
        task = ladder.Task(
            subject.eager, subject.inputs, subject.ranges, subject.example, subject.output_names, self._options.opset
        )
        with self._journal.stage("capture") as stage:

            def check(captured: ladder.Captured) -> None:
                if isinstance(captured, Program):  # an ONNX model is proved when it is packed
                    stage.parity = self._prove_captured(captured, subject, "captured")

            try:
                captured, attempts = ladder.capture(task, self._options.capture, check, self._journal.progress)
            except ExportError as error:
                remedy = caches.remedy(subject.eager, subject.examples) if subject.eager.caches else ""
                if not remedy:
                    raise
                raise ExportError(f"{remedy} ({error})") from error
            conditions = f"; held at all sizes that were tried: {'; '.join(self._unproved)}" if self._unproved else ""
            stage.detail = f"{attempts[-1].route}{conditions}"
        self._journal.attempts.extend(attempts)
        return captured

    def _prove_captured(self, program: Program, subject: Subject, which: str) -> tuple[ParityEvidence, ...]:
        """Prove a program, also at sizes that its guards forbid, because later stages drop the guards."""
        self._journal.progress(f"Searching for sizes that break a condition of the {which} graph")
        assumed = assumptions.find(program.exported, subject.inputs)
        broken, unsure = counterexamples.search(assumed, subject.examples.default_sizes, subject.ranges)
        conditions = [item.text for item in assumed if not all(map(item.holds, broken))]
        for sizes in broken:
            if _elements(subject.inputs, sizes) > _LARGEST_CASE:
                shown = ", ".join(f"{name}={size}" for name, size in sizes.items())
                raise ParityError(
                    f"the capture is right only where {'; '.join(conditions)}, which is not so at {shown}: too large "
                    "to be tried; give the dimensions ranges"
                )
        self._original = replace(self._original, examples=self._original.examples.at(broken))
        self._journal.progress(f"Proving that the {which} graph equals the model")
        graph = Captured(exported.unguarded(program.exported), program.signature, subject.eager.device)
        try:
            parity, _ = self._original.prove(graph, program.signature)
        except ParityError as error:
            if not broken:
                raise
            where = "; ".join(conditions)
            raise ParityError(
                f"{error}; the capture is right only where {where}: declare ranges within that"
            ) from error
        self._unproved = list(dict.fromkeys(item.text for item in unsure))
        self._short = counterexamples.short(assumed)
        return parity

    def _rewrite_program(self, program: Program, subject: Subject, *, tidy: bool = True) -> Program:
        """Apply the FX rules and capture the result anew, which brings its shapes and metadata up to date.

        Capturing again takes as long as the first time. Without ``tidy``, what rules did that have a counterpart for
        the ONNX graph is left to that, unless another rule changed something too.
        """

        def proof(graph: Any) -> float:
            candidate = Captured(graph, program.signature, subject.eager.device)
            parity, _ = self._original.prove(candidate, program.signature, _CASES_OF_A_RULE)
            return max(item.error for item in parity)

        with self._journal.stage("rewrite the FX graph", "Rewriting the FX graph") as stage:
            graph, records = PassManager(self._options.fx_rules, proof).run(exported.unguarded(program.exported))
            done = {record.rule for record in records if record.matches and not record.rejected}
            tidying = {rule.name for rule in self._options.fx_rules if rule.tidies}
            if not tidy and done <= tidying:
                records = tuple(record for record in records if record.rule not in done)
            elif done:
                try:
                    rewritten = self._traced_again(graph, program, subject)
                    stage.parity = self._prove_captured(rewritten, subject, "rewritten")
                except ExportError as error:
                    reason = f"the rewritten graph is left out: {error}"
                    records = tuple(replace(item, rejected=item.rejected or reason) for item in records if item.matches)
                else:
                    program = rewritten
            stage.detail = self._note_rewrites(records)
        return program

    def _traced_again(self, graph: Any, program: Program, subject: Subject) -> Program:
        example = subject.eager.tensors(subject.example)
        options = {**program.options, "strict": False}  # the graph holds operators only, and no user code
        try:
            traced = exported.trace(exported.positional(graph), subject.inputs, subject.ranges, example, **options)
        except Exception as error:  # torch.export raises many kinds
            raise ExportError(str(error).strip().partition("\n")[0] or type(error).__name__) from error
        made = exported.program(traced, subject.inputs, subject.ranges, subject.output_names, program.log)
        return replace(made, options=program.options)

    def _rewrite_model(self, model: ir.Model, signature: Signature) -> tuple[ir.Model, bool]:
        def proof(graph: ir.Model) -> float:
            descriptor, _ = onnx_graph.pack(graph.clone(), self._blobs)
            with contextlib.closing(load_engine(self._blobs.path(descriptor), device="cpu")) as engine:
                parity, _ = self._original.prove(engine, signature, _CASES_OF_A_RULE)
            return max(item.error for item in parity)

        with self._journal.stage("rewrite the ONNX graph", "Rewriting the ONNX graph") as stage:
            model, records = PassManager(self._options.onnx_rules, proof).run(model)
            stage.detail = self._note_rewrites(records)
        return model, bool(stage.detail)

    def _note_rewrites(self, records: Sequence[PassRecord]) -> str:
        """Keep what rules did, and say which of them changed the graph."""
        self._journal.rewrites.extend(Rewrite(**asdict(record)) for record in records)
        for record in records:
            if record.rejected:
                self._journal.note(f"rule '{record.rule}' ({record.kind}) was left out: {record.rejected}")
        return ", ".join(f"{item.rule} {item.matches}x" for item in records if item.matches and not item.rejected)

    def _archive(self, lowered: Packed, precision: str, signature: Signature) -> Archive:
        """Prove the packed model, measure it, and put it into an archive with the report of it all."""
        journal, options = self._journal, self._options
        signature, notes = self._with_batch(signature)
        journal.note(*lowered.notes, *notes)
        if self._unproved:
            many = "conditions" if len(self._unproved) > 1 else "condition"
            journal.note(
                f"{len(self._unproved)} {many} on sizes in the model's code held at all sizes that were tried, but not "
                f"all were{self._short}; the report names them, and narrower ranges in --input may prove them"
            )
        paddings = declared(options.paddings, signature)
        with contextlib.closing(self._load(lowered)) as engine:
            with journal.stage("pack", "Proving that the graph equals the model") as stage:
                stage.parity, goldens = self._original.prove(engine, signature)
                journal.note(*padded.prove(engine, signature, paddings, self._original.examples))
            found = extremes.remarks(self._original.runner, engine, self._original.examples, tolerance(signature))
            journal.note(*found)
            with journal.stage("measure", "Measuring"):
                batches = [rows for rows in profile.BATCHES if self._affordable(signature, rows)]
                latency = profile.measure(engine, signature, goldens[0].inputs, batches, budget=0.1, least=1)
        worst = max((item.tolerance for item in stage.parity), default=tolerance(signature))
        serving = Serving(
            name=options.name,
            variant=precision if lowered.format == "onnx" else f"{precision}-{lowered.format}",
            format=lowered.format,
            precision=precision,
            signature=signature,
            requires=lowered.requires,
            golden_tolerance=min(10 * worst, 1),
            padding=paddings,
            provenance=Provenance.of(options.source, ("torch", "onnx-ir", "onnxscript"), journal.notes),
            evidence=Evidence(machine=devices.describe(), parity=stage.parity, latency=latency),
        )
        sizes = {"graph": lowered.graph.size, "weights": sum(item.size for item in lowered.weights)}
        report = journal.report(serving, sizes)
        documents = {
            "report.json": report.model_dump_json(indent=1).encode(),
            "report.html": page.html(report).encode(),
            "report.txt": view.text(report).encode(),
        }
        variant = add_variant(self._blobs, serving, lowered.graph, lowered.weights, goldens, documents)
        return Archive.create(self._blobs, [variant])

    def _affordable(self, signature: Signature, rows: int) -> bool:
        """Tell whether a call of so many rows is timed: small ones always are."""
        examples, batch = self._original.examples, signature.batch
        return rows == 1 or batch is None or examples.affordable({**examples.default_sizes, batch: rows}, _MOST_TIMED)

    def _load(self, lowered: Packed) -> Engine:
        path = self._blobs.path(lowered.graph)
        device = "cpu" if lowered.format == "onnx" else self._options.device
        try:
            return load_engine(path, format=lowered.format, device=device, allow_code=True)  # we have made it
        except InvalidArgument as error:
            reason = str(error).replace(f" {path.name}", "")
            advice = misdeclared.as_int64(self._original.examples) if "tensor(int32)" in reason else ""
            raise ExportError(f"the graph was exported, but does not load: {reason}{advice}") from error

    def _with_batch(self, signature: Signature) -> tuple[Signature, tuple[str, ...]]:
        """Decide whether requests may be joined, by the declared dimension and by a proof that rows do not touch."""
        batch = self._options.batch_dim or ("batch" if "batch" in signature.symbols else signature.batch)
        if batch is None:
            return signature, (f"served without batching: no input has a dimension named 'batch'{_first(signature)}",)
        check_batch_dim(batch, signature.inputs)
        if (step := signature.range(batch).step) > 1:
            return replace(signature, batch=None), (f"served without batching: '{batch}' goes in steps of {step}",)
        reason = rows_touch(self._original.runner, signature, batch, self._original.examples)
        if reason is not None:
            return replace(signature, batch=None), (f"served without batching: {reason}",)
        return replace(signature, batch=batch), ()


def _first(signature: Signature) -> str:
    """Return for a note how to declare the first dimensions as the batch, where those are dynamic."""
    firsts = [spec for spec in signature.inputs if spec.shape and isinstance(spec.shape[0], str)]
    options = " ".join(f"--input '{replace(spec, shape=('batch', *spec.shape[1:]))}'" for spec in firsts)
    return f"; if the first dimension of an input counts independent rows, name it so: {options}" if firsts else ""


def _unused(program: Program, subject: Subject) -> Iterator[str]:
    """Yield a remark on each input that nothing depends on.

    Raises:
        InvalidArgument: it is no parameter of ``forward`` either, so its name is most likely wrong.
    """
    nodes = {node.name: node for node in program.exported.graph.nodes}
    taken = program.exported.graph_signature.user_inputs
    for spec, place in zip(subject.inputs, taken, strict=True):
        if nodes[str(place)].users:
            continue
        if arguments.outside_parameters(subject.eager.module, [spec.name]):
            known = ", ".join(arguments.parameters(subject.eager.module))
            raise InvalidArgument(
                f"the model ignores the input '{spec.name}', which is no parameter of its forward; that takes {known}"
            )
        yield f"nothing depends on the input '{spec.name}'"


def _elements(inputs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> int:
    return sum(math.prod(dim if isinstance(dim, int) else sizes[dim] for dim in spec.shape) for spec in inputs)


def check_batch_dim(batch: str, inputs: Sequence[TensorSpec]) -> None:
    """Raise InvalidArgument if no input has a dimension of that name."""
    known = symbols(inputs)
    if batch not in known:
        raise InvalidArgument(f"no input has a dimension '{batch}'; the dynamic ones are: {', '.join(known) or 'none'}")


def _weights(model: ir.Model) -> Iterator[tuple[str, int]]:
    for value in model.graph.initializers.values():
        if value.const_value is not None and value.dtype is not None and value.dtype != ir.DataType.STRING:
            yield value.dtype.numpy().name, value.const_value.nbytes
