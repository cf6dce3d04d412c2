"""Captured programs in int8 by PT2E, and in half precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ingot.errors import InvalidArgument, QuantizationError, Unsupported
from ingot.export.lower import program as lower_program
from ingot.model_store import BlobFolder
from ingot.quant.data.samples import Samples
from ingot.quant.variants.programs import graph, half, pt2e
from tests.export.programs import Case, Lowered, archive, capture

RNG = np.random.default_rng(0)


class Net(nn.Module):
    """Two convolutions that share one ReLU, a residual, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.relu = nn.ReLU()
        self.head = nn.Linear(16, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.first(image))
        x = self.relu(self.second(x) + x)
        result: torch.Tensor = self.head(x.mean((2, 3)))
        return result


@pytest.fixture(scope="module")
def case() -> Case:
    torch.manual_seed(0)
    return capture(Net(), "image:float32[batch,3,8,8]")


@pytest.fixture(scope="module")
def samples(case: Case) -> Samples:
    return read(case, image=RNG.standard_normal((40, 3, 8, 8)).astype(np.float32))


def read(case: Case, **arrays: Any) -> Samples:
    signature = case.program.signature
    batched = type(signature)(signature.inputs, signature.outputs, "batch", signature.ranges)
    return Samples.read(batched, arrays)


def error(case: Case, program: Any, rows: int) -> float:
    """Return the error of a program, relative to the model's output."""
    image = torch.from_numpy(RNG.standard_normal((rows, 3, 8, 8)).astype(np.float32))
    with torch.no_grad():
        expected = case.eager.module(image)
        actual = program.exported.module(check_guards=False)(image)[0]
    assert actual.dtype == torch.float32
    return float((actual - expected).norm() / expected.norm())


def weights(program: Any) -> dict[str, torch.dtype]:
    held = {**program.exported.state_dict, **program.exported.constants}
    return {name.rpartition("ingot_wrapped.")[2]: item.dtype for name, item in held.items() if item.ndim > 1}


@pytest.mark.matrix
def test_half_precision_is_near_at_any_batch(case: Case) -> None:
    made = half.convert(case.program)
    assert set(weights(made).values()) == {torch.bfloat16}
    assert made.signature == case.program.signature
    assert all(error(case, made, rows) < 0.05 for rows in (1, 2, 9))
    assert error(case, half.convert(case.program, torch.float16), 3) < 0.005


@pytest.mark.matrix
def test_half_precision_keeps_layers(case: Case) -> None:
    held = weights(half.convert(case.program, keep=["head"]))
    assert held["head.weight"] == torch.float32
    assert list(held.values()).count(torch.bfloat16) == 2
    with pytest.raises(InvalidArgument, match=r"no layer 'heat' .* nearest are: head"):
        half.convert(case.program, keep=["heat"])


@pytest.mark.matrix
def test_weights_beyond_float16_stay(case: Case) -> None:
    module = Net()
    module.head.weight.data.fill_(1e6)
    made = half.convert(capture(module, "image:float32[batch,3,8,8]").program, torch.float16)
    assert weights(made)["head.weight"] == torch.float32


def test_no_half_precision_without_layers(case: Case) -> None:
    with pytest.raises(QuantizationError, match="no float32 layers"):
        half.convert(capture(nn.ReLU(), "input:float32[batch,3]").program)
    with pytest.raises(InvalidArgument, match=r"torch.bfloat16 and torch.float16"):
        half.convert(case.program, torch.float64)


@pytest.mark.matrix
def test_a_program_is_read_from_an_archive(case: Case) -> None:
    blobs = BlobFolder.scratch()
    unpacked = archive(Lowered(case, lower_program.pack(case.program, blobs), blobs)).unpacked()
    made = graph.read(unpacked.variant())
    assert list(graph.find(made.exported.module(check_guards=False).graph)) == ["first", "second", "head"]
    assert error(case, half.convert(made), 2) < 0.05


def test_pt2e_reports_a_missing_torchao(case: Case, samples: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao.quantization.pt2e.quantize_pt2e", None)
    with pytest.raises(Unsupported, match=r"pip install 'ingot-serve\[quant\]'"):
        pt2e.quantize(case.program, samples)


@pytest.mark.matrix
def test_pt2e_quantizes_every_layer(case: Case, samples: Samples) -> None:
    pytest.importorskip("torchao")
    made = pt2e.quantize(case.program, samples)
    assert made.layers == ("first", "second", "head")
    assert made.operators == {"conv2d": 2, "linear": 1}
    assert all(0 < error(case, made.program, rows) < 0.1 for rows in (1, 2, 9))


@pytest.mark.matrix
def test_pt2e_keeps_layers(case: Case, samples: Samples) -> None:
    pytest.importorskip("torchao")
    assert pt2e.quantize(case.program, samples, keep=["second"]).layers == ("first", "head")
    with pytest.raises(InvalidArgument, match="no layer 'third'"):
        pt2e.quantize(case.program, samples, keep=["third"])


def test_pt2e_computes_ranges_per_call_only_for_linear_layers(case: Case, samples: Samples) -> None:
    pytest.importorskip("torchao")
    made = pt2e.quantize(case.program, samples, dynamic=True)
    assert made.layers == ("head",)
    assert 0 < error(case, made.program, 3) < 0.1


def test_pt2e_refuses_to_have_done_nothing(case: Case, samples: Samples) -> None:
    pytest.importorskip("torchao")
    with pytest.raises(QuantizationError, match="torchao found no layers"):
        pt2e.quantize(case.program, samples, keep=["first", "second", "head"])
    plain = capture(nn.Conv1d(2, 2, 1), "input:float32[batch,2,4]")
    with pytest.raises(QuantizationError, match="dynamically"):
        pt2e.quantize(plain.program, read(plain, input=np.ones((4, 2, 4), np.float32)), dynamic=True)


@pytest.mark.long
def test_a_compiled_pt2e_model_accepts_any_batch(case: Case, samples: Samples) -> None:
    pytest.importorskip("torchao")
    made = pt2e.quantize(case.program, samples)
    blobs = BlobFolder.scratch()
    lowered = Lowered(case, pt2e.pack(made.program, blobs), blobs)
    engine = lowered.engine()
    try:
        for rows in (1, 2, 9):
            image = RNG.standard_normal((rows, 3, 8, 8)).astype(np.float32)
            with torch.no_grad():
                expected = case.eager.module(torch.from_numpy(image)).numpy()
            answer = engine.run({"image": image})["output"]
            assert np.linalg.norm(answer - expected) < 0.1 * np.linalg.norm(expected)
    finally:
        engine.close()
