from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import pytest

from ingot.errors import ExportError
from ingot.export.rewrite import rules
from ingot.export.rewrite.passes.manager import PassManager
from ingot.export.rewrite.passes.onnx import OnnxRule, PatternRule, Replacement
from ingot.export.rewrite.rules.onnx import RULES
from tests.export.rewrite.rules.onnx.support import apply, contract, operators, parse
from tests.support import ROOT

TEXT = "g (float[batch,4] x) => (float[batch,4] y) { a = Neg(x) b = Neg(a) y = Relu(b) }"


class DoubleNegation:
    def pattern(self, op: Any, x: Any) -> Any:
        return op.Neg(op.Neg(x))

    def check(self, context: Any, x: ir.Value) -> bool:
        return True

    def rewrite(self, op: Any, x: ir.Value) -> Any:
        return op.Identity(x)


class NoDoubleNegation(PatternRule):
    name = "no-double-negation"
    anchors = ("Neg",)

    def patterns(self, opset: int) -> Sequence[Replacement]:
        return (DoubleNegation(),)


class Renaming(OnnxRule):
    name = "renaming"

    def rewrite(self, model: ir.Model) -> int:
        model.graph.outputs[0].name = "other"
        return 1


class Forgetting(OnnxRule):
    """Loses the shapes of inputs and outputs, as many rewrites do."""

    name = "forgetting"

    def rewrite(self, model: ir.Model) -> int:
        for value in (*model.graph.inputs, *model.graph.outputs):
            value.shape = None
        return 1


def test_a_rule_of_ones_own_is_a_pattern_and_its_replacement() -> None:
    assert operators(apply(NoDoubleNegation(), parse(TEXT), 1)) == {"Identity": 1, "Relu": 1}


def test_shapes_of_inputs_and_outputs_survive_a_rewrite() -> None:
    model = parse(TEXT)
    assert contract(Forgetting()(model).graph) == contract(model)


def test_a_rule_that_renames_an_output_is_left_out() -> None:
    model = parse(TEXT)
    with pytest.raises(ExportError, match="renamed"):
        Renaming()(model)
    kept, records = PassManager((Renaming(), NoDoubleNegation()), lambda graph: 0.0).run(model)
    assert [bool(record.rejected) for record in records] == [True, False]
    assert operators(kept) == {"Identity": 1, "Relu": 1}


def test_rules_of_the_onnx_domain_alone_run_by_default() -> None:
    names = {rule.name for rule in rules.select()[1]}
    assert "dequant-matmul" not in names
    assert names | {"dequant-matmul"} == {rule.name for rule in rules.select(["all"])[1]}


def test_the_example_of_the_documentation_works() -> None:
    page = (ROOT / "docs" / "guides" / "make" / "write-a-rule.md").read_text()
    code = re.search(r"```py\n(.*?)```", page, re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code[1], names)
    model = parse(
        """g (float[batch,4] x) => (float[batch,4] y)
        <float zero = {0}, float three = {3}, float six = {6}> {
            shifted = Add(three, x)
            clipped = Clip(shifted, zero, six)
            product = Mul(x, clipped)
            y = Div(product, six)
        }"""
    )
    assert operators(apply(names["HardSwishRule"](), model, 1)) == {"HardSwish": 1}


def test_every_rule_is_documented() -> None:
    page = (ROOT / "docs" / "guides" / "make" / "rules.md").read_text()
    for rule in RULES:
        default = "yes" if rule.default else "no"
        text = re.search(rf"^- `{rule.name}` finds (.+?)(?=^- |\n\n)", page, re.MULTILINE | re.DOTALL)
        assert text, rule.name
        assert " ".join(text[1].split()).endswith(f"On by default: {default}"), rule.name
