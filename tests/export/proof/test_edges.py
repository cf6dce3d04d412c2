"""The inputs of the proof are chosen for what a module does: wrong graphs of modules with a rare branch are noticed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ingot.errors import IngotError, ParityError
from ingot.export import export_model, pipeline
from ingot.export.capture import exported
from ingot.export.program import Captured
from ingot.export.proof.examples import Edge, Examples
from ingot.export.proof.parity import prove
from ingot.tensors import DType, Signature, TensorSpec
from tests.export.models import Function
from tests.export.proof.mutants import CASES, Called, mutants
from tests.export.proof.test_generated_inputs import notes
from tests.export.test_soundness import Runs

SAMPLE = ("far_threshold", "one_column", "two_inputs", "hidden_threshold", "clamp", "norm_eps", "integer_divide")
# Wrong graphs that differ at no input that the model can get, or only where rounding decides.
UNNOTICED = {
    "celsius": ("ge for gt",),
    "hidden_threshold": ("ge for gt",),
    "sum_threshold": ("ge for gt",),
    "logarithm_threshold": ("ge for gt",),
    "masked_mean": ("1e-08 for 1e-09",),
    "attention_mask": ("for -10000.0",),
}


@pytest.mark.one_case
@pytest.mark.parametrize(
    "name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.matrix) for name in CASES]
)
def test_the_proof_notices_a_wrong_branch_bound_or_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_packed", lambda context, subject, captured: (context, captured))
    found: Any = export_model(Called(CASES[name].function), inputs=CASES[name].inputs)
    context, captured = found

    def unnoticed() -> Iterator[str]:
        for label, graph in mutants(exported.unguarded(captured.exported)):
            try:
                context.prove(Captured(graph, captured.signature), captured.signature)
            except IngotError:
                continue
            yield label

    assert [label for label in unnoticed() if not label.endswith(UNNOTICED.get(name, ("?",)))] == []


@pytest.mark.matrix
def test_a_condition_that_no_input_crosses_is_noted() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x.sigmoid() > 2, x.neg(), x)

    (note,) = [item for item in notes(export_model(Function(model), inputs="x:float32[batch,2]")) if "crossed" in item]
    assert re.fullmatch(
        r"no input crossed '> 2' in `return torch.where\(x.sigmoid\(\) > 2, x.neg\(\), x\)` \(test_edges.py:\d+\): "
        "the values were from 0 to 1",
        note,
    )


class LastToken(nn.Module):
    """Looks indices up in a table, and reads the row of the first that ends a text."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(1000, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids)[torch.arange(len(ids)), (ids == 777).int().argmax(1)]  # type: ignore[no-any-return]


@pytest.mark.matrix
def test_indices_are_drawn_among_the_numbers_that_they_are_compared_with() -> None:
    assert not [item for item in notes(export_model(LastToken(), inputs="ids:int64[batch,seq]")) if "crossed" in item]


@pytest.mark.matrix
def test_masks_pad_all_samples_at_the_end() -> None:
    """As encoders require that drop padded positions: random masks of many samples have gaps in one of them."""

    class Padded(nn.Module):
        def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            gaps = (hidden[:, :-1] & ~hidden[:, 1:]).sum()
            same = (~hidden).all() | hidden.all()
            return torch.where(gaps + 9 * same < 1, x.neg(), x)

    archive = export_model(Padded(), inputs=["x:float32[8,9]", "hidden:bool[8,9]"])
    assert not [item for item in notes(archive) if "crossed" in item or "both sides" in item]


@pytest.mark.matrix
def test_a_value_that_rounding_decides_does_not_refuse_an_export() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return ((x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)).sign()

    assert export_model(Function(model), inputs="x:float32[batch,7]").variants


@pytest.mark.matrix
def test_values_that_half_precision_lacks_are_tried_without_a_warning() -> None:
    assert export_model(Function(lambda x: torch.where(x > 60000, x, -x)), inputs="x:float16[batch,4]").variants


def test_a_difference_at_an_infinity_is_noted_and_one_at_a_threshold_refused() -> None:
    signature = Signature((TensorSpec("x", DType.FP32, ("n",)),), (TensorSpec("y", DType.FP32, ("n",)),))
    x = np.array([1, np.inf], np.float32)
    examples, remarks = Examples(signature.inputs, {}), list[str]()
    clipped = Runs(lambda x: np.minimum(x, np.float32(1e30)))
    for edge, refused in ((Edge({"x": x}, extreme=True), False), (Edge({"x": x}), True)):
        with pytest.raises(ParityError) if refused else contextlib.nullcontext():
            prove(Runs(lambda x: x), clipped, signature, examples.with_edges([edge]), remark=remarks.append)
    assert len(remarks) == 1
    assert "the largest integers among the inputs, the exported graph does not equal" in remarks[0]
