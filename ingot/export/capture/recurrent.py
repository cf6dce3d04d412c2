"""Recurrent layers as single operators, so that the length of what they read stays dynamic.

``torch.export`` unrolls ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` over the example's sequence, which fixes its length.
While :func:`opaque` is entered, each layer becomes one operator with the meaning of ONNX's LSTM, GRU or RNN.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from onnxscript import opset18
from torch import nn
from torch.nn.modules import rnn

Tensor = torch.Tensor
op: Any = opset18
_BLOCKS = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}
"""PyTorch's gates in ONNX's order: input, output, forget, cell; update, reset, hidden."""


@contextlib.contextmanager
def opaque() -> Iterator[None]:
    """Replace the functions that recurrent layers call."""
    layers: Any = rnn
    original = layers._VF
    layers._VF = _Layers(original)
    try:
        yield
    finally:
        layers._VF = original


def used_by(module: nn.Module) -> bool:
    """Tell whether a module has recurrent layers."""
    return any(isinstance(part, nn.RNNBase) for part in module.modules())


class _Layers:
    """``torch._VF`` with the recurrent functions replaced. Packed sequences and projections go to the original."""

    def __init__(self, original: Any):
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def lstm(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        if torch.is_tensor(args[1]) or args[1][0].shape[2] != args[1][1].shape[2]:
            return self._original.lstm(*args)  # type: ignore[no-any-return]
        x, (h, c), weights, *options = args
        y, final = _stack("LSTM", "", x, (h, c), weights, *options)
        return y, final[0], final[1]

    def gru(self, *args: Any) -> tuple[Tensor, Tensor]:
        return self._single("GRU", "", self._original.gru, args)

    def rnn_tanh(self, *args: Any) -> tuple[Tensor, Tensor]:
        return self._single("RNN", "Tanh", self._original.rnn_tanh, args)

    def rnn_relu(self, *args: Any) -> tuple[Tensor, Tensor]:
        return self._single("RNN", "Relu", self._original.rnn_relu, args)

    def _single(self, kind: str, activation: str, original: Any, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        if torch.is_tensor(args[2]):
            return original(*args)  # type: ignore[no-any-return]
        x, h, weights, *options = args
        y, final = _stack(kind, activation, x, (h,), weights, *options)
        return y, final[0]


def _stack(
    kind: str,
    activation: str,
    x: Tensor,  # [S, B, I], or [B, S, I] with batch_first
    states: Sequence[Tensor],  # each [L * D, B, H]
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, list[Tensor]]:
    directions = 2 if bidirectional else 1
    each = 4 if has_biases else 2
    if batch_first:
        x = x.transpose(0, 1)
    finals = []
    for layer in range(num_layers):
        first = layer * directions * each
        parts = [weights[first + each * index : first + each * (index + 1)] for index in range(directions)]
        w, r = (torch.stack([_reorder(kind, part[index]) for part in parts]) for index in (0, 1))
        rows = slice(layer * directions, (layer + 1) * directions)
        if has_biases:
            b = torch.stack([torch.cat([_reorder(kind, part[2]), _reorder(kind, part[3])]) for part in parts])
        else:
            b = w.new_zeros(directions, 2 * w.shape[1])
        own = [state[rows] for state in states]
        if kind == "LSTM":
            y, *final = torch.ops.ingot.lstm(x, w, r, b, *own)
        elif kind == "GRU":
            y, *final = torch.ops.ingot.gru(x, w, r, b, *own)
        else:
            y, *final = torch.ops.ingot.rnn(x, w, r, b, *own, activation)
        finals.append(final)
        x = y.transpose(1, 2).flatten(2)  # [S, D, B, H] -> [S, B, D * H]
    stacked = [torch.cat([final[index] for final in finals]) for index in range(len(states))]
    return x.transpose(0, 1) if batch_first else x, stacked


def _reorder(kind: str, weight: Tensor) -> Tensor:
    blocks = _blocks(kind, weight)
    return torch.cat([blocks[index] for index in _BLOCKS[kind]])


def _restore(kind: str, weight: Tensor) -> Tensor:
    blocks = _blocks(kind, weight)
    return torch.cat([blocks[_BLOCKS[kind].index(index)] for index in range(len(blocks))])


def _blocks(kind: str, weight: Tensor) -> list[Tensor]:
    # Slices, since the ONNX exporter does not fold a Split of constants.
    size = weight.shape[0] // len(_BLOCKS[kind])
    return [weight[index * size : (index + 1) * size] for index in range(len(_BLOCKS[kind]))]


def _run(kind: str, function: Any, x: Tensor, w: Tensor, r: Tensor, b: Tensor, states: Any) -> Any:
    """Run PyTorch's own function on weights in ONNX's order."""
    flat = []
    for index in range(w.shape[0]):
        biases = b[index].chunk(2)
        flat += [_restore(kind, part) for part in (w[index], r[index], *biases)]
    y, *final = function(x, states, flat, True, 1, 0.0, False, w.shape[0] == 2, False)
    steps, rows = y.shape[:2]
    return y.reshape(steps, rows, w.shape[0], -1).transpose(1, 2).contiguous(), *final


@torch.library.custom_op("ingot::lstm", mutates_args=())
def _lstm(x: Tensor, w: Tensor, r: Tensor, b: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _run("LSTM", torch._C._VariableFunctions.lstm, x, w, r, b, (h, c))  # type: ignore[no-any-return]


@_lstm.register_fake
def _(x: Tensor, w: Tensor, r: Tensor, b: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _shape(x, r), torch.empty_like(h), torch.empty_like(c)


@torch.library.custom_op("ingot::gru", mutates_args=())
def _gru(x: Tensor, w: Tensor, r: Tensor, b: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    return _run("GRU", torch._C._VariableFunctions.gru, x, w, r, b, h)  # type: ignore[no-any-return]


@_gru.register_fake
def _(x: Tensor, w: Tensor, r: Tensor, b: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    return _shape(x, r), torch.empty_like(h)


@torch.library.custom_op("ingot::rnn", mutates_args=())
def _rnn(x: Tensor, w: Tensor, r: Tensor, b: Tensor, h: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    function = getattr(torch._C._VariableFunctions, f"rnn_{activation.lower()}")
    return _run("RNN", function, x, w, r, b, h)  # type: ignore[no-any-return]


@_rnn.register_fake
def _(x: Tensor, w: Tensor, r: Tensor, b: Tensor, h: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return _shape(x, r), torch.empty_like(h)


def _shape(x: Tensor, r: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], r.shape[0], x.shape[1], r.shape[2])  # [S, D, B, H]


def _onnx(x: Any, w: Any, r: Any, b: Any, h: Any) -> tuple[list[Any], dict[str, Any]]:
    direction = "bidirectional" if r.shape[0] == 2 else "forward"
    return [x, w, r, b, None, h], {"direction": direction, "hidden_size": int(r.shape[2])}


def _onnx_lstm(x: Any, w: Any, r: Any, b: Any, h: Any, c: Any) -> Any:
    inputs, attributes = _onnx(x, w, r, b, h)
    return op.LSTM(*inputs, c, **attributes)


def _onnx_gru(x: Any, w: Any, r: Any, b: Any, h: Any) -> Any:
    inputs, attributes = _onnx(x, w, r, b, h)
    return op.GRU(*inputs, linear_before_reset=1, **attributes)


def _onnx_rnn(x: Any, w: Any, r: Any, b: Any, h: Any, activation: str) -> Any:
    inputs, attributes = _onnx(x, w, r, b, h)
    return op.RNN(*inputs, activations=[activation] * int(r.shape[0]), **attributes)


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.ingot.lstm.default: _onnx_lstm,
    torch.ops.ingot.gru.default: _onnx_gru,
    torch.ops.ingot.rnn.default: _onnx_rnn,
}
"""For the ONNX exporter."""
