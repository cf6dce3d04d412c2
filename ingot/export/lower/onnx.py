"""Lowering to ONNX by PyTorch's dynamo exporter, and what of a program it has no way to express."""

from __future__ import annotations

import functools
import logging
import operator
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import NameFixPass
from onnxscript import version_converter
from torch import fx

from ingot.errors import ExportError
from ingot.export import torch_internals
from ingot.export.explain import places
from ingot.export.lower import complex_numbers, contiguous
from ingot.export.program import Program, quiet, user_path
from ingot.export.rewrite.ops import functions
from ingot.export.torch_internals import Registry

log = logging.getLogger(__name__)

Translations = Mapping[Any, Callable[..., Any]]
"""Functions of ONNX values, by the operators that they translate; they are called with the operator's arguments."""

# The exporter writes this opset and later ones; models of an older one are converted from it.
_OLDEST = 18
_MODEL = "the model"
_OF_MODELS = "write that part otherwise, or define an operator by ingot.op and say what it is in ONNX"
_OF_BODIES = "write that part otherwise, or give onnx= in its definition"
# Its handling of SplitToSequence takes a size for granted that depends on another.
_OPTIMIZER_ISSUE = "https://github.com/microsoft/onnxscript/pull/2544"
_NUMBERED = re.compile(r"val_\d+")
_NODE = re.compile(r"translating node %(\w+)")


def lower(
    program: Program,
    opset: int | None = None,
    translations: Translations | None = None,
    remark: Callable[[str], None] = lambda text: None,
) -> ir.Model:
    """Translate a captured program by PyTorch's dynamo ONNX exporter.

    Operators made by :func:`ingot.op` become nodes in their own domain, with a local function beside them.

    Args:
        program: the program.
        opset: the ONNX operator set; by default the exporter's.
        translations: for operators that the exporter does not know.
        remark: called with what should be known of the translation.

    Raises:
        ExportError: an operator has no ONNX form, or needs a newer opset.
    """
    signature = program.signature
    registry = make_registry(opset, translations)
    inputs, outputs = [[spec.name for spec in specs] for specs in (signature.inputs, signature.outputs)]
    model = _translate(program.exported, inputs, _MODEL, registry, outputs, remark)
    functions.Functions(functools.partial(_translate, registry=registry)).attach(model)
    if opset is not None:
        _convert(model, opset)
    for spec, value in zip(
        (*signature.inputs, *signature.outputs), (*model.graph.inputs, *model.graph.outputs), strict=True
    ):
        value.shape = ir.Shape(spec.shape)
    _rename(model, program.exported)
    return model


def _rename(model: ir.Model, exported: torch.export.ExportedProgram) -> None:
    """Call weights as the user's module does, and give way to the inputs' and outputs' names within the graph."""
    _name_turned(model.graph, exported)
    for value in list(model.graph.initializers.values()):
        value.name = user_path(value.name or "")
    NameFixPass()(model)


def _name_turned(graph: ir.Graph, exported: torch.export.ExportedProgram) -> None:
    """Name the weights of linear layers, which the exporter turns and numbers: users know layers by these names."""
    parameters = exported.graph_signature.inputs_to_parameters
    weights = {
        node.name: parameters[str(node.args[1])]
        for node in exported.graph.nodes
        if node.target is torch.ops.aten.linear.default and str(node.args[1]) in parameters
    }
    for node in graph:
        weight = node.inputs[1] if node.op_type == "MatMul" else None
        if weight is None or not _NUMBERED.fullmatch(weight.name or "") or weight.name not in graph.initializers:
            continue
        results = [node.outputs[0], *(user.outputs[0] for user, _ in node.outputs[0].uses() if user.op_type == "Add")]
        path = next((weights[value.name] for value in results if value.name in weights), None)
        if path is not None and path not in graph.initializers:
            weight.name = path


def make_registry(opset: int | None, translations: Translations | None) -> Registry:
    """Return what the exporter knows, and the operators made by :func:`ingot.op`."""
    registry = torch_internals.registry(max(opset or torch_internals.default_opset(), _OLDEST), own=False)
    known = _known(registry.opset_version).functions.items()
    registry.functions = {target: list(found) for target, found in known}
    for target, function in {**(translations or {}), **functions.translations()}.items():
        registry.register_op(target, function)
    for target, function in complex_numbers.TRANSLATIONS.items():
        registry.register_op(target, function, is_complex=True)
    return registry


@functools.cache
def _known(opset: int) -> Registry:
    """Return PyTorch's own translations. Reading them takes longer than exporting a small model, so it is done once."""
    with quiet():
        return torch_internals.registry(opset, own=True)


def _translate(
    exported: torch.export.ExportedProgram,
    inputs: Sequence[str],
    subject: str,
    registry: Registry,
    outputs: Sequence[str] = (),
    remark: Callable[[str], None] = lambda text: None,
) -> ir.Model:
    """Do what ``torch.onnx.export`` does, with a registry that is made once; errors call the program ``subject``."""

    def export(program: torch.export.ExportedProgram) -> ir.Model:
        try:
            return attempt(program, optimize=True)
        except Exception as error:  # a bug may raise any kind
            if not _of_optimizer(error):
                raise
        remark(f"not optimized by onnxscript, which fails on this graph ({_OPTIMIZER_ISSUE})")
        return attempt(program, optimize=False)

    def attempt(program: torch.export.ExportedProgram, optimize: bool) -> ir.Model:
        with quiet():
            model: ir.Model = torch_internals.export_onnx(program, registry, inputs, outputs, optimize=optimize)
        return model

    try:
        try:
            return export(exported)
        except Exception as error:
            if "Cannot view a tensor" not in str(error):
                raise
            return export(contiguous.with_copies(exported))
    except Exception as error:  # the exporter raises many kinds
        advice = _OF_MODELS if subject == _MODEL else _OF_BODIES
        raise ExportError(f"{subject} has no ONNX form: {_explain(error, exported, registry, advice)}") from error


def _of_optimizer(error: BaseException) -> bool:
    """Tell whether an error was raised by onnxscript's optimizer, not by the translation."""
    return any(
        "onnxscript/optimizer" in frame.filename.replace("\\", "/")
        for frame in traceback.extract_tb(error.__traceback__)
    )


def outside(
    program: Program | torch.export.ExportedProgram, opset: int | None = None, translations: Translations | None = None
) -> tuple[str, ...]:
    """Return the operators of a program that have no ONNX form, each with a line of the user's code that calls it.

    Args:
        program: as captured; it is decomposed as for a translation.
        opset: the ONNX operator set; by default the exporter's.
        translations: for operators that the exporter does not know, beside those made by :func:`ingot.op`.

    Returns:
        Such as ``aten.special_erfcx.default (model.py:12)``, each operator once.
    """
    exported = program.exported if isinstance(program, Program) else program
    registry = make_registry(opset, translations)
    return _missing(_decompose(exported, registry).values(), registry)


def _missing(nodes: Iterable[fx.Node], registry: Registry) -> tuple[str, ...]:
    found: dict[str, str] = {}
    for node in nodes:
        if node.target is not operator.getitem and not torch_internals.has_translation(node, registry):
            found.setdefault(str(node.target), _shown(node))
    return tuple(found.values())


def _decompose(exported: torch.export.ExportedProgram, registry: Registry) -> dict[str, fx.Node]:
    """Return the calls that the exporter translates, by name."""
    with quiet():
        decomposed = torch_internals.decomposed(exported, registry)
    graphs = [part.graph for part in decomposed.graph_module.modules() if isinstance(part, fx.GraphModule)]
    return {node.name: node for graph in graphs for node in graph.nodes if node.op == "call_function"}


def _shown(node: fx.Node) -> str:
    place = places.of_node(node)
    return f"{node.target} ({place.short})" if place is not None else str(node.target)


def _explain(error: Exception, exported: torch.export.ExportedProgram, registry: Registry, advice: str) -> str:
    """Name the operators to blame, and lines of the user's code that call them; ``advice`` says what helps."""
    causes = [error]
    while isinstance(causes[-1].__cause__, Exception):
        causes.append(causes[-1].__cause__)
    reason = " ".join(str(causes[-1]).split())[:500] or type(causes[-1]).__name__
    try:
        nodes = _decompose(exported, registry)
    except Exception:  # this may be what failed in the first place
        log.debug("the failed program cannot be decomposed", exc_info=True)
        return reason
    if missing := _missing(nodes.values(), registry):
        return f"nothing translates {', '.join(missing)}; {advice}"
    failed = [nodes[name] for cause in causes for name in _NODE.findall(str(cause)) if name in nodes]
    return f"{_shown(failed[0])}: {reason}" if failed else reason


def _convert(model: ir.Model, opset: int) -> None:
    """Convert a model to an opset, and make sure that it is one of it.

    Raises:
        ExportError: it is not; the message names the operators that need a newer one.
    """
    if opset < _OLDEST:
        with quiet():
            version_converter.convert_version(model, opset, fallback=True)
    needed = {}
    for node in model.graph.all_nodes():
        least = _least_opset(node) if node.domain == "" else 0
        if least > opset:
            needed[node.op_type] = f"{node.op_type} needs opset {least}"
    made = model.opset_imports.get("")
    if made != opset or needed:
        reasons = [*needed.values()] or [f"the exporter gives opset {made}"]
        raise ExportError(f"the model cannot be expressed in opset {opset}: {', '.join(reasons)}")


def _least_opset(node: ir.Node) -> int:
    """Return the first operator set that has an operator with these inputs and attributes."""
    for opset in range(1, onnx.defs.onnx_opset_version() + 1):
        if not onnx.defs.has(node.op_type, opset, ""):
            continue
        schema = onnx.defs.get_schema(node.op_type, opset, "")
        if schema.min_input <= len(node.inputs) <= schema.max_input and set(node.attributes) <= set(schema.attributes):
            return opset
    return 0
