"""Models for the tests of rules over ONNX graphs, and the check that a rule must pass on each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import torch
from onnx import numpy_helper
from torch import nn
from torch.export import Dim

from ingot.export.program import quiet
from ingot.export.rewrite.passes.manager import OnnxPass
from ingot.tensors import Array

SIZES = ({"batch": 2, "seq": 5}, {"batch": 3, "seq": 8})


class Several(nn.Module):
    """Independent modules, each with its own input and output: one export for all of them."""

    def __init__(self, *modules: nn.Module):
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        others = () if other is None else (other,)
        return tuple(part(x + index, *others) for index, part in enumerate(self.parts))


def export(
    module: nn.Module, *examples: torch.Tensor, opset: int | None = None, optimize: bool = True, seq: int | None = None
) -> ir.Model:
    """Lower a module whose inputs have the axis ``batch`` first and, if ``seq`` says so, ``seq`` as that axis."""
    axes: dict[int, Dim] = {0: Dim("batch", min=1, max=64)}
    if seq is not None:
        axes[seq] = Dim("seq", min=1, max=64)
    with quiet():
        program = torch.onnx.export(
            module.eval(),
            examples,
            dynamic_shapes=tuple(axes for _ in examples),
            dynamo=True,
            opset_version=opset,
            optimize=optimize,
            verbose=False,
        )
    assert program is not None
    return program.model


def parse(text: str, opset: int = 20, weights: Mapping[str, Array] | None = None) -> ir.Model:
    """Read a graph in ONNX's own text form; ``weights`` are further initializers."""
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}, "com.microsoft": 1]> {text}')
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in (weights or {}).items())
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


def floats(*shape: int) -> Array:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def operators(model: ir.Model) -> Counter[str]:
    return Counter(f"{node.domain}.{node.op_type}".lstrip(".") for node in model.graph.all_nodes())


def run(model: ir.Model, sizes: Mapping[str, int], *, optimized: bool = True) -> dict[str, Array]:
    """Run a model in plain ONNX Runtime on random inputs, the same for the same sizes."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(7)
    feed = {}
    for node in session.get_inputs():
        shape = [dim if isinstance(dim, int) else sizes[dim] for dim in node.shape]
        kind = np.float16 if "float16" in node.type else np.float32
        whole = "int" in node.type or "bool" in node.type
        values = rng.integers(0, 2, shape) if whole else rng.standard_normal(shape)
        feed[node.name] = np.asarray(values).astype(np.int64 if "int" in node.type else bool if whole else kind)
    return dict(zip([node.name for node in session.get_outputs()], session.run(None, feed), strict=True))


def contract(model: ir.Model) -> list[tuple[str | None, ir.DataType | None, str]]:
    return [(value.name, value.dtype, str(value.shape)) for value in (*model.graph.inputs, *model.graph.outputs)]


def apply(
    rule: OnnxPass,
    model: ir.Model,
    matches: int,
    *,
    sizes: Sequence[Mapping[str, int]] = SIZES,
    tolerance: float = 2e-6,
    optimized: bool = True,
) -> ir.Model:
    """Run a rule that must find ``matches`` places, and compare its result with the model at several sizes."""
    given = ir.to_proto(model).SerializeToString()
    result = rule(model)
    assert ir.to_proto(model).SerializeToString() == given, "the rule has changed the model that it was given"
    assert result.matches == matches, operators(result.graph)
    assert contract(result.graph) == contract(model)
    for size in sizes:
        expected, actual = run(model, size, optimized=optimized), run(result.graph, size)
        for name, array in expected.items():
            assert actual[name].dtype == array.dtype
            np.testing.assert_allclose(actual[name], array, rtol=1e-5, atol=tolerance, err_msg=f"{name} at {size}")
    return result.graph


def untouched(rule: OnnxPass, model: ir.Model, sizes: Sequence[Mapping[str, int]] = SIZES) -> None:
    """Check that a rule leaves a model as it is."""
    assert operators(apply(rule, model, 0, sizes=sizes)) == operators(model)
