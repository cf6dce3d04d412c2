"""A definition of an operator: its registration in PyTorch, and definitions that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ingot
from ingot.errors import ExportError, InvalidArgument
from ingot.export.rewrite import ops as package
from tests.export.rewrite.ops import operators as ops


def test_it_is_called_as_the_function_was() -> None:
    x, weight = torch.randn(3, 4), torch.ones(4)
    expected = ops.gated_norm.body(x, x, weight, 0.5)
    for called in (ops.gated_norm, torch.ops.tests.gated_norm):
        assert torch.equal(called(x, gate=x, weight=weight, eps=0.5), expected)
    assert ops.gated_norm.__doc__ == ops.gated_norm.body.__doc__


def test_its_shapes_are_known_without_its_values() -> None:
    x = torch.empty(3, 4, device="meta", dtype=torch.float16)
    assert [(value.shape, value.dtype) for value in ops.add_norm(x, x)] == [((3, 4), torch.float16)] * 2
    assert ops.square_plus(x, 1.0).shape == (3, 4)


def test_it_is_found_by_what_graphs_call() -> None:
    assert package.defined(torch.ops.tests.scale.default) is ops.scale
    assert package.defined(torch.ops.aten.add.Tensor) is None
    assert package.defined("output") is None


@pytest.mark.one_case
@pytest.mark.parametrize("operator", [ops.gated_norm, ops.add_norm, ops.shuffle])
def test_it_passes_the_checks_of_pytorch_on_its_example(operator: package.Op[Any, Any]) -> None:
    operator.check()


def test_it_is_checked_on_given_arguments() -> None:
    x = torch.randn(3, 4)
    ops.mix.check(x, None, [x], [1], to=torch.float64)

    @ingot.op("tests::part")
    def part(x: Tensor) -> Tensor:
        return x[:, :2]

    with pytest.raises(ExportError, match=r"operator 'tests::part' fails torch\.library\.opcheck: .*alias"):
        part.check(x)
    with pytest.raises(InvalidArgument, match="operator 'tests::scale' has no example"):
        ops.scale.check()


def test_a_definition_can_be_fixed_and_redefined() -> None:
    def twice(x: Tensor) -> Tensor:
        return x * 3

    def mended(x: Tensor) -> Tensor:
        return x * 2

    ingot.op("tests::twice")(twice)
    again = ingot.op("tests::twice")(mended)
    assert again(torch.ones(1)) == torch.ops.tests.twice(torch.ones(1)) == 2


def test_those_with_an_example_have_a_rule() -> None:
    names = {rule.name for rule in package.rules()}
    assert {"tests::gated_norm", "tests::add_norm", "tests::shuffle"} <= names
    assert "tests::scale" not in names


def untyped(x):  # type: ignore[no-untyped-def]
    return x


def variadic(*x: Tensor) -> Tensor:
    return x[0]


def mapping(x: dict) -> Tensor:  # type: ignore[type-arg]
    return x["a"]  # type: ignore[no-any-return]


def listed(x: Tensor) -> list[Tensor]:
    return [x]


def counted(x: Tensor) -> tuple[Tensor, int]:
    return x, 1


def nothing(x: Tensor) -> None:
    return None


def fine(x: Tensor) -> Tensor:
    return x + 1


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("tests::bad", untyped, "'tests::bad' cannot be an operator: Parameter x must have a type annotation"),
        ("tests::bad", variadic, "We do not support positional-only args, varargs"),
        ("tests::bad", mapping, "Parameter x has unsupported type"),
        ("tests::bad", listed, "it must return a tensor or a tuple of tensors"),
        ("tests::bad", counted, "it must return a tensor or a tuple of tensors"),
        ("tests::bad", nothing, "it must return a tensor or a tuple of tensors"),
        ("bad", fine, "'bad' cannot name an operator; write namespace::name"),
        ("tests::bad-name", fine, "cannot name an operator"),
        ("aten::relu", fine, "PyTorch already has an operator 'aten::relu'"),
    ],
)
def test_invalid_operators(name: str, body: Callable[..., Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        ingot.op(name)(body)
    assert not hasattr(torch.ops.tests, "bad")


def test_a_native_operator_has_a_domain() -> None:
    with pytest.raises(InvalidArgument, match="'BiasGelu' cannot name a native operator; write domain::Name"):
        ingot.op("tests::bad", native="BiasGelu")
