"""Recurrent layers keep a dynamic length, packed sequences included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

from ingot.errors import ParityError
from ingot.export import export_model
from ingot.runtime import EngineSpec, load_engine
from ingot.tensors import Array


class Packed(nn.Module):
    """Reads padded sequences [B, S, 5] up to their lengths [B]; returns outputs, final states and the lengths."""

    def __init__(self, kind: str, batch_first: bool, total: bool, states: bool, **options: Any):
        super().__init__()
        self.layer = getattr(nn, kind)(5, 6, batch_first=batch_first, **options)
        self.batch_first, self.total, self.states = batch_first, total, states

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        steps = x.shape[1] if self.total else None
        if not self.batch_first:
            x = x.transpose(0, 1)
        packed = rnn.pack_padded_sequence(x, lengths.cpu(), self.batch_first, enforce_sorted=False)
        rows = (2 if self.layer.bidirectional else 1) * self.layer.num_layers
        state = lengths.reshape(1, -1, 1).expand(rows, -1, 6) / 10 if self.states else None
        y, final = self.layer(packed, (state, state) if isinstance(self.layer, nn.LSTM) and self.states else state)
        y = rnn.PackedSequence(torch.tanh(y.data) + 1, y.batch_sizes, y.sorted_indices, y.unsorted_indices)
        out, counts = rnn.pad_packed_sequence(y, self.batch_first, padding_value=-2.0, total_length=steps)
        return out, final[0] if isinstance(final, tuple) else final, counts


def exported(module: nn.Module, example: dict[str, Tensor], inputs: list[str]) -> Any:
    archive = export_model(module, example, inputs=inputs)
    return load_engine(EngineSpec(archive.variants[0].path()))


def check(engine: Any, module: nn.Module, **inputs: Tensor) -> None:
    actual: dict[str, Array] = engine.run({name: tensor.numpy() for name, tensor in inputs.items()})
    expected = module(**inputs)
    for array, tensor in zip(actual.values(), expected if isinstance(expected, tuple) else (expected,), strict=True):
        torch.testing.assert_close(torch.from_numpy(array), tensor.detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "batch_first", "total", "states", "options"),
    [
        ("LSTM", True, True, False, {"bidirectional": True, "num_layers": 2}),
        ("LSTM", False, False, True, {}),
        ("GRU", True, False, False, {"bidirectional": True, "bias": False}),
        ("RNN", False, True, True, {"nonlinearity": "relu"}),
    ],
    ids=["lstm", "lstm-with-states", "gru", "rnn"],
)
@pytest.mark.matrix
def test_a_packed_sequence_keeps_its_lengths(
    kind: str, batch_first: bool, total: bool, states: bool, options: dict[str, Any]
) -> None:
    module = Packed(kind, batch_first, total, states, **options).eval()
    example = {"x": torch.randn(3, 4, 5), "lengths": torch.tensor([2, 1, 2])}
    engine = exported(module, example, ["x:float32[batch,seq=2..,5]", "lengths:int64[batch]"])
    check(engine, module, x=torch.randn(4, 9, 5), lengths=torch.tensor([3, 9, 1, 6]))
    check(engine, module, x=torch.randn(1, 7, 5), lengths=torch.tensor([5]))


class First(nn.Module):
    """Returns only the outputs of a recurrent layer."""

    def __init__(self, kind: str):
        super().__init__()
        self.layer = getattr(nn, kind)(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.matrix
def test_half_precision(kind: str) -> None:
    module = First(kind).half().eval()
    engine = exported(module, {"x": torch.randn(3, 2, 5).half()}, ["x:float16[seq,batch,5]"])
    (actual,) = engine.run({"x": (x := torch.randn(8, 4, 5).half()).numpy()}).values()
    torch.testing.assert_close(torch.from_numpy(actual), module(x).detach(), atol=5e-3, rtol=5e-3)


@pytest.mark.matrix
def test_a_missing_feature_of_the_engine_is_reported_in_its_words() -> None:
    with pytest.raises(ParityError, match="LSTM operator does not support double"):
        export_model(First("LSTM").double().eval(), inputs="x:float64[seq,batch,5]")
