"""The judge of the operator benchmark, and ten operators through its command."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.coverage.case import Tensors, nest
from benchmarks.coverage.judge import Candidate
from benchmarks.operators import accepted, table
from benchmarks.operators.judging import Fault, case, faults
from benchmarks.operators.outcome import Outcome
from benchmarks.operators.samples import Sample
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


def judged(change: Callable[[list[Array]], list[Array]] = lambda outputs: outputs) -> list[Fault]:
    module = case("pair", SAMPLES).module()

    def call(inputs: Tensors) -> list[Array]:
        return change([tensor.numpy() for tensor in module(**nest(inputs))])

    def start() -> Candidate:
        return call

    return list(faults("pair", SAMPLES, torch.float32, start))


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


def test_only_overflow_near_the_largest_number_is_accepted() -> None:
    inf, near, far = (np.array([value], np.float32) for value in (np.inf, 2e38, 2e30))
    assert accepted.reasons("add", 1e-4, near, inf) == (
        ("an intermediate result overflows within 100 times of the largest number",),
        near,
    )
    assert accepted.reasons("add", 1e-4, far, inf)[1] == inf


def test_answers_on_which_kernels_of_eager_differ_are_accepted() -> None:
    one, nan = (np.array([value], np.float32) for value in (1, np.nan))
    assert accepted.reasons("fmod", 1e-4, nan, one, one)[1] is nan
    assert accepted.reasons("fmod", 1e-4, nan, one, nan)[1] is not nan


def test_messages_have_no_folders_of_the_machine(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        message = f'Load model from {folder}/model.onnx failed; File "{ROOT}/ingot/export/program.py"'
    assert without_places(message) == 'Load model from model.onnx failed; File "ingot/export/program.py"'
    for path in (ROOT / "benchmarks" / "operators" / "results").iterdir():
        assert "/tmp/" not in path.read_text()


def test_outcomes_are_read_back_and_the_later_counts(tmp_path: Path) -> None:
    first = Outcome("add", "float32", "ingot", {"wrong": 1, "right": 5}, ["wrong: a | b"])
    table.append(first, tmp_path)
    table.append(Outcome("add", "float32", "ingot", {"right": 6}), tmp_path)
    assert [outcome.status for outcome in table.read(tmp_path)] == ["right"]
    table.write([first], tmp_path)
    assert r"| add | float32 | ingot | wrong: a \| b |" in (tmp_path / "operators.md").read_text()
    assert "| add | float32 | 1 wrong, 5 right |" in (tmp_path / "operators.md").read_text()


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
