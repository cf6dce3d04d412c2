"""The cost of an export: runs of the model, captures, and evaluations of the capture's conditions."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from ingot.export import export_model
from ingot.export.capture import counterexamples
from ingot.export.capture.counterexamples import Assumption, search
from ingot.export.proof import examples, tables
from ingot.tensors import Range
from tests.export.models import Function


class Counted(nn.Module):
    """A layer that counts its input rows outside of captures."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.seen = array("q")  # which exports do not restore, unlike a list
        self.layer.register_forward_hook(self.count)

    def count(self, layer: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if not torch.compiler.is_exporting() and isinstance(rows := args[0].shape[0], int):
            self.seen.append(rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


@pytest.mark.matrix
def test_an_expensive_model_is_run_on_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = Counted().eval(), Counted().eval()
    cases = export_model(small, inputs="x:float32[batch,4]").variants[0].serving.evidence.parity[0].cases
    for module in (examples, tables):
        monkeypatch.setattr(module, "MOST_WORK", 50)
    archive = export_model(large, inputs="x:float32[batch,4]")
    assert archive.signature.batch == "batch"
    assert max(small.seen) == 33
    assert max(large.seen) == 3
    assert sum(large.seen) < sum(small.seen) / 2
    assert (cases, archive.variants[0].serving.evidence.parity[0].cases) == (7, 3)


@pytest.mark.matrix
def test_rules_that_onnx_has_too_do_not_capture_again() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 2)).eval()
    assert captures(module, "x:float32[batch,4]") == ["Capturing the graph"]


@pytest.mark.matrix
def test_a_condition_on_sizes_skips_the_route_that_asks_for_the_same() -> None:
    module = Function(lambda x: x * 2 if x.shape[1] > 3 else x + x)
    expected = ["Capturing the graph", "Capturing the graph another way: inferred"]
    assert captures(module, "x:float32[batch,width]") == expected


def captures(module: nn.Module, inputs: str) -> list[str]:
    """Return the captures that an export reports. Other tests' operators are traced too, which is not a capture."""
    steps: list[str] = []
    export_model(module, inputs=inputs, progress=steps.append)
    return [step for step in steps if step.startswith("Capturing")]


def test_the_search_keeps_its_budget_and_reports_when_it_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = itertools.count()

    def holds(sizes: Mapping[str, int]) -> bool:
        next(asked)
        return True

    monkeypatch.setattr(counterexamples, "BUDGET", 20_000)
    conditions = [Assumption(f"{index} < h*w", holds, ("h", "w")) for index in range(10)]
    _, unsure = search(conditions, {"h": 3, "w": 5}, {"h": Range(1, 256), "w": Range(1, 256)})
    assert next(asked) <= 20_000
    assert len(unsure) == 10
    assert counterexamples.short(conditions) == " (the search ran out of its budget at 2,000 combinations each)"


@pytest.mark.matrix
def test_the_note_of_an_undecided_condition_mentions_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counterexamples, "BUDGET", 1)
    module = Function(lambda x: x * 2 if x.shape[0] * x.shape[1] != 10**9 + 7 else x * 3)
    archive = export_model(module, inputs="x:float32[batch,seq]")
    notes = archive.variants[0].serving.provenance.notes
    assert any("the search ran out of its budget at 1,000 combinations each" in note for note in notes)
