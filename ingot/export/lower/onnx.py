"""Lowering to ONNX by PyTorch's dynamo exporter, and the operators that it cannot express."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import NameFixPass
from onnxscript import version_converter
from torch import fx

from ingot import foreign
from ingot.errors import ExportError
from ingot.export import torch_internals
from ingot.export.explain import places
from ingot.export.explain.causes import find_cause
from ingot.export.lower import bfloat16, optimizer, sigmoids
from ingot.export.lower.forms import complex_numbers, exact_math, size_arithmetic
from ingot.export.program import Program, quiet, user_path
from ingot.export.rewrite.ops import functions
from ingot.export.torch_internals import Registry
from ingot.model_store.format import onnx_graph

Translations = Mapping[Any, Callable[..., Any]]
"""Functions of ONNX values by operator; they are called with the operator's arguments and return its results."""

# The exporter writes this opset and later ones; models of an older opset are converted from it.
_OLDEST = 18
# From this opset on, GridSample reads volumes, and its mode "bilinear" is called "linear".
_VOLUMES = 20
_MODEL = "the model"
_MODEL_REMEDY = "rewrite that part, or define an operator with ingot.op and its ONNX form"
_BODY_REMEDY = "rewrite that part, or pass onnx= in its definition"
_SIZE_AS_ATTRIBUTE = "Unsupported attribute type: '<class 'torch.onnx"
VIEW_ERROR = "Cannot view a tensor"
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default)
_DECOMPOSED_WRONGLY = (
    torch.ops.aten.multilabel_margin_loss.default,
    torch.ops.aten.multilabel_margin_loss_forward.default,
)
_BAGS = (torch.ops.aten.embedding_bag.default, torch.ops.aten.embedding_bag.padding_idx)
_NUMBERED = re.compile(r"val_\d+")
# Second names of operators. The exporter does not promote the types of their tensors, and does not use the forms of
# :mod:`ingot.export.lower.forms.translations` for them, so they are replaced by the operators.
_ALIASES = re.compile(
    r"aten::(divide|multiply|subtract|greater|greater_equal|less|less_equal|concat|concatenate"
    r"|special_(erf|erfc|expm1|sinc|softmax|log_softmax))(\..*)?"
)
_NODE = re.compile(r"translating node %(\w+)")


def lower(
    program: Program,
    opset: int | None = None,
    translations: Translations | None = None,
    remark: Callable[[str], None] = lambda text: None,
    *,
    optimize: bool = True,
) -> ir.Model:
    """Convert a captured program by PyTorch's dynamo ONNX exporter.

    Operators made by :func:`ingot.op` become nodes in their own domain, each with a local function.

    Args:
        program: the program.
        opset: the ONNX operator set; by default the exporter's.
        translations: ONNX forms of operators that the exporter does not know.
        remark: called with notes for the user.
        optimize: apply :mod:`ingot.export.lower.optimizer`; steps of it that fail are left out.

    Raises:
        ExportError: an operator has no ONNX form, or needs a newer opset.
    """
    signature = program.signature
    registry = make_registry(opset, translations)
    inputs, outputs = [[spec.name for spec in specs] for specs in (signature.inputs, signature.outputs)]
    model = _translate(program.exported, inputs, _MODEL, registry, outputs, remark, optimize=optimize)
    functions.Functions(functools.partial(_translate, registry=registry, optimize=optimize)).attach(model)
    if opset is not None:
        _convert(model, opset)
    for spec, value in zip(
        (*signature.inputs, *signature.outputs), (*model.graph.inputs, *model.graph.outputs), strict=True
    ):
        value.shape = ir.Shape(spec.shape)
    _rename(model, program.exported)
    return model


def _rename(model: ir.Model, exported: torch.export.ExportedProgram) -> None:
    """Name weights as the user's module does, and rename values that conflict with inputs or outputs."""
    _name_transposed(model.graph, exported)
    for value in list(model.graph.initializers.values()):
        value.name = user_path(value.name or "")
    NameFixPass()(model)


def _name_transposed(graph: ir.Graph, exported: torch.export.ExportedProgram) -> None:
    """Restore the names of the weights of linear layers, which the exporter transposes and numbers."""
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
    """Return a registry of the exporter's translations and those of operators made by :func:`ingot.op`."""
    registry = torch_internals.registry(max(opset or torch_internals.default_opset(), _OLDEST), own=False)
    known = _known(registry.opset_version).functions.items()
    registry.functions = {target: list(found) for target, found in known}
    for target, function in {**(translations or {}), **functions.translations()}.items():
        torch_internals.register(registry, target, function)
    for target, function in complex_numbers.TRANSLATIONS.items():
        torch_internals.register(registry, target, function, is_complex=True)
    return registry


@functools.cache
def _known(opset: int) -> Registry:
    """Return PyTorch's translations, cached because reading them takes longer than exporting a small model."""
    with quiet():
        known = torch_internals.registry(opset, own=True)
    known.functions = {name: found for name, found in known.functions.items() if not _ALIASES.fullmatch(str(name))}
    return known


def _translate(
    exported: torch.export.ExportedProgram,
    inputs: Sequence[str],
    subject: str,
    registry: Registry,
    outputs: Sequence[str] = (),
    remark: Callable[[str], None] = lambda text: None,
    *,
    optimize: bool,
) -> ir.Model:
    """Do the same as ``torch.onnx.export``, with a cached registry; errors call the program ``subject``."""

    def export(program: torch.export.ExportedProgram) -> ir.Model:
        model = translated(program)
        with quiet():  # onnxscript logs each node that it cannot fold
            failure = foreign.outcome(lambda: optimizer.optimize(model)) if optimize else None
            if failure is not None:
                model, rejected = optimizer.optimize_gradually(translated(program))
                remark(left_out(rejected))
        torch_internals.name_values(model, inputs, outputs)
        return model

    def translated(program: torch.export.ExportedProgram) -> ir.Model:
        with quiet(), torch_internals.precise_numbers(_prepare):
            model: ir.Model = torch_internals.export_onnx(program, registry)
        onnx_graph.inline(model)
        exact_math.keep_digits(model)
        sigmoids.keep_small(model)
        bfloat16.run_in_single(model)
        return model

    def unexpressed(error: Exception) -> str:
        remedy = _MODEL_REMEDY if subject == _MODEL else _BODY_REMEDY
        return f"{subject} has no ONNX form: {_explain(error, exported, registry, remedy)}"

    with foreign.reported_as(ExportError, unexpressed):
        _check_results(exported)
        exported = complex_numbers.with_complex_values(exported)
        try:
            return export(exported)
        except torch.onnx.OnnxExporterError as error:
            if VIEW_ERROR not in str(error):
                raise
            return export(with_contiguous_views(exported))


def _prepare(decomposed: fx.GraphModule) -> None:
    exact_math.round_numbers(decomposed)
    exact_math.convert_operands(decomposed)
    exact_math.unify_bounds(decomposed)
    size_arithmetic.split_by_places(decomposed)


def _check_results(exported: torch.export.ExportedProgram) -> None:
    """Raise ExportError for operators that PyTorch decomposes wrongly, and results that ONNX does not have."""
    for node in exported.graph.nodes:
        if node.target in _DECOMPOSED_WRONGLY:
            raise ExportError(
                f"{_shown(node)}: PyTorch decomposes it to another function where a row has fewer targets than "
                "classes; return the scores, and compute the loss outside the model"
            )
        if node.target in _BAGS and node.args[0].meta["val"].dtype is torch.float64:  # ONNX Runtime ends the process
            raise ExportError(f"{_shown(node)}: bags of embeddings have an ONNX form up to FP32; convert the weights")
        used = {user.args[1] for user in node.users if user.target is operator.getitem and user.users}
        if node.target is torch.ops.aten.linalg_inv_ex.default and 1 in used:
            raise ExportError(f"{_shown(node)}: which matrix is singular has no ONNX form; return the inverse only")


def with_contiguous_views(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Return a program that copies each tensor before it takes a view of it, for a retry after VIEW_ERROR.

    The decomposition of an operator, such as ``scaled_dot_product_attention`` with a bias in torch 2.13, may return
    another memory layout than the capture saw, on which a view fails: https://github.com/pytorch/pytorch/issues/136543
    ONNX tensors have no layout, so the copies cost nothing there.
    """
    copied = torch_internals.with_copied_graph(exported)
    graph = copied.graph_module.graph
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _VIEWS and isinstance(node.args[0], fx.Node):
            source = node.args[0]
            with graph.inserting_before(node):
                clone = graph.call_function(
                    torch.ops.aten.clone.default, (source,), {"memory_format": torch.contiguous_format}
                )
            clone.meta = {**source.meta, "val": source.meta["val"].contiguous()}
            node.update_arg(0, clone)
    copied.graph_module.recompile()
    return copied


def left_out(rejected: Mapping[str, Exception]) -> str:
    """Return a note on the steps of the optimizer that failed."""
    reasons = {
        name: foreign.one_line(error, 150) if isinstance(error, ExportError) else type(error).__name__
        for name, error in rejected.items()
    }
    steps = "; ".join(f"{name} ({reason})" for name, reason in reasons.items())
    return f"onnxscript's optimizer fails on this graph, so steps of it were left out: {steps or 'none alone fails'}"


def outside(
    program: Program | torch.export.ExportedProgram, opset: int | None = None, translations: Translations | None = None
) -> tuple[str, ...]:
    """Return the operators of a program that have no ONNX form, each with a line of the user's code that calls it.

    Args:
        program: as captured; it is decomposed as for a translation.
        opset: the ONNX operator set; by default the exporter's.
        translations: ONNX forms of further operators; those made by :func:`ingot.op` are known.

    Returns:
        Texts such as ``aten.special_erfcx.default (model.py:12)``, one per operator.
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
    """Return the calls that the exporter translates, by node name."""
    with quiet():
        decomposed = torch_internals.decomposed(exported, registry)
    graphs = [part.graph for part in decomposed.graph_module.modules() if isinstance(part, fx.GraphModule)]
    return {node.name: node for graph in graphs for node in graph.nodes if node.op == "call_function"}


def _shown(node: fx.Node) -> str:
    place = places.of_node(node)
    return f"{node.target} ({place.short})" if place is not None else str(node.target)


def _explain(error: Exception, exported: torch.export.ExportedProgram, registry: Registry, remedy: str) -> str:
    """Name the operators that failed, and the lines of the user's code that call them."""
    causes = [error]
    while isinstance(causes[-1].__cause__, Exception):
        causes.append(causes[-1].__cause__)
    reason = foreign.one_line(causes[-1]) or type(causes[-1]).__name__
    nodes = foreign.attempt(lambda: _decompose(exported, registry))
    cause = find_cause(causes[-1])
    if cause.advice:
        return f"{cause.sentence}; {cause.advice}"
    if nodes is None:  # the decomposition itself may be the step that failed
        return f"{reason}; {remedy}"
    if missing := _missing(nodes.values(), registry):
        return f"there is no translation of {', '.join(missing)}; {remedy}"
    failed = [nodes[name] for cause in causes for name in _NODE.findall(str(cause)) if name in nodes]
    if _SIZE_AS_ATTRIBUTE in reason:
        reason = (
            "a size of the inputs decides an argument that ONNX fixes in the graph, such as the number of groups; "
            "declare a number instead of the dimension's name"
        )
    shown = f"{_shown(failed[0])}: {reason}" if failed else reason
    return shown if "; " in reason else f"{shown}; {remedy}"


def _convert(model: ir.Model, opset: int) -> None:
    """Convert a model to an opset.

    Raises:
        ExportError: operators of the model need a newer one; the message names them.
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
        reasons = [*needed.values()] or [f"the exporter returned opset {made}"]
        raise ExportError(f"the model cannot be expressed in opset {opset}: {', '.join(reasons)}")


def _least_opset(node: ir.Node) -> int:
    """Return the first operator set that has an operator with these inputs and attributes."""
    for opset in range(1, onnx.defs.onnx_opset_version() + 1):
        if not onnx.defs.has(node.op_type, opset, ""):
            continue
        schema = onnx.defs.get_schema(node.op_type, opset, "")
        mode = node.attributes.get_string("mode", "") if node.op_type == "GridSample" else ""
        if mode == "linear" and opset < _VOLUMES:
            continue
        if schema.min_input <= len(node.inputs) <= schema.max_input and set(node.attributes) <= set(schema.attributes):
            return opset
    return 0
