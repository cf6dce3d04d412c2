from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from ingot.export.rewrite.rules.onnx import DeadBranches
from tests.export.rewrite.rules.onnx.support import apply, export, floats, operators, parse, untouched


class Choice(nn.Module):
    """A branch that a buffer decides."""

    raised: torch.Tensor
    step: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("raised", torch.tensor(True))
        self.register_buffer("step", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, down = (lambda x, step: x + step), (lambda x, step: x - step)
        return torch.cond(self.raised, up, down, (x, self.step))  # type: ignore[no-any-return]


def choice(
    then: str = "t = Relu(x)", condition: str = "1", before: str = "", after: str = "y = Exp(r)", constants: str = ""
) -> ir.Model:
    return parse(
        f"""g (float[batch,4] x) => (float[batch,4] y) <bool c = {{{condition}}}, bool d = {{0}}{constants}> {{
            {before}
            r = If (c) <then_branch = a () => (float[batch,4] t) {{ {then} }},
                        else_branch = b () => (float[batch,4] e) {{ e = Neg(x) }}>
            {after}
        }}"""
    )


def taken(model: ir.Model) -> dict[str, int]:
    return dict(operators(apply(DeadBranches(), model, DeadBranches()(model).matches)))


@pytest.mark.matrix
def test_a_decided_branch_replaces_its_condition() -> None:
    model = export(Choice(), torch.randn(2, 4), optimize=False)
    assert operators(model)["If"] == 1
    assert taken(model) == {"Add": 1}


@pytest.mark.parametrize(("condition", "left"), [("1", "Relu"), ("0", "Neg")])
def test_the_branch_that_is_taken_stays(condition: str, left: str) -> None:
    assert taken(choice(condition=condition)) == {left: 1, "Exp": 1}


def test_a_branch_within_a_branch() -> None:
    inner = """t = If (d) <then_branch = f () => (float[batch,4] u) { u = Abs(x) },
                           else_branch = h () => (float[batch,4] w) { w = Sqrt(x2) x2 = Mul(x, x) }>"""
    inner = inner.replace("w = Sqrt(x2) x2 = Mul(x, x)", "x2 = Mul(x, x) w = Sqrt(x2)")
    assert taken(choice(inner)) == {"Mul": 1, "Sqrt": 1, "Exp": 1}


def test_names_of_the_branch_that_are_taken_already_change() -> None:
    model = choice("v = Neg(x) t = Abs(v)", after="v = Exp(r) y = Add(v, x)")
    assert taken(model) == {"Neg": 1, "Abs": 1, "Exp": 1, "Add": 1}


def test_a_branch_may_use_outer_values_and_be_an_output() -> None:
    assert taken(choice("t = Add(v, x)", before="v = Relu(x)", after="y = Identity(r)")) == {"Relu": 1, "Add": 1}


def test_a_branch_that_an_input_decides_stays() -> None:
    untouched(
        DeadBranches(),
        parse(
            """g (float[batch,4] x, bool c) => (float[batch,4] y) {
                y = If (c) <then_branch = a () => (float[batch,4] t) { t = Relu(x) },
                            else_branch = b () => (float[batch,4] e) { e = Neg(x) }>
            }"""
        ),
    )


def test_nodes_and_weights_without_use_are_removed_and_inputs_are_not() -> None:
    model = parse(
        "g (float[batch,4] x, float[batch,4] z) => (float[batch,4] y) { a = Add(x, w) b = Neg(a) y = Relu(x) }",
        weights={"w": floats(4)},
    )
    found = apply(DeadBranches(), model, 3)
    assert operators(found) == {"Relu": 1}
    assert not found.graph.initializers


def test_functions_that_are_not_called_are_removed() -> None:
    model = ir.from_proto(
        onnx.parser.parse_model(
            """<ir_version: 10, opset_import: ["": 20, "my": 1]>
            g (float[batch,4] x) => (float[batch,4] y) { y = my.outer(x) }
            <domain: "my", opset_import: ["": 20, "my": 1]> outer (a) => (b) { b = my.inner(a) }
            <domain: "my", opset_import: ["": 20]> inner (a) => (b) { b = Neg(a) }
            <domain: "my", opset_import: ["": 20]> unused (a) => (b) { b = Abs(a) }"""
        )
    )
    found = apply(DeadBranches(), model, 1)
    assert [function.name for function in found.functions.values()] == ["outer", "inner"]
