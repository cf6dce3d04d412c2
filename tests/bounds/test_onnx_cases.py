"""The rules for operators, checked against the answers in the onnx package's own test cases of each operator."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.backend.test.case.node import collect_testcases

from ingot.bounds.abstract import Tensor
from ingot.bounds.analysis import Analysis, Scope
from ingot.bounds.graph import opened
from ingot.bounds.interval import Interval
from ingot.bounds.poly import Poly


@pytest.fixture(scope="module")
def cases() -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = collect_testcases()
    return [case for case in found if case.model is not None and case.data_sets]


def symbolic(kind: int, array: np.ndarray[Any, Any]) -> Tensor:
    """Return an input as the rules see it: each size but 1 is a symbol that stands for it."""
    return Tensor.of(kind, [Interval.exactly(Poly.symbol(str(dim)) if dim > 1 else dim) for dim in array.shape])


def at(poly: Poly) -> int:
    names = [size for monomial in poly.terms for name, _ in monomial for size in re.findall(r"\d+", name)]
    return poly.at({name: int(name) for name in names})


def analysed(case: Any, folder: Path, *, known: bool) -> tuple[list[str], Sequence[Tensor | None], Poly]:
    """Return the reasons, the outputs' bounds and the peak; integer inputs of a few elements are constants if known."""
    model = onnx.ModelProto.FromString(case.model.SerializeToString())
    inputs, _ = case.data_sets[0]
    found: dict[str, Tensor | None] = {}
    for item, array in zip(model.graph.input, inputs, strict=False):
        kind = item.type.tensor_type.elem_type
        if not isinstance(array, np.ndarray) or not kind:
            return ["sequences and optionals are not served"], (), Poly.of(0)
        if known and array.dtype.kind == "i" and array.size <= 16:
            model.graph.initializer.append(numpy_helper.from_array(array, item.name))
        else:
            found[item.name] = symbolic(kind, array)
    path = folder / "case.onnx"
    path.write_bytes(model.SerializeToString())
    with opened(path) as read:
        analysis = Analysis(read)
        outputs, peak = analysis.analyse(read.graph, Scope(found))
    return analysis.reasons, outputs, peak


def departures(tensor: Tensor, answer: np.ndarray[Any, Any]) -> list[str]:
    found = [f"{answer.size} elements over {at(tensor.count)}"] if answer.size > at(tensor.count) else []
    if tensor.dims is not None and len(tensor.dims) != answer.ndim:
        return [*found, f"rank {answer.ndim} instead of {len(tensor.dims)}"]
    for size, dim in zip(answer.shape, tensor.dims or (), strict=False):
        low, high = (None if end is None else at(end) for end in (dim.low, dim.high))
        if (low is not None and size < low) or (high is not None and size > high):
            found.append(f"size {size} outside {low}..{high}")
    if answer.size and tensor.each.low is not None and answer.min() < -at(-tensor.each.low):
        found.append(f"value {answer.min()}")
    if tensor.items is not None and (len(tensor.items) != answer.size):
        found.append("number of values")
    for value, item in zip(answer.reshape(-1), tensor.items or (), strict=False):
        if item.high is not None and value > at(item.high) + (0 if value >= 0 else 1):
            found.append(f"value {value} over {at(item.high)}")
    return found


@pytest.mark.one_case
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.matrix
def test_no_output_is_larger_than_its_bounds(cases: list[Any], tmp_path: Path, known: bool) -> None:
    wrong, bounded = [], 0
    for case in cases:
        reasons, outputs, peak = analysed(case, tmp_path, known=known)
        if reasons or case.name == "test_constant":  # constants count as weights
            continue
        bounded += 1
        answers = case.data_sets[0][1]
        total = sum(array.nbytes for array in answers if isinstance(array, np.ndarray) and array.dtype != object)
        problems = [f"peak {at(peak)} for {total}"] if at(peak) < total else []
        for output, answer in zip(outputs, answers, strict=False):
            if isinstance(answer, np.ndarray):
                problems += departures(output, answer) if output is not None else ["unknown"]
        wrong += [f"{case.name}: {problem}" for problem in problems]
    assert wrong == []
    assert bounded > (1400 if known else 1300)
