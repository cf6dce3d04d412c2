"""Attention over slots of a cache, in place of that of transformers while a decoder is traced.

Models of transformers call an attention function by the name in their configuration, and give new keys and values to a
cache object. Here the cache object returns them unchanged, and the attention function makes them a node
GroupQueryAttention of ONNX Runtime, which writes them behind the past of each row, and attends to both.
Its definition is in ONNX Runtime's ContribOperators.md, of its repository https://github.com/microsoft/onnxruntime.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ingot import foreign
from ingot.errors import Unsupported
from ingot.export import torch_internals

NAME = "ingot_slots"
"""The name of the attention function in configurations of transformers."""
OPERATOR = "GroupQueryAttention"
"""The operator, in ONNX Runtime's own domain."""
HEAD_STEP = 8
"""The op's kernel needs heads of a multiple of this size."""
# Arguments of attention functions that change the result, and that the op does not have.
_UNSUPPORTED = {"s_aux": "attention sinks", "cu_seq_lens_q": "packed sequences"}
_OTHER = "its attention is not called through transformers' attention interface"


@dataclass(frozen=True)
class Shape:
    """The cache of a layer: heads, and elements of each; ``window`` is how many tokens a token sees, 0 for all."""

    kv_heads: int
    head_size: int
    window: int


@dataclass(frozen=True)
class Source:
    """What each layer of a decoder attends to besides its own tokens, as an encoder has made it.

    It has the attributes of ``transformers.Cache`` that decoders read.

    Args:
        values: keys and values of each layer in turn, [rows, kv_heads, capacity, head_size].
        lengths: the positions of each row, minus one, [rows].
        total: the largest of these, plus one, [1].
    """

    values: Sequence[Tensor]
    lengths: Tensor
    total: Tensor

    @property
    def layers(self) -> list[Any]:
        keys, values = self.values[::2], self.values[1::2]
        return [SimpleNamespace(keys=key, values=value) for key, value in zip(keys, values, strict=True)]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Return the attention of new tokens to all positions of their row, [rows, new, heads, head_size].

        The op attends to its cache alone if there are no new keys.
        """
        rows, heads, new, size = query.shape
        flat, none = query.transpose(1, 2).reshape(rows, new, -1), query.new_zeros(rows, 0, heads * size)
        found = torch.onnx.ops.symbolic(
            f"com.microsoft::{OPERATOR}",
            (flat, none, none, key, value, self.lengths, self.total),
            {"num_heads": heads, "kv_num_heads": key.shape[1], "scale": scale, "causal": 0},
            dtype=query.dtype,
            shape=flat.shape,
            version=1,
        )
        attended: Tensor = found.view(rows, new, heads, size)
        return attended


class Slots:
    """The cache of one traced call: the past of each layer, and what the layers return.

    It has the methods of ``transformers.Cache`` that decoders call.

    Args:
        past: keys and values of each layer in turn, [rows, kv_heads, capacity, head_size]; None if their sizes are not
            known yet: the new keys and values have the same ones.
        lengths: tokens of each row after the call, minus one, [rows].
        total: the largest of these, plus one, [1].
        source: of an encoder-decoder.
    """

    is_compileable = False

    def __init__(self, past: Sequence[Tensor] | None, lengths: Tensor, total: Tensor, source: Source | None = None):
        self._past, self._lengths, self.total = past, lengths, total
        self.source = source
        self._layer: int | None = None
        self._present: dict[int, tuple[Tensor, Tensor]] = {}
        self.shapes: dict[int, Shape] = {}

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: object, **kwargs: object) -> Any:
        """Remember whose keys and values these are; the op appends them."""
        if self._layer is not None or layer_idx in self._present:
            raise Unsupported(f"layer {layer_idx} shares its cache with another, or has two")
        self._layer = layer_idx
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are inputs of the graph."""
        return 0

    @property
    def present(self) -> list[Tensor]:
        """Keys and values of each layer in turn, with the new ones."""
        return [tensor for layer in sorted(self._present) for tensor in self._present[layer]]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        softcap: float,
        window: int,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of new tokens to their row, [rows, new, heads, head_size].

        ``bias`` is added to the scores, [rows, heads, new, total].
        """
        if self._layer is None and self.source is not None:
            return self.source.attend(query, key, value, scale)
        if self._layer is None:
            raise Unsupported("some attention of it has no cache, as in models that attend to other texts")
        layer, self._layer = self._layer, None
        rows, heads, new, size = query.shape
        if key.shape != value.shape:
            raise Unsupported(f"layer {layer} has keys of {key.shape[-1]} elements and values of {value.shape[-1]}")
        self.shapes[layer] = Shape(key.shape[1], size, window)
        past = (key, value) if self._past is None else self._past[2 * layer : 2 * layer + 2]
        attributes: dict[str, Any] = {
            "num_heads": heads,
            "kv_num_heads": key.shape[1],
            "scale": scale,
            "softcap": softcap,
            "local_window_size": window or -1,
        }
        flat = [tensor.transpose(1, 2).reshape(rows, new, -1) for tensor in (query, key, value)]
        attended, *present = torch.onnx.ops.symbolic_multi_out(
            f"com.microsoft::{OPERATOR}",
            (*flat, *past, self._lengths, self.total, *((None, None, None, bias) if bias is not None else ())),
            attributes,
            dtypes=(query.dtype,) * 3,
            shapes=(flat[0].shape, past[0].shape, past[1].shape),
            version=1,
        )
        self._present[layer] = (present[0], present[1])
        return attended.view(rows, new, heads, size)


_SLOTS: ContextVar[Slots] = ContextVar("slots")


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function, with the arguments of transformers' own."""
    if attention_mask is not None:
        raise Unsupported("it computes its own masks")
    for name, what in _UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise Unsupported(f"it has {what} ({name})")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attended = _SLOTS.get().attend(
        query, key, value, float(scale), float(softcap or 0), sliding_window or 0, kwargs.get("position_bias")
    )
    return attended, None


@contextlib.contextmanager
def attending(model: Any) -> Iterator[None]:
    """Let a model attend over slots in the block.

    Raises:
        Unsupported: the model's attention cannot be replaced.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)
    before = torch_internals.attention_name(model)
    with foreign.reported_as(Unsupported, _OTHER):
        model.set_attn_implementation(NAME)
    if torch_internals.attention_name(model) != NAME:
        raise Unsupported(_OTHER)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextlib.contextmanager
def slots(opened: Slots) -> Iterator[Slots]:
    """Let the attention function use these slots in the block."""
    token = _SLOTS.set(opened)
    try:
        yield opened
    finally:
        _SLOTS.reset(token)
