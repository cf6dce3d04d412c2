from __future__ import annotations

import contextlib
import json
from typing import Literal

import numpy as np
import onnx_ir as ir
import pytest

from ingot.errors import QuantizationError
from ingot.model_store import BlobFolder
from ingot.model_store.format import onnx_graph
from ingot.quant.measure.trial import Built
from ingot.quant.schemes import plan as plans
from ingot.quant.schemes.plan import Plan, Scheme
from ingot.tensors import Array
from tests.quant import graphs
from tests.quant.graphs import sqnr
from tests.quant.networks import BLOCKS, NETWORKS, PRODUCTS

PLAN = Plan("p", {"a": "static", "b": "dynamic", "c": "int8"})


def test_layers_are_kept_and_given_other_schemes() -> None:
    assert PLAN.keep(["a", "missing"]).schemes == {"b": "dynamic", "c": "int8"}
    assert PLAN.but(["a", "d"], "int4").schemes == {"a": "int4", "b": "dynamic", "c": "int8", "d": "int4"}
    assert PLAN.schemes == {"a": "static", "b": "dynamic", "c": "int8"}


def test_requirements_and_precision_of_a_plan() -> None:
    assert PLAN.needs_data
    assert not PLAN.keep(["a"]).needs_data
    assert PLAN.precision == "int8"
    assert PLAN.but(["a"], "int4").precision == "int4"


def test_the_key_depends_on_the_plan_and_not_on_its_name() -> None:
    assert PLAN.key == Plan("other", {"c": "int8", "b": "dynamic", "a": "static"}).key
    assert PLAN.key != PLAN.keep(["a"]).key
    for change in ({"method": "mse"}, {"per_channel": False}, {"migrate": 0.5}, {"block": 64}, {"activations": "s8"}):
        assert PLAN.key != Plan("p", PLAN.schemes, **change).key
    assert json.loads(json.dumps(PLAN.record()))["schemes"] == PLAN.schemes


def test_which_layers_fit_a_scheme() -> None:
    source = graphs.source_of(BLOCKS["residual block"].model())
    assert plans.fitting(source, "static") == source.names
    assert plans.fitting(source, "dynamic") == ("Gemm_y",)
    assert plans.fitting(source, "int4") == ("Gemm_y",)
    assert plans.fitting(source, "static", ["Conv_b", "no such"]) == ("Conv_b",)


def test_a_plan_for_nothing_is_refused() -> None:
    source = graphs.source_of(PRODUCTS["gemm"].model())
    with pytest.raises(QuantizationError, match="nothing in this model can be quantized in this way"):
        plans.make(source, Plan("p", {}), {})


@pytest.mark.parametrize("name", ["residual block", "attention", "perceptron", "embedding and pooling"])
def test_a_separate_scheme_for_each_layer(name: str) -> None:
    network = NETWORKS[name]
    source = graphs.source_of(network.model())
    plan = Plan("mixed", {})
    kinds: tuple[Scheme, ...] = ("static", "dynamic", "int8")
    for index, layer in enumerate(source.names):
        fitting = [kind for kind in kinds if layer in plans.fitting(source, kind)]
        if index % 4 != 3 or len(source.names) == 1:  # every fourth stays in floats
            plan = plan.but([layer], fitting[index % len(fitting)])
    seen = graphs.observed(source, network.inputs)
    expected, actual = (
        graphs.answers(model, network.inputs)["y"] for model in (source.model(), plans.make(source, plan, seen))
    )
    assert sqnr(expected, actual) > 35


def test_the_same_plan_makes_the_same_model() -> None:
    source = graphs.source_of(BLOCKS["attention"].model())
    seen = graphs.observed(source, BLOCKS["attention"].inputs)
    plan = Plan("p", {}, migrate=0.5, correct=True, method="mse").but(source.names, "static")
    first, second = (plans.make(source, plan, seen) for _ in range(2))
    assert graphs.operators(first) == graphs.operators(second)
    for name, value in first.graph.initializers.items():
        other = second.graph.initializers[name].const_value
        assert value.const_value is not None
        assert other is not None
        assert value.const_value.tobytes() == other.tobytes()


def _runs_in_openvino(model: ir.Model, plan: Plan, x: Array) -> ir.Model:
    """Return the model of a plan, after OpenVINO has run it and ONNX Runtime has answered like the original.

    Without VNNI, sums of 8-bit products saturate.
    """
    pytest.importorskip("openvino")
    source = graphs.source_of(model)
    names = plans.fitting(source, "static") if plan.compute == "f32" else ()
    plan = plan.but(names, "static")
    made = plans.make(source, plan, graphs.observed(source, {"x": x}) if names else {})
    blobs = BlobFolder.scratch()
    built = Built(blobs, onnx_graph.pack(made.clone(), blobs)[0], (), engine="openvino")
    with contextlib.closing(built.load(1)) as engine:
        assert np.isfinite(engine.run({"x": x})["y"]).all()
    assert sqnr(graphs.answers(model, {"x": x})["y"], graphs.answers(made, {"x": x})["y"]) > 10
    return made


@pytest.mark.matrix
def test_a_linear_layer_of_images_with_channels_last_runs_in_openvino() -> None:
    """As in ConvNeXt. OpenVINO failed on the addition of the bias in integers: "index '0' out of range"."""
    text = """(float[batch,6,6,8] x) => (float[batch,6,6,8] y) {
        a = MatMul(x, w) b = Add(a, v) r = Relu(b) c = MatMul(r, u) d = Add(c, v) t = MatMul(d, w) y = Add(t, d)
    }"""
    weights = {"w": graphs.random(8, 8, scale=0.3), "u": graphs.random(8, 8, seed=1, scale=0.3), "v": graphs.random(8)}
    _runs_in_openvino(graphs.graph(text, weights), Plan("p", {}, engine="openvino"), graphs.random(20, 6, 6, 8, seed=2))


@pytest.mark.parametrize("compute", ["f32", "bf16"])
def test_functions_of_a_model_are_inlined_for_openvino(compute: Literal["f32", "bf16"]) -> None:
    """A custom operator is a function of the model, which OpenVINO does not know."""
    text = "(float[batch,8] x) => (float[batch,8] y) { a = MatMul(x, w) n = Identity(a) y = MatMul(n, w) }"
    model = graphs.graph(text, {"w": graphs.random(8, 8, scale=0.5)})
    body = graphs.graph("(float[batch,8] i) => (float[batch,8] o) { s = Mul(i, i) o = Add(i, s) }", {}).graph
    model.functions[("mine", "Own", "")] = ir.Function("mine", "Own", graph=body, attributes=[])
    model.opset_imports["mine"] = 1
    (node,) = [node for node in model.graph if node.op_type == "Identity"]
    node.domain, node.op_type = "mine", "Own"
    made = _runs_in_openvino(model, Plan("p", {}, engine="openvino", compute=compute), graphs.random(20, 8, seed=2))
    assert not made.functions
    assert {node.domain for node in made.graph} == {""}
    assert plans.make(graphs.source_of(model), Plan("p", {"MatMul_a": "int8"}), {}).functions
