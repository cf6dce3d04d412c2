"""The check that a rule over FX graphs must pass on a model, and helpers to inspect a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from torch import fx, nn

from ingot.export.capture import exported
from ingot.export.lower import onnx as lower_onnx
from ingot.export.program import Captured, Program, Runner, quiet
from ingot.export.rewrite.passes.fx_graph import is_assert, is_identity
from ingot.export.rewrite.passes.manager import FxPass
from ingot.export.rewrite.rules.fx import TRANSLATIONS
from ingot.tensors import Array
from tests.export.programs import Case, capture


def rewrite(rule: FxPass, module: nn.Module, *inputs: str, matches: int, tolerance: float = 1e-5) -> fx.GraphModule:
    """Capture a module, rewrite it by a rule with ``matches`` matches, and compare the result with the module.

    Args:
        rule: must not modify the graph that it is passed.
        module: its inputs are described by ``inputs``, as for ``ingot export``.
        inputs: descriptions such as ``x:float32[batch,8]``.
        matches: the number that the rule must find.
        tolerance: of the difference.
    """
    return _rewrite(rule, capture(module, *inputs), matches, tolerance)


def lower(rule: FxPass, module: nn.Module, *inputs: str, matches: int, tolerance: float = 1e-5) -> ir.Model:
    """Rewrite as :func:`rewrite` does, capture the rewritten graph again, as an export does, and lower it to ONNX.

    Both must equal the module, and all named dimensions must still be dynamic.
    """
    case = capture(module, *inputs)
    again = recapture(case, _rewrite(rule, case, matches, tolerance))
    assert_equal(case, Captured(again.exported.module(), again.signature), tolerance)
    model = lower_onnx.lower(again, translations=TRANSLATIONS)
    assert_equal(case, Session(model), tolerance)
    return model


def _rewrite(rule: FxPass, case: Case, matches: int, tolerance: float) -> fx.GraphModule:
    graph = case.program.exported.module()
    assert isinstance(graph, fx.GraphModule)
    code, weights = graph.code, {name: value.clone() for name, value in graph.state_dict().items()}
    result = rule(graph)
    assert graph.code == code
    assert all(torch.equal(value, weights[name]) for name, value in graph.state_dict().items())
    assert result.matches == matches, result.graph.code
    assert_equal(case, Captured(result.graph, case.program.signature), tolerance)
    return result.graph


def recapture(case: Case, graph: fx.GraphModule) -> Program:
    """Capture a rewritten graph again; its signature must be as before, dynamic dimensions included."""
    signature, examples = case.program.signature, case.examples
    example = case.eager.tensors(examples.make(examples.default_sizes))
    traced = exported.trace(exported.positional(graph), signature.inputs, signature.ranges, example)
    names = [spec.name for spec in signature.outputs]
    again = exported.program(traced, signature.inputs, signature.ranges, names)
    assert again.signature == signature
    return again


def assert_equal(case: Case, runner: Runner, tolerance: float) -> None:
    """Compare a runner with the module of a case, at two sizes or more of every named dimension."""
    for seed, sizes in enumerate(case.examples.cases()):
        inputs = case.examples.make(sizes, seed)
        expected, actual = case.eager.run(inputs), runner.run(inputs)
        for name, array in expected.items():
            assert actual[name].dtype == array.dtype
            np.testing.assert_allclose(
                actual[name], array, rtol=tolerance, atol=tolerance, err_msg=f"{name} at {sizes}"
            )


class Session:
    """An ONNX model in ONNX Runtime as a :class:`Runner`."""

    def __init__(self, model: ir.Model):
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        self._names = [value.name or "" for value in model.graph.outputs]
        self._session = onnxruntime.InferenceSession(
            ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return dict(zip(self._names, self._session.run(self._names, dict(inputs)), strict=True))


def trace(module: nn.Module, *examples: torch.Tensor) -> fx.GraphModule:
    """Capture a module of fixed sizes; unlike a program, it may change its own buffers."""
    with quiet(), torch.no_grad():
        graph = torch.export.export(module.eval(), examples).module()
    assert isinstance(graph, fx.GraphModule)
    return graph


class Each(nn.Module):
    """A model of several functions of one input, one output per function, which is captured once for all."""

    def __init__(self, functions: Iterable[Callable[[torch.Tensor], torch.Tensor]]):
        super().__init__()
        self.functions = tuple(functions)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(function(x) for function in self.functions)


def operators(graph: fx.GraphModule) -> Counter[str]:
    """Return how often each operator that computes something occurs in a graph, such as ``aten.add.Tensor``."""
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    return Counter(str(node.target) for node in calls if not is_identity(node) and not is_assert(node))


def onnx_operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)
