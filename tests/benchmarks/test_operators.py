"""The judge of the operator benchmark, and ten operators through its command."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from benchmarks.coverage.case import Tensors, nest
from benchmarks.coverage.judge import Candidate
from benchmarks.operators import accepted, table
from benchmarks.operators.judging import Fault, case, faults
from benchmarks.operators.outcome import Outcome
from benchmarks.operators.samples import TENSOR, Call, Sample, samples
from benchmarks.operators.worker import without_places
from ingot.tensors import Array
from tests.support import ROOT


class Logarithm(nn.Module):
    """Accepts no negative number, as an operator that eager refuses for some values."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        if bool((x < 0).any()):
            raise ValueError("negative")
        return (x.log(),)


class Sine(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x.sin(),)


def sample(build: Callable[[], nn.Module]) -> Sample:
    tensor = torch.rand(3, 2)
    return Sample("[3, 2]", build, (tensor,), (tensor / 2,), (0,), "n", each=True)


SAMPLES = [sample(Logarithm), sample(Sine)]


def judged(
    change: Callable[[list[Array]], list[Array]] = lambda outputs: outputs, dtype: torch.dtype = torch.float32
) -> list[Fault]:
    module = case("pair", SAMPLES).module()

    def call(inputs: Tensors) -> list[Array]:
        return change([tensor.numpy() for tensor in module(**nest(inputs))])

    def start() -> Candidate:
        return call

    return list(faults("pair", SAMPLES, dtype, start))


def test_a_group_equals_itself_where_eager_refuses_some_values() -> None:
    assert judged() == []


def test_a_wrong_element_is_named_with_its_input() -> None:
    def change(outputs: list[Array]) -> list[Array]:
        outputs[1][np.isnan(outputs[1])] = 0
        return outputs

    found = judged(change)
    assert {fault.sample for fault in found} == {1}
    assert "for values 'special', size 33: nan became 0.0 for inf" in found[0].text


def test_small_values_are_judged_by_their_own_size() -> None:
    assert any("'special'" in fault.text for fault in judged(lambda outputs: [outputs[0], outputs[1] + 1e-7]))


def why(name: str, expected: Array, actual: Array, *notes: str, **kwargs: Any) -> accepted.Reasons:
    return accepted.reasons(1e-4, accepted.Difference(name, expected, actual, **kwargs), notes)


def test_only_overflow_near_the_largest_number_is_accepted() -> None:
    inf, near, far = (np.array([value], np.float32) for value in (np.inf, 2e38, 2e30))
    assert why("add", near, inf).rest is near
    assert why("add", near, inf).accepted == ("an intermediate result overflows close to the largest number",)
    assert why("add", far, inf).rest == inf
    assert why("add", near, -inf).rest == -inf
    half = np.array([1000], np.float16)
    assert why("add", half, half * np.float16(np.inf)).rest is not half


def test_only_tiny_numbers_count_as_zero() -> None:
    tiny, small, half = np.array([1e-37], np.float32), np.array([1e-30], np.float32), np.array([5e-3], np.float16)
    assert why("mul", tiny, tiny * 0).rest is tiny
    assert why("mul", small, small * 0).rest is not small
    assert why("mul", half, half * 0).rest is not half


def test_the_answer_of_eagers_other_kernel_is_accepted() -> None:
    one, two, nan = (np.array([value], np.float32) for value in (1, 2, np.nan))
    assert why("fmod", nan, one, other=one).rest is nan
    assert why("fmod", nan, two, other=one).rest is not nan
    assert why("fmod", nan, one, other=nan).rest is not nan
    assert why("erf", nan, one, single=one).rest is nan
    assert why("erf", nan, two, single=one).rest is not nan


def test_bfloat16_is_judged_by_eagers_scalar_kernel_too() -> None:
    """Eager's vectorized kernel returns NaN for gelu of infinity, and its scalar kernel infinity."""
    wide = torch.full((40, 2), torch.inf)
    built = Call(torch.nn.functional.gelu, pytree.tree_structure(((0,), {})), [TENSOR], torch.bfloat16)
    tried = Sample("", Mock(return_value=built), (wide,), (wide,), (None,), "", each=False)

    def start() -> Candidate:
        return lambda inputs: [x.numpy().clip(-1e30) for x in inputs.values()]

    found = list(faults("gelu", [tried], torch.bfloat16, start))
    assert any("scalar kernels differ" in text for fault in found for text in fault.reasons)


def test_bfloat16_is_judged_by_float32_and_its_values_are_looked_up() -> None:
    """Eager's kernel returns 0 for the error function of 1e-8, and selects one of two equal values."""
    small = torch.full((20, 2), 1e-8)
    for function, single, reason in (
        (torch.erf, lambda x: [torch.erf(x.bfloat16().float()).bfloat16().float()], "bfloat16"),
        (lambda x: torch.kthvalue(x, 1), lambda x: [x[:, 0].bfloat16().float(), x[:, 0].long()], "equal values"),
    ):
        built = Call(function, pytree.tree_structure(((0,), {})), [TENSOR], torch.bfloat16)
        tried = Sample("", Mock(return_value=built), (small,), (small,), (None,), "", each=function is torch.erf)
        name = "erf" if function is torch.erf else "kthvalue"

        def start(single: Any = single) -> Candidate:
            return lambda inputs: [output.numpy() for output in single(next(iter(inputs.values())))]

        found = list(faults(name, [tried], torch.bfloat16, start))
        assert found
        assert all(reason in text for fault in found for text in fault.reasons)


@pytest.mark.matrix
@pytest.mark.skipif(not importlib.util.find_spec("expecttest"), reason="needs benchmarks/operators/requirements.txt")
def test_answers_that_eager_defines_have_samples() -> None:
    """Of no tensor, of a lazy module, of numbers, and of an operator whose reference inputs are large."""
    for name in ("eye", "signal.windows.hann", "nn.LazyConv3d", "equal", "item", "nn.functional.grid_sample"):
        found, left = samples(name, torch.float32, 2, 0)
        assert (len(found), left) == (2, []), name
        first, second = (found[0].build().eval() for _ in range(2))
        assert all(map(torch.equal, first(*found[0].tensors), second(*found[0].tensors)))
    for name, reason in (
        ("empty", "memory as it is"),
        ("cauchy", "random"),
        ("to_sparse", "sparse"),
        ("jiterator_unary", "eager refuses"),
    ):
        found, left = samples(name, torch.float32, 2, 0)
        assert found == []
        assert all(reason in text for text in left)
        assert len(left) == 2


@pytest.mark.matrix
@pytest.mark.skipif(not importlib.util.find_spec("expecttest"), reason="needs benchmarks/operators/requirements.txt")
def test_kernels_that_do_not_check_sizes_are_called_at_their_own() -> None:
    found, _ = samples("_native_batch_norm_legit", torch.float64, 2, 0)
    assert [sample.symbol for sample in found] == ["", ""]


VALUES = np.array([[2, 1, 1, np.nan], [0, 3, -0.0, np.nan]], np.float32)
ORDER = np.argsort(VALUES, 1, stable=True)


@pytest.mark.parametrize(
    ("name", "arguments", "expected", "actual", "right"),
    [
        ("sort", (1,), ORDER, [[2, 1, 0, 3], [0, 2, 1, 3]], True),
        ("sort", (1,), ORDER, [[2, 1, 0, 3], [2, 0, 1, 3]], True),
        ("sort", (1,), ORDER, [[1, 0, 2, 3], [0, 2, 1, 3]], False),
        ("sort", (1,), ORDER, [[2, 2, 0, 3], [0, 2, 1, 3]], False),
        ("sort", (1,), ORDER, [[2, 1, 0, 4], [0, 2, 1, 3]], False),
        ("argsort", (), ORDER, [[1, 2, 0, 3], [2, 1, 0, 3]], False),
        ("topk", (2, -1), [[3, 0], [3, 1]], [[3, 0], [3, 0]], False),
        ("kthvalue", (2,), [1, 0], [2, 0], True),
        ("kthvalue", (2,), [1, 0], [0, 0], False),
        ("median", (1,), [1, 0], [2, 0], True),
        ("max.reduction_with_dim", (1,), [1, 0], [2, 0], False),
    ],
)
def test_another_place_is_right_only_with_an_equal_value(
    name: str, arguments: tuple[int, ...], expected: Any, actual: Any, right: bool
) -> None:
    left, found = np.asarray(expected, np.int64), np.asarray(actual, np.int64)
    assert (why(name, left, found, arguments=(VALUES, *arguments)).rest is left) == right
    assert why(name, left, found, arguments=(VALUES, *arguments), keywords={"stable": True}).rest is not left


def test_a_note_states_only_the_differences_that_it_names() -> None:
    note = "with a NaN among the inputs, the graph's 'output_0' differs from the model's"
    inputs = [np.array([1, np.nan], np.float32)]
    expected, actual = np.array([1, np.nan], np.float32), np.array([1, 0], np.float32)
    found = why("relu", expected, actual, note, inputs=inputs, each=True)
    assert found.rest is expected
    assert found.stated == (note,)
    assert why("relu", expected, actual, inputs=inputs, each=True).rest is not expected
    assert why("relu", expected, actual + 1, note, inputs=inputs, each=True).rest[0] == 2
    assert why("relu", expected, actual, "sigmoid: within 1e-7, not relative to small results").stated == ()


def test_a_note_on_large_values_counts_in_half_precision() -> None:
    note = "grid_sampler_3d (net.py:3): at coordinates beyond 1e7 pixels, and for volumes at infinities and NaN"
    inputs = [np.array([np.inf, 1], np.float16)]
    expected, actual = np.array([np.nan], np.float16), np.array([-np.inf], np.float16)
    assert why("grid_sampler_3d", expected, actual, note, inputs=inputs).stated == (note,)


def test_the_order_of_products_counts_only_for_infinities() -> None:
    expected, actual = np.array([np.nan, 1], np.float32), np.array([np.inf, 1], np.float32)
    inputs = [np.array([[np.inf]], np.float32)]
    assert why("linalg.multi_dot", expected, actual, inputs=inputs).rest is expected
    assert why("linalg.multi_dot", expected, actual + np.float32(1), inputs=inputs).rest is not expected
    assert why("linalg.multi_dot", expected, actual).rest is not expected


def test_a_difference_above_the_tolerance_needs_a_reason() -> None:
    expected = np.array([1, 0.5], np.float32)
    actual = expected + np.array([1.2e-4, 0], np.float32)
    assert why("lstm", expected, actual, floor=1.0).rest is not expected
    note = "lstm (net.py:3): states within 1e-6, not relative to small results"
    assert why("lstm", expected, actual, note, floor=1.0).stated == ()
    near = expected + np.array([9e-7, 0], np.float32)
    assert why("lstm", expected, near, note, floor=1e-3).stated == (note,)


def test_a_shape_differs_only_by_a_note_and_for_its_values() -> None:
    note = "unique_dim (net.py:3): rows that hold a NaN may count as equal"
    rows = np.array([[np.nan], [np.nan]], np.float32)
    assert why("unique", rows, rows[:1], note, inputs=[rows]).stated == (note,)
    assert why("unique", rows, rows[:1], note, inputs=[np.ones((2, 1), np.float32)]).rest is not rows
    assert why("unique", rows, rows[:1], inputs=[rows]).rest is not rows


def test_an_output_of_a_coarser_type_is_judged_by_its_own_tolerance() -> None:
    def found(dtype: torch.dtype, error: float) -> list[Fault]:
        return judged(lambda outputs: [(output * (1 + error)).astype(np.float32) for output in outputs], dtype)

    assert not found(torch.float64, 5e-5)
    assert found(torch.float64, 5e-4)
    assert not found(torch.float16, 5e-4)


def test_zeros_of_the_other_sign_are_listed() -> None:
    found = judged(lambda outputs: [outputs[0], np.where(outputs[1] == 0, np.float32(-0.0), outputs[1])])
    assert {fault.reasons for fault in found} == {(accepted.ZERO,)}


def test_messages_have_no_folders_of_the_machine(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        message = f'Load model from {folder}/model.onnx failed; File "{ROOT}/ingot/export/program.py"'
    assert without_places(message) == 'Load model from model.onnx failed; File "ingot/export/program.py"'
    for path in (ROOT / "benchmarks" / "operators" / "results").iterdir():
        assert "/tmp/" not in path.read_text()


def test_the_messages_of_the_worst_samples_are_kept() -> None:
    outcome = Outcome("add", "float32", "ingot")
    for status in ("bounded", "refused", "bounded", "wrong"):
        outcome.add(status, message="here")
    assert outcome.messages == ["wrong: here", "refused: here", "bounded: here"]


def test_outcomes_are_read_back_and_the_later_counts(tmp_path: Path) -> None:
    first = Outcome("add", "float32", "ingot", {"wrong": 1, "right": 5}, ["wrong: a | b"])
    table.append(first, tmp_path)
    table.append(Outcome("add", "float32", "ingot", {"right": 6}), tmp_path)
    assert [outcome.status for outcome in table.read(tmp_path)] == ["right"]
    table.write([first], tmp_path)
    assert "Ran: ingot 1." in (tmp_path / "operators.md").read_text()
    assert r"| add | float32 | ingot | wrong: a \| b |" in (tmp_path / "operators.md").read_text()
    assert "| add | float32 | 1 wrong, 5 right |" in (tmp_path / "operators.md").read_text()


def test_the_page_counts_refusals_by_reason(tmp_path: Path) -> None:
    outcomes = [
        Outcome("i0", "float32", "ingot", {"refused": 1}, ["refused: (): there is no translation of prims.i0"]),
        Outcome("chunk", "float32", "ingot", {"refused": 1}, ["refused: (): fixes 'n' at 4, its size"]),
        Outcome("empty", "bool", "ingot", {"unjudged": 1}, ["unjudged: the answer is memory as it is"]),
    ]
    table.write(outcomes, tmp_path)
    page = (tmp_path / "operators.md").read_text()
    assert "| refused | an operator has no ONNX form | 0 | 1 |" in page
    assert "| refused | the code needs the size that it was captured at, or a narrower range | 0 | 1 |" in page
    assert "| unjudged | the answer is memory as it is | 1 | 0 |" in page


@pytest.mark.matrix
@pytest.mark.skipif(not importlib.util.find_spec("expecttest"), reason="needs benchmarks/operators/requirements.txt")
def test_ten_operators_are_right_and_what_is_known_is_not_run_again(tmp_path: Path) -> None:
    names = "add,atan2,clamp,cumsum,floor_divide,log1p,nn.Linear,nn.LayerNorm,scatter,softmax"
    command = [sys.executable, "-m", "benchmarks.operators", "--dtypes", "float32", "--exporters", "ingot", "--only"]
    for only in (names, "add"):
        subprocess.run([*command, only, "--samples", "2", "--out", str(tmp_path)], check=True)
    assert {outcome.operator: outcome.status for outcome in table.read(tmp_path)} == dict.fromkeys(
        names.split(","), "right"
    )
