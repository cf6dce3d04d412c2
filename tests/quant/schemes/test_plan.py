from __future__ import annotations

import json

import pytest

from ingot.errors import QuantizationError
from ingot.quant.schemes import plan as plans
from ingot.quant.schemes.plan import Plan, Scheme
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
