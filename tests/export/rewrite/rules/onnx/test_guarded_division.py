from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from ingot.export.rewrite.rules.onnx import GuardedDivision
from ingot.tensors import Array
from tests.export.rewrite.rules.onnx.support import contract, operators, parse, untouched

GUARDED = {"Div": 1, "Where": 2, "Equal": 1, "Mul": 1, "Constant": 2}
INTEGERS: dict[str, np.dtype[Any]] = {"int32": np.dtype(np.int32), "int64": np.dtype(np.int64)}


def division(kind: str = "int64", body: str = "y = Div(a, b)", inputs: str = "", opset: int = 20) -> ir.Model:
    inputs = inputs or f"{kind}[batch,3] a, {kind}[3] b"
    return parse(f"g ({inputs}) => ({kind}[batch,3] y) {{ {body} }}", opset)


def guarded(model: ir.Model, matches: int = 1) -> ir.Model:
    """Apply the rule, whose result must be guarded: otherwise running it would end the tests."""
    result = GuardedDivision()(model)
    assert result.matches == matches
    assert contract(result.graph) == contract(model)
    assert operators(result.graph)["Where"] >= 2 * matches
    return result.graph


def run(model: ir.Model, **inputs: Array) -> Array:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, inputs)[0])


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize("opset", [9, 20])
def test_the_least_value_by_minus_one_is_the_least_value(kind: str, opset: int) -> None:
    model = guarded(division(kind, opset=opset))
    assert operators(model) == GUARDED
    limits = np.iinfo(INTEGERS[kind])
    least, most = int(limits.min), int(limits.max)
    rows = [[least, most, 7], [-7, least, 0], [least, 1, least + 1]]
    for divisors in ([-1, -1, -1], [-1, 1, 2], [least, -2, -1], [most, -1, 3]):
        expected = [[truncated(a, b, least) for a, b in zip(row, divisors, strict=True)] for row in rows]
        found = run(model, a=np.array(rows, limits.dtype), b=np.array(divisors, limits.dtype))
        assert found.tolist() == expected


def truncated(a: int, b: int, least: int) -> int:
    """Return a / b, rounded towards zero, and wrapped around as in two's complement."""
    quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return (quotient - least) % (-2 * least) + least


def test_a_division_by_zero_is_still_an_error() -> None:
    model = guarded(division())
    with pytest.raises(Exception, match=r"(?i)zero"):
        run(model, a=np.ones((1, 3), np.int64), b=np.zeros(3, np.int64))


@pytest.mark.parametrize(
    "body",
    [
        "c = Constant <value = int64[3] {1, -1, 2}> () y = Div(a, c)",
        "c = Shape(a) d = Cast <to = 7> (b) e = Neg(c) y = Div(a, d)",
        "c = Constant <value = int64 {-9223372036854775808}> () d = Div(c, b) y = Add(a, d)",
    ],
    ids=["a constant with -1", "a divisor of unknown sign", "a constant least value"],
)
def test_divisions_that_could_trap_are_guarded(body: str) -> None:
    model = guarded(division(body=body))
    least = np.full((2, 3), np.iinfo(np.int64).min)
    assert run(model, a=least, b=np.full(3, -1)).shape == (2, 3)


@pytest.mark.parametrize(
    "model",
    [
        division(body="c = Constant <value = int64[3] {1, -2, 2}> () y = Div(a, c)", inputs="int64[batch,3] a"),
        division(body="c = Shape(a) d = Gather <axis = 0> (c, i) y = Div(a, d)", inputs="int64[batch,3] a, int64 i"),
        division(body="c = Size(a) d = Div(c, b) y = Add(a, d)"),
        division("float"),
        division("int32", body="y = Mod(a, b)"),
    ],
    ids=["a constant divisor", "a size as divisor", "a size as dividend", "floats", "Mod"],
)
def test_divisions_that_cannot_trap_are_left(model: ir.Model) -> None:
    assert GuardedDivision()(model).matches == 0


def test_a_guarded_division_is_not_guarded_twice() -> None:
    model = guarded(division())
    untouched_again = GuardedDivision()(model)
    assert untouched_again.matches == 0


def test_divisions_in_branches_and_of_undeclared_types_are_guarded() -> None:
    body = """
        c = ReduceSum <keepdims = 0> (a)
        zero = Constant <value = int64 {0}> ()
        positive = Greater(c, zero)
        y = If (positive) <
            then_branch = g1 () => (int64[batch,3] y1) { x = Add(a, a) y1 = Div(x, b) },
            else_branch = g2 () => (int64[batch,3] y2) { y2 = Identity(a) }
        >
    """
    model = division(body=body)
    for node in model.graph.all_nodes():
        for value in node.outputs:
            if value.name in ("x", "y1"):
                value.type = None
    found = guarded(model)
    least = np.full((2, 3), np.iinfo(np.int64).min)
    np.testing.assert_array_equal(run(found, a=-(least + 1), b=np.full(3, -1)).shape, (2, 3))


def test_a_quotient_that_is_also_used_inside_keeps_its_name() -> None:
    model = parse("g (int64[n] a, int64[n] b) => (int64[n] q, int64[n] y) { q = Div(a, b) y = Add(q, a) }")
    found = guarded(model)
    least = np.full(2, np.iinfo(np.int64).min)
    np.testing.assert_array_equal(run(found, a=least, b=np.full(2, -1)), least)


@pytest.mark.parametrize("opset", [7, 8])
def test_operator_sets_without_where_are_left(opset: int) -> None:
    untouched(GuardedDivision(), division(opset=opset, body="c = Neg(b) d = Div(a, a) y = Mul(d, a)"), sizes=())
