"""The archive: a proved model with its evidence, goldens and export report."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import onnx_ir as ir
from torch import nn

from ingot.export.explain import places
from ingot.export.lower import packed as lowered
from ingot.export.lower.packed import Packed
from ingot.export.report import page, view
from ingot.export.stages.context import Context
from ingot.export.stages.prove import Proved
from ingot.model_store import Archive, Provenance, Serving, add_variant
from ingot.model_store.format import onnx_graph
from ingot.runtime.loading.defaults import check_defaults
from ingot.tensors import Signature


def pack_onnx(context: Context, model: ir.Model, signature: Signature) -> tuple[Packed, str]:
    """Put an ONNX model into the files of the archive, and return them with its precision."""
    # A graph also has constants that the translation computes with in double precision.
    weights = _weights_in(model) if context.eager is None else _weights_of(context.eager.module)
    precision = lowered.precision(weights, signature)
    context.stacks = places.onnx_stacks(model)
    graph, files = onnx_graph.pack(model, context.blobs)
    requires = {"engine": "onnxruntime", "opset": str(model.opset_imports.get("", 0))}
    return Packed(graph, files, "onnx", requires), precision


def _weights_of(module: nn.Module) -> Iterator[tuple[str, int]]:
    for held in itertools.chain(module.parameters(), module.buffers()):
        yield str(held.dtype).removeprefix("torch."), held.nbytes


def _weights_in(model: ir.Model) -> Iterator[tuple[str, int]]:
    for value in model.graph.initializers.values():
        if value.const_value is not None and value.dtype is not None and value.dtype != ir.DataType.STRING:
            yield value.dtype.numpy().name, value.const_value.nbytes


def pack_archive(context: Context, packed: Packed, precision: str, proved: Proved) -> Archive:
    """Write the archive of a proved model, with the report of the export.

    Raises:
        InvalidArgument: its states, labels and the like do not fit the signature.
    """
    options, journal = context.options, context.journal
    if options.serving is not None:
        check_defaults(options.serving, proved.signature)
    serving = Serving(
        name=options.name,
        variant=precision if packed.format == "onnx" else f"{precision}-{packed.format}",
        format=packed.format,
        precision=precision,
        signature=proved.signature,
        requires=packed.requires,
        golden_tolerance=proved.golden_tolerance,
        padding=proved.paddings,
        tensor_parallel=options.tensor_parallel,
        defaults=options.serving,
        steps=options.steps.steps if options.steps is not None else None,
        provenance=Provenance.of(options.source, ("torch", "onnx-ir", "onnxscript"), journal.notes),
        evidence=proved.evidence,
    )
    sizes = {"graph": packed.graph.size, "weights": sum(item.size for item in packed.weights)}
    report = journal.report(serving, sizes).bounded()
    documents = {
        "report.json": report.model_dump_json(indent=1).encode(),
        "report.html": page.html(report).encode(),
        "report.txt": view.text(report).encode(),
    }
    files = options.steps.files if options.steps is not None else {}
    variant = add_variant(context.blobs, serving, packed.graph, packed.weights, proved.goldens, documents, files)
    return Archive.create(context.blobs, [variant])
