"""Recurrent layers as single operators, so that the length of a sequence stays dynamic.

``torch.export`` unrolls ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` over the example's sequence, which fixes its length.
Within :func:`opaque`, each layer becomes one operator with the semantics of ONNX's LSTM, GRU or RNN. A packed sequence
is captured as a padded one and its lengths, which these operators accept: the shape of PyTorch's packed tensor depends
on the values of the lengths.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from onnxscript import ir, opset18
from torch import nn
from torch.nn import functional
from torch.nn.utils import rnn as packing

from ingot.export import torch_internals

Tensor = torch.Tensor
op: Any = opset18
_BLOCKS = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}
"""PyTorch's gates in ONNX's order: input, output, forget, cell; update, reset, hidden."""


@contextlib.contextmanager
def opaque() -> Iterator[None]:
    """Replace the functions that recurrent layers and the packing of sequences call."""
    check = nn.RNNBase.check_forward_args

    def check_unpacked(self: nn.RNNBase, x: Tensor, hidden: Tensor, sizes: Any) -> None:
        if not isinstance(sizes, _Lengths):  # the check would fix their batch dimension
            check(self, x, hidden, sizes)

    nn.RNNBase.check_forward_args = check_unpacked  # type: ignore[method-assign, assignment]
    try:
        with torch_internals.recurrent_functions(_Layers):
            yield
    finally:
        nn.RNNBase.check_forward_args = check  # type: ignore[method-assign]


def used_by(module: nn.Module) -> bool:
    """Return whether a module has recurrent layers."""
    return any(isinstance(part, nn.RNNBase) for part in module.modules())


class _Lengths:
    """The lengths [B] of sequences padded to S steps, in place of the ``batch_sizes`` of a packed sequence."""

    device = torch.device("cpu")  # PyTorch requires batch_sizes there

    def __init__(self, lengths: Tensor, steps: int, rows: int):
        self.lengths = lengths
        self.steps = steps
        self.rows = rows

    def __getitem__(self, index: int) -> int:
        """Return the number of sequences that have a first element, which is all of them."""
        if index != 0:
            raise NotImplementedError("the number of sequences at a later step is not known during a capture")
        return self.rows

    @functools.cached_property
    def longest(self) -> int:
        longest: Any = self.lengths.max().item()
        torch_internals.check(longest >= 0)
        torch_internals.check(longest <= self.steps)
        return longest  # type: ignore[no-any-return]

    def size(self, dim: int) -> int:
        """Return the longest sequence's length."""
        return self.longest


class _Layers:
    """PyTorch's functions with the recurrent ones replaced. Projections go to the original."""

    def __init__(self, original: Any):
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def _pack_padded_sequence(self, x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Any]:
        if batch_first:
            x = x.transpose(0, 1)
        return x, _Lengths(lengths, *x.shape[:2])  # not flattened: recurrent layers receive it unchanged

    def _pad_packed_sequence(
        self, x: Tensor, sizes: _Lengths, batch_first: bool, padding: float, total: int
    ) -> tuple[Tensor, Tensor]:
        if total is sizes.longest:  # PyTorch's default
            x = x.narrow(0, 0, total)
        else:
            x = functional.pad(x, (0, 0) * (x.dim() - 1) + (0, total - sizes.steps))
        beyond = torch.arange(x.shape[0], device=x.device)[:, None] >= sizes.lengths.to(x.device)
        x = x.masked_fill(beyond.reshape(*beyond.shape, *(1,) * (x.dim() - 2)), padding)
        return x.transpose(0, 1) if batch_first else x, sizes.lengths

    def lstm(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, states, lengths, rest = _arguments(args)
        if torch.is_tensor(states) or states[0].shape[2] != states[1].shape[2]:
            return self._original.lstm(*args)  # type: ignore[no-any-return]
        y, final = _stack("LSTM", "", x, states, lengths, *rest)
        return y, final[0], final[1]

    def gru(self, *args: Any) -> tuple[Tensor, Tensor]:
        return self._single("GRU", "", args)

    def rnn_tanh(self, *args: Any) -> tuple[Tensor, Tensor]:
        return self._single("RNN", "Tanh", args)

    def rnn_relu(self, *args: Any) -> tuple[Tensor, Tensor]:
        return self._single("RNN", "Relu", args)

    def _single(self, kind: str, activation: str, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        x, state, lengths, rest = _arguments(args)
        y, final = _stack(kind, activation, x, (state,), lengths, *rest)
        return y, final[0]


def _arguments(args: tuple[Any, ...]) -> tuple[Tensor, Any, _Lengths | None, Sequence[Any]]:
    """Return the input, the states, the lengths and the rest; the order differs for packed sequences."""
    if isinstance(args[1], _Lengths):
        data, sizes, states, *rest = args
        return data, states, sizes, (*rest, False)
    x, states, *rest = args
    return x, states, None, rest


def _stack(
    kind: str,
    activation: str,
    x: Tensor,  # [S, B, I], or [B, S, I] with batch_first
    states: Sequence[Tensor],  # each [L * D, B, H]
    sizes: _Lengths | None,
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
    lengths = None if sizes is None else sizes.lengths
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
            y, *final = torch.ops.ingot.lstm(x, w, r, b, *own, lengths)
        elif kind == "GRU":
            y, *final = torch.ops.ingot.gru(x, w, r, b, *own, lengths)
        else:
            y, *final = torch.ops.ingot.rnn(x, w, r, b, *own, activation, lengths)
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
    # Slices, because the ONNX exporter does not fold a Split of constants.
    size = weight.shape[0] // len(_BLOCKS[kind])
    return [weight[index * size : (index + 1) * size] for index in range(len(_BLOCKS[kind]))]


def _run(
    kind: str, name: str, x: Tensor, w: Tensor, r: Tensor, b: Tensor, states: Sequence[Tensor], lengths: Tensor | None
) -> Any:
    """Run PyTorch's function on weights in ONNX's gate order; outputs beyond a sequence's length are zero."""
    function = torch_internals.recurrent_function(name)
    flat = []
    for index in range(w.shape[0]):
        biases = b[index].chunk(2)
        flat += [_restore(kind, part) for part in (w[index], r[index], *biases)]
    options = (flat, True, 1, 0.0, False, w.shape[0] == 2)
    if lengths is None:
        y, *final = function(x, states if kind == "LSTM" else states[0], *options, False)
    else:
        packed = packing.pack_padded_sequence(x, lengths.cpu(), enforce_sorted=False)
        there, back = packed.sorted_indices, packed.unsorted_indices
        states = [state[:, there] for state in states]
        data, *final = function(packed.data, packed.batch_sizes, states if kind == "LSTM" else states[0], *options)
        y, _ = packing.pad_packed_sequence(packed._replace(data=data), total_length=x.shape[0])
        final = [state[:, back] for state in final]
    steps, rows = y.shape[:2]
    return y.reshape(steps, rows, w.shape[0], -1).transpose(1, 2).contiguous(), *final


@torch.library.custom_op("ingot::lstm", mutates_args=())
def _lstm(
    x: Tensor, w: Tensor, r: Tensor, b: Tensor, h: Tensor, c: Tensor, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    return _run("LSTM", "lstm", x, w, r, b, (h, c), lengths)  # type: ignore[no-any-return]


@_lstm.register_fake
def _(
    x: Tensor, w: Tensor, r: Tensor, b: Tensor, h: Tensor, c: Tensor, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    return _shape(x, r), torch.empty_like(h), torch.empty_like(c)


@torch.library.custom_op("ingot::gru", mutates_args=())
def _gru(x: Tensor, w: Tensor, r: Tensor, b: Tensor, h: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return _run("GRU", "gru", x, w, r, b, (h,), lengths)  # type: ignore[no-any-return]


@_gru.register_fake
def _(x: Tensor, w: Tensor, r: Tensor, b: Tensor, h: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return _shape(x, r), torch.empty_like(h)


@torch.library.custom_op("ingot::rnn", mutates_args=())
def _rnn(
    x: Tensor, w: Tensor, r: Tensor, b: Tensor, h: Tensor, activation: str, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return _run("RNN", f"rnn_{activation.lower()}", x, w, r, b, (h,), lengths)  # type: ignore[no-any-return]


@_rnn.register_fake
def _(
    x: Tensor, w: Tensor, r: Tensor, b: Tensor, h: Tensor, activation: str, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return _shape(x, r), torch.empty_like(h)


def _shape(x: Tensor, r: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], r.shape[0], x.shape[1], r.shape[2])  # [S, D, B, H]


def _onnx(x: Any, w: Any, r: Any, b: Any, h: Any, lengths: Any) -> tuple[list[Any], dict[str, Any]]:
    direction = "bidirectional" if r.shape[0] == 2 else "forward"
    counts = None if lengths is None else op.Cast(lengths, to=ir.DataType.INT32)
    return [x, w, r, b, counts, h], {"direction": direction, "hidden_size": int(r.shape[2])}


def _onnx_lstm(x: Any, w: Any, r: Any, b: Any, h: Any, c: Any, lengths: Any = None) -> Any:
    inputs, attributes = _onnx(x, w, r, b, h, lengths)
    return op.LSTM(*inputs, c, **attributes)


def _onnx_gru(x: Any, w: Any, r: Any, b: Any, h: Any, lengths: Any = None) -> Any:
    inputs, attributes = _onnx(x, w, r, b, h, lengths)
    return op.GRU(*inputs, linear_before_reset=1, **attributes)


def _onnx_rnn(x: Any, w: Any, r: Any, b: Any, h: Any, activation: str, lengths: Any = None) -> Any:
    inputs, attributes = _onnx(x, w, r, b, h, lengths)
    return op.RNN(*inputs, activations=[activation] * int(r.shape[0]), **attributes)


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.ingot.lstm.default: _onnx_lstm,
    torch.ops.ingot.gru.default: _onnx_gru,
    torch.ops.ingot.rnn.default: _onnx_rnn,
}
"""The operators' ONNX forms, for the exporter."""
