"""Rewrite rules over the FX graph and over the ONNX graph, each followed by a proof."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial

import onnx_ir as ir
from torch import fx

from ingot import foreign
from ingot.errors import ExportError
from ingot.export.capture import exported
from ingot.export.graphs import fx as fx_graphs
from ingot.export.graphs import onnx as onnx_graphs
from ingot.export.program import Captured, Program
from ingot.export.rewrite.passes.manager import PassManager
from ingot.export.source.subject import Subject
from ingot.export.stages.capture import prove_captured
from ingot.export.stages.context import Context
from ingot.model_store.format import onnx_graph
from ingot.runtime import EngineSpec, load_engine
from ingot.tensors import Signature

# Examples that each rule is proved on; the end of a stage is proved on all.
_EXAMPLES_PER_RULE = 2


def rewrite_program(context: Context, program: Program, subject: Subject, *, tidy: bool) -> Program:
    """Apply the FX rules, and capture the result again to update its shapes and metadata.

    Args:
        context: the export.
        program: what is rewritten; returned as it is if nothing changed or the result cannot be captured.
        subject: what was captured.
        tidy: keep a result that only tidying rules changed. They have ONNX counterparts, and capturing again takes as
            long as the first time.
    """

    def proof(graph: fx.GraphModule) -> float:
        candidate = Captured(graph, program.signature, subject.eager.device)
        parity, _ = context.prove(candidate, program.signature, _EXAMPLES_PER_RULE)
        return max(item.error for item in parity)

    rules = context.options.fx_rules
    rewritten = program
    with context.journal.stage("rewrite the FX graph", "Rewriting the FX graph") as stage:
        graph, records = PassManager(rules, proof).run(exported.unguarded(program.exported))
        done = {record.rule for record in records if record.matches and not record.rejected}
        if not tidy and done <= {rule.name for rule in rules if rule.tidies}:
            records = tuple(record for record in records if record.rule not in done)
        elif done:
            try:
                traced = _traced_again(graph, program, subject)
                stage.parity = prove_captured(context, traced, subject, "rewritten")
            except ExportError as error:
                reason = f"the rewritten graph was discarded: {error}"
                records = tuple(replace(item, rejected=item.rejected or reason) for item in records if item.matches)
            else:
                rewritten = traced
                context.journal.graphs.append(fx_graphs.of_program("FX graph rewritten", rewritten))
        stage.detail = context.record_rules(records)
    return rewritten


def _traced_again(graph: fx.GraphModule, program: Program, subject: Subject) -> Program:
    example = subject.eager.tensors(subject.example)
    options = {**program.options, "strict": False}  # the graph holds operators only, not user code
    with foreign.reported_as(ExportError, foreign.first_line):
        traced = exported.trace(exported.positional(graph), subject.inputs, subject.ranges, example, **options)
    made = exported.program(traced, subject.inputs, subject.ranges, subject.output_names, program.log)
    return replace(made, options=program.options)


def rewrite_onnx(context: Context, model: ir.Model, signature: Signature) -> ir.Model:
    """Move the weights of a model to files of the archive, and apply the ONNX rules to its graph."""

    # Rules and their proofs then handle a small graph, however large the weights.
    onnx_graph.externalize(model, context.blobs)
    journal = context.journal
    journal.graphs.append(onnx_graphs.of_model("ONNX graph as translated", model))
    with journal.stage("rewrite the ONNX graph", "Rewriting the ONNX graph") as stage:
        proof = partial(prove_onnx, context, signature, most=_EXAMPLES_PER_RULE)
        model, records = PassManager(context.options.onnx_rules, proof).run(model)
        stage.detail = context.record_rules(records)
    if stage.detail:
        journal.graphs.append(onnx_graphs.of_model("ONNX graph rewritten", model))
    return model


def prove_onnx(context: Context, signature: Signature, graph: ir.Model, most: int | None = None) -> float:
    """Load an ONNX graph, compare it with the original on up to ``most`` examples, and return the largest error.

    Raises:
        ExportError: it does not load, or differs.
    """
    descriptor, _ = onnx_graph.pack(graph.clone(), context.blobs)
    with contextlib.closing(load_engine(EngineSpec(context.blobs.path(descriptor), device="cpu"))) as engine:
        parity, _ = context.prove(engine, signature, most)
    return max(item.error for item in parity)
