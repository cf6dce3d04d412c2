"""Lowering in parts: operators with an ONNX form run in ONNX Runtime, the others in PyTorch."""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import fx

from ingot import foreign
from ingot.errors import ExportError, InvalidArgument
from ingot.export import torch_internals
from ingot.export.lower import onnx as lower_onnx
from ingot.export.lower import program as lower_program
from ingot.export.lower.onnx import Translations
from ingot.export.lower.packed import Packed
from ingot.export.lower.segments import Cut, Part, cut
from ingot.export.program import Program, quiet
from ingot.export.torch_internals import pytree
from ingot.model_store import BlobFolder
from ingot.model_store.blobs.descriptor import Descriptor
from ingot.model_store.format import manifest, onnx_graph
from ingot.model_store.format.partition import PartitionPlan, Segment
from ingot.runtime import EngineSpec, load_engine


def pack(
    program: Program, blobs: BlobFolder, *, opset: int | None = None, translations: Translations | None = None
) -> Packed:
    """Lower a program in parts and put them into ``blobs``.

    If no part needs PyTorch the result is an ONNX model, and if all do, a PyTorch program; a note reports either.

    Args:
        program: the program.
        blobs: the destination of the parts.
        opset: the ONNX operator set; by default the exporter's.
        translations: ONNX forms of operators that the exporter does not know.

    Raises:
        ExportError: the model cannot be split, or a part of it cannot be lowered.
    """
    made = split(program, opset, translations)
    parts = made.parts
    if len(parts) < 2:
        parts = (Part(program, tuple(name for part in parts for name in part.special)),)
    results = [_pack_part(part, blobs, opset, translations) for part in parts]
    packed, runners = [item for item, _ in results], [runner for _, runner in results]
    notes = [note for item in packed for note in item.notes]
    if len(parts) == 1:
        return replace(packed[0], notes=(f"the model is not split: {runners[0]} runs all of it", *notes))
    notes += [f"part {index} of {len(parts)} is run by {runner}" for index, runner in enumerate(runners, start=1)]
    if all(item.format == "pt2" for item in packed):
        whole = lower_program.pack(program, blobs)
        return replace(whole, notes=("the model is not split: PyTorch would run every part of it", *notes))
    return replace(_assemble(made, packed, program, blobs), notes=tuple(notes))


def split(program: Program, opset: int | None = None, translations: Translations | None = None) -> Cut:
    """Cut a program so that operators without an ONNX form are in separate parts; see :func:`pack`.

    Raises:
        ExportError: the model cannot be split.
    """
    registry = lower_onnx.make_registry(opset, translations)
    with foreign.reported_as(ExportError, "the model cannot be split"), quiet():
        # An empty table makes the program functional, so that no part changes a tensor of another, and keeps
        # operators as large as they were written.
        exported = program.exported.run_decompositions({})
        try:
            missing = set(_untranslatable(exported, registry))
        except ValueError as error:
            if lower_onnx.VIEW_ERROR not in str(error):
                raise
            exported = lower_onnx.with_contiguous_views(exported)
            missing = set(_untranslatable(exported, registry))
    special = {node for node in exported.graph.nodes if node.name in missing}
    if special:  # the engines represent complex numbers differently
        special |= {node for node in exported.graph.nodes if node.op == "call_function" and _is_complex(node)}
    return cut(replace(program, exported=exported), special)


def _untranslatable(exported: torch.export.ExportedProgram, registry: torch_internals.Registry) -> Iterator[str]:
    """Yield the names of nodes that contain an operator without ONNX form after the exporter's decompositions."""
    with _no_pending_sizes(exported):
        decomposed = torch_internals.decomposed(exported, registry, prepared=True)
    for node in decomposed.graph.nodes:
        if not _is_translatable(node, decomposed.graph_module, registry):
            origin = node.meta.get("from_node")
            yield origin[-1].name if origin else node.name


@contextlib.contextmanager
def _no_pending_sizes(exported: torch.export.ExportedProgram) -> Iterator[None]:
    """Clear the unbacked symbols that a translation created; the next translation would fail on them."""
    try:
        yield
    finally:
        for value in pytree.tree_leaves([node.meta.get("val") for node in exported.graph.nodes]):
            if isinstance(value, torch_internals.FakeTensor) and value.fake_mode.shape_env is not None:
                value.fake_mode.shape_env.pending_fresh_unbacked_symbols.clear()


def _is_translatable(node: fx.Node, module: fx.GraphModule, registry: torch_internals.Registry) -> bool:
    """Return whether a node and all nodes in the branches that it selects from have an ONNX form."""
    if node.op != "call_function" or node.target is operator.getitem:
        return True
    held = [getattr(module, str(source.target)) for source in node.all_input_nodes if source.op == "get_attr"]
    branches = [item for item in held if isinstance(item, fx.GraphModule)]
    return torch_internals.has_translation(node, registry) and all(
        _is_translatable(inner, branch, registry) for branch in branches for inner in branch.graph.nodes
    )


def _is_complex(node: fx.Node) -> bool:
    values = [item.meta.get("val") for item in (node, *node.all_input_nodes)]
    return any(isinstance(leaf, torch.Tensor) and leaf.is_complex() for leaf in pytree.tree_leaves(values))


def _pack_part(
    part: Part, blobs: BlobFolder, opset: int | None, translations: Translations | None
) -> tuple[Packed, str]:
    """Pack a part for the engine that can run it; also return the engine's name and the reason."""
    if part.special:
        return lower_program.pack(part.program, blobs), f"PyTorch (because of {', '.join(part.special)})"
    try:
        return _pack_onnx(part.program, blobs, opset, translations), "ONNX Runtime"
    except InvalidArgument as error:  # a translation that fails, or an operator that ONNX Runtime lacks
        reason = re.sub(r"[0-9a-f]{64}", "it", str(error).rpartition(" failed:")[2])
        return lower_program.pack(part.program, blobs), f"PyTorch ({reason})"


def _pack_onnx(program: Program, blobs: BlobFolder, opset: int | None, translations: Translations | None) -> Packed:
    with _no_pending_sizes(program.exported):
        model = lower_onnx.lower(program, opset, translations)
    graph, weights = onnx_graph.pack(model, blobs)
    load_engine(EngineSpec(blobs.path(graph), device="cpu")).close()
    requires = {"engine": "onnxruntime", "opset": str(model.opset_imports.get("", 0))}
    return Packed(graph, weights, "onnx", requires)


def _assemble(made: Cut, packed: Sequence[Packed], program: Program, blobs: BlobFolder) -> Packed:
    segments: list[Segment] = []
    weights: dict[str, Descriptor] = {}
    requires: dict[str, str] = {}
    for index, (part, item) in enumerate(zip(made.parts, packed, strict=True), start=1):
        file = {manifest.FILEPATH: f"part-{index}.{item.format}"}
        weights[item.graph.digest] = item.graph.model_copy(update={"annotations": file})
        weights.update({weight.digest: weight for weight in item.weights})
        requires.update(item.requires)
        signature = part.program.signature
        segments.append(
            Segment(
                format="onnx" if item.format == "onnx" else "pt2",
                blob=item.graph.hex,
                inputs=tuple(spec.name for spec in signature.inputs),
                outputs=tuple(spec.name for spec in signature.outputs),
            )
        )
    for name in ("engine", "operators"):  # joined over all parts; update() above kept the last
        if name in requires:
            requires[name] = ", ".join(sorted({item.requires[name] for item in packed if name in item.requires}))
    plan = PartitionPlan(signature=program.signature, segments=tuple(segments), outputs=made.outputs)
    graph = blobs.put(manifest.encode(plan), manifest.WEIGHT, {manifest.FILEPATH: "plan.json"})
    return Packed(graph, tuple(weights.values()), "partitioned", requires)
